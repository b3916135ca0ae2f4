"""Runs a step of the past on the code of today: a snapshot's tensors, and the code that the snapshot names as its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bisect_nan.answer.driver import locate
from bisect_nan.command.cases import built, run_case
from bisect_nan.command.user_code import named_in_file
from bisect_nan.errors import TargetError
from bisect_nan.finding import Finding, Phase, Verdict
from bisect_nan.recording.naming import batch_tensors
from bisect_nan.snapshots.snapshot import Snapshot

Stored = Mapping[str, torch.Tensor]


def run_again(snapshot: Snapshot, root: Path, folders: Sequence[Path]) -> Finding:
    """Run the step of a snapshot on today's code, from the weights and on the batch of that day.

    Args:
        snapshot: The step; its `entry` names a function that returns `{"model", "batch", "step"}` as a case file's `build` does.
        root: Where the path in `entry` starts.
        folders: Where that code may lie; nothing else is imported.

    Raises:
        TargetError: The entry lies elsewhere, is no such function, or its model and batch are no longer those of the snapshot.
        CodeError: Its code raised.
        RecordingError: The step cannot be recorded.
    """
    name = snapshot.entry
    case = built(named_in_file(name, root, folders), name)
    tensors = snapshot.tensors()
    stored = {
        phase: {item.name: tensors[item.value] for item in snapshot.program.placeholders if item.phase is phase}
        for phase in (Phase.PARAMETER, Phase.BUFFER, Phase.INPUT)
    }
    model: torch.nn.Module = case["model"]
    _fill(dict(model.named_parameters()), stored[Phase.PARAMETER], "parameter")
    _fill(dict(model.named_buffers()), stored[Phase.BUFFER], "buffer")
    case["batch"] = _replaced(case["batch"], stored[Phase.INPUT])
    today, _ = run_case(case, name)
    return Finding(Verdict.CLEAN) if today is None else locate(today)


@torch.no_grad()
def _fill(present: Stored, stored: Stored, kind: str) -> None:
    """Write the stored values of a model's tensors into those of today."""
    for name, tensor in stored.items():
        if not name:
            continue  # a tensor that the step holds by itself
        if name not in present or present[name].shape != tensor.shape:
            now = f"of shape {list(present[name].shape)}" if name in present else "missing"
            got = f"got the {kind} {name} of shape {list(tensor.shape)}, which in today's model is {now}"
            raise TargetError(got, "the model that the step was recorded with", "capture the step anew")
        present[name].copy_(tensor)


def _replaced(batch: Any, stored: Stored) -> Any:
    """Return a batch with the stored tensors in the places that have their names."""
    wanted = {name: tensor for name, tensor in stored.items() if name.startswith("batch")}
    if missing := sorted(wanted.keys() - dict(batch_tensors(batch)).keys()):
        got = f"got {missing[0]}, which today's batch does not have"
        raise TargetError(got, "a batch of the form that the step was recorded with", "capture the step anew")

    def stored_leaf(path: Any, leaf: Any) -> Any:
        tensor = wanted.get(f"batch{pytree.keystr(path)}")
        if tensor is None or not isinstance(leaf, torch.Tensor):
            return leaf
        return tensor.detach().clone().to(leaf.device).requires_grad_(leaf.requires_grad)

    return pytree.tree_map_with_path(stored_leaf, batch)
