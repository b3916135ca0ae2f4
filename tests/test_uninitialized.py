"""Memory that nobody has written to: a replay reads what the recording read there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from steps import STEPS, applied
from test_replay import all_targets, replayed, same
from torch import nn
from torch.nn import functional

from bisect_nan.recording.capture import record
from bisect_nan.recording.outcome import Recording


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Fill new memory with NaN, so that what it holds is known."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(mode=False)


def kept(recording: Recording) -> list[str]:
    """Return the names of the calls whose memory was kept."""
    return [
        node.target._schema.name.removeprefix("aten::") for node in recording.program.nodes if node.memory is not None
    ]


READ: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda x: x + torch.empty(6),
    "empty_like": lambda x: x * torch.empty_like(x),
    "new_empty": lambda x: x + x.new_empty(6),
    "empty_strided": lambda x: x + torch.empty_strided((5, 6), (1, 7)),
    "empty_permuted": lambda x: x + torch.empty_permuted((5, 6), (1, 0)),
}


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("name", READ)
def test_memory_that_is_read_before_it_is_written_is_kept(name: str) -> None:
    """The fault that uninitialised memory made in the recording shows again where memory is clean."""
    recording = record(*applied(READ[name]))
    assert kept(recording) == [name]
    assert recording.observed is not None
    torch.use_deterministic_algorithms(mode=False)
    (loss,) = replayed(recording, all_targets(recording)).values()
    assert bool(torch.isnan(loss))


def test_the_kept_memory_has_the_geometry_of_the_call() -> None:
    """Strides with gaps stay, for later calls see the memory through them."""

    def function(x: torch.Tensor) -> torch.Tensor:
        holey = torch.empty_strided((5, 6), (1, 7)).copy_(x)
        gaps = torch.empty_strided((5, 6), (1, 7))
        gaps.mul_(0.0).nan_to_num_(0.0)
        return holey + gaps + gaps.as_strided((5, 6), (1, 6)).nan_to_num(0.0, 0.0, 0.0) * 0

    recording = record(*applied(function))
    (node,) = (node for node in recording.program.nodes if node.memory is not None)
    assert node.memory is not None
    assert node.memory.stride() == (1, 7)
    env = replayed(recording, all_targets(recording))
    assert float(env[recording.program.targets.loss or 0]) == recording.loss


def overwritten_through_views(x: torch.Tensor) -> torch.Tensor:
    """Write a new memory in two halves."""
    y = torch.empty(5, 6)
    y[:2] = 1.0
    y[2:] = 2.0
    return x * y


WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": functional.dropout,
    "copy": lambda x: x + torch.empty(6).copy_(torch.ones(6)),
    "fill": lambda x: x + torch.empty(5, 6).fill_(2.0),
    "draw": lambda x: x + torch.empty(5, 6).normal_(),
    "out": lambda x: x + torch.add(torch.ones(5, 6), 1, out=torch.empty(5, 6)),
    "alone": lambda x: x + torch.empty(5, 6).zero_().view(6, 5).t(),
    "unused": lambda x: x + 0 * torch.empty(5, 6).shape[0],
}


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("name", WRITTEN)
def test_memory_that_is_overwritten_first_is_not_kept(name: str) -> None:
    """Dropout's mask, copies, fills, draws and `out=` replace all of it, so nothing has to be stored."""
    assert kept(record(*applied(WRITTEN[name]))) == []


def test_memory_that_is_overwritten_piece_by_piece_is_kept() -> None:
    """Nobody adds up the pieces; keeping too much costs memory and nothing else."""
    recording = record(*applied(overwritten_through_views))
    assert kept(recording) == ["empty"]
    env = replayed(recording, all_targets(recording))
    assert float(env[recording.program.targets.loss or 0]) == recording.loss


@pytest.mark.usefixtures("nan_memory")
def test_memory_that_its_own_overwriting_reads_is_kept() -> None:
    """A call that overwrites memory with what it computes from it reads it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(5, 6)
        torch.add(y, 1.0, out=y)
        return x + y

    assert kept(record(*applied(function))) == ["empty"]


@pytest.mark.usefixtures("nan_memory")
def test_memory_that_is_the_loss_is_kept() -> None:
    """What the step returns is looked at, though no call reads it."""
    recording = record(nn.Linear(1, 1), None, lambda *_: torch.empty(()))
    assert kept(recording) == ["empty"]


@pytest.mark.usefixtures("nan_memory")
def test_memory_that_resize_makes_is_kept() -> None:
    """An empty tensor that is given memory has nothing in it but what was there."""
    recording = record(*applied(lambda x: x + torch.empty(0).resize_(5, 6)))
    assert kept(recording) == ["empty_strided"]
    assert recording.observed is not None


@pytest.mark.parametrize("name", ["transformer_with_dropout", "convolutions_with_batch_norm", "lstm_with_dropout"])
def test_ordinary_models_keep_no_memory(name: str) -> None:
    """Nothing of an ordinary training step depends on uninitialised memory."""
    torch.manual_seed(1)
    recording = record(*STEPS[name]())
    assert [name for name in kept(recording) if name != "empty"] == []
    assert sum(node.memory.numel() for node in recording.program.nodes if node.memory is not None) == 0
    assert same(torch.tensor(recording.loss), torch.tensor(recording.loss))
