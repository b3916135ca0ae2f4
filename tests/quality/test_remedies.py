"""Every remedy that the benchmark's findings call verified works in plain PyTorch, without any of this package's replay.

A changed line is written into the case's own source; left-out samples, replaced elements and a lower loss scale are done to the
batch, the model and the loss. Then the step runs eagerly, hooks, custom Functions and all.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

CASES = Path(__file__).resolve().parents[2] / "fixtures" / "corpus" / "cases"


def executed(path: Path, culprits: list[dict[str, Any]]) -> dict[str, Any]:
    """Execute a case file in which the culprits' lines are replaced by their remedies, and build the case."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for culprit in culprits:
        if culprit["remedy"]["code"]:
            old = lines[culprit["line"] - 1]
            lines[culprit["line"] - 1] = old[: len(old) - len(old.lstrip())] + culprit["remedy"]["code"]
    module = ModuleType(path.stem)
    sys.modules[path.stem] = module
    exec(compile("\n".join(lines), str(path), "exec"), module.__dict__)  # noqa: S102  (our own file)
    case: dict[str, Any] = module.build()
    return case


def repaired_batch(batch: Any, culprit: Mapping[str, Any]) -> Any:
    """Return the batch with a healthy row in the place of those that carry the fault."""
    rows = culprit["samples"]
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    sizes = [len(leaf) for leaf in leaves]
    size = max(set(sizes), key=sizes.count)
    healthy = next(row for row in range(size) if row not in rows)
    order = torch.tensor([healthy if row in rows else row for row in range(size)])

    def repair(leaf: Any) -> Any:
        return leaf[order] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == size else leaf

    return pytree.tree_map(repair, batch)


def works_eagerly(path: Path, culprits: list[dict[str, Any]]) -> bool | None:
    """Run the changed step, and tell whether loss and gradients are finite; None where the change has no form in the source."""
    case = executed(path, culprits)
    batch, scale = case["batch"], 1.0
    for culprit in culprits:
        remedy = culprit["remedy"]
        if remedy["name"] == "skip_samples":
            batch = repaired_batch(batch, culprit)
        elif remedy["name"] == "lower_loss_scale":
            scale = 2.0 ** -int(re.findall(r"2\*\*-(\d+)", remedy["text"])[0])
        elif not remedy["code"]:
            return None
    model, step, steps = case["model"], case["step"], case.get("steps", 1)
    optimizer = case["optimizer"](model) if case.get("optimizer") else None
    for number in range(steps):
        model.zero_grad()
        with torch.autocast("cpu", dtype=case.get("autocast"), enabled=case.get("autocast") is not None):
            loss = step(model, batch)
        if loss.requires_grad:
            (loss * scale).backward()
        if optimizer is not None and number + 1 < steps:
            optimizer.step()
    gradients = [parameter.grad.to_dense() for parameter in model.parameters() if parameter.grad is not None]
    return all(bool(tensor.isfinite().all()) for tensor in [loss.detach(), *gradients])


@pytest.mark.filterwarnings("ignore")
def test_verified_remedies_work_in_plain_pytorch(quality: Mapping[str, Any]) -> None:
    """No remedy that was called verified fails; a good part of them has a form that can be written down and run."""
    outcomes: dict[str, bool | None] = {}
    for entry in quality["results"]:
        culprits = (entry.get("finding") or {}).get("culprits") or []
        if culprits and all((culprit["remedy"] or {}).get("verified") for culprit in culprits):
            with warnings.catch_warnings():
                outcomes[entry["case"]] = works_eagerly(CASES / entry["case"], culprits)
    assert [case for case, works in outcomes.items() if works is False] == []
    tried = [case for case, works in outcomes.items() if works]
    assert len(tried) >= len(outcomes) // 4
