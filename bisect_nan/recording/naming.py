"""The names of what a step is given: parameters, their gradients, buffers, and the tensors of a batch by their paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_flatten_with_path, keystr

from bisect_nan.finding import Phase
from bisect_nan.recording.recorder import Recorder


def name_tensors(
    recorder: Recorder, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Tell a recorder the names of parameters, of the gradients that they have, and of buffers."""
    name_it = recorder.values.name
    for name, parameter in parameters.items():
        name_it(parameter, Phase.PARAMETER, name)
        if parameter.grad is not None:
            name_it(parameter.grad, Phase.INPUT, f"gradient of {name}")
    for name, buffer in buffers.items():
        name_it(buffer, Phase.BUFFER, name)


def name_batch(recorder: Recorder, batch: Any) -> None:
    """Tell a recorder the names of a batch's tensors."""
    for name, leaf in batch_tensors(batch):
        recorder.values.name(leaf, Phase.INPUT, name)


def batch_tensors(batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch with their path: `batch['labels']['depth']`."""
    paths, _ = pytree.tree_flatten_with_path(batch)
    return ((f"batch{pytree.keystr(path)}", leaf) for path, leaf in paths if isinstance(leaf, torch.Tensor))
