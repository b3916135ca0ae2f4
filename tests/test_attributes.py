"""Tensors that a model keeps as plain attributes are put back with their elements, and copied only where steps write to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from bisect_nan import Guard
from bisect_nan.loop.attributes import Attributes
from bisect_nan.recording.capture import Step


class Carries(nn.Module):
    """A recurrent model that keeps its hidden state in place, beside a table that nobody writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.hidden = torch.zeros(2, 4)
        self.table = torch.ones(2, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.cell(batch, self.hidden.clone())
        self.hidden.copy_(hidden.detach())
        return (hidden * self.table).square().mean()


def trained(
    batches: Sequence[torch.Tensor], directory: Path | None, on_fault: str, *, scaled: bool
) -> list[torch.Tensor]:
    """Return parameters and state after some steps, under a guard where a directory is given."""
    torch.manual_seed(0)
    model = Carries()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def plain(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        return loss

    step: Step = plain
    if directory is not None:
        guard = Guard(model, optimizer, scaler=scaler if scaled else None, directory=directory, on_fault=on_fault)
        step = guard.watch(step)
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(step(model, batch)).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    return [*model.parameters(), model.hidden]


@pytest.mark.parametrize("on_fault", ["skip", "rollback"])
def test_a_hidden_state_is_that_before_the_bad_batch(on_fault: str, tmp_path: Path) -> None:
    """It is as if the batch had not been there: NaN would stay in it for ever."""
    batches = [torch.full((2, 3), number) for number in (0.1, 0.2, torch.nan, 0.3, 0.4)]
    healthy = [batch for batch in batches if batch.isfinite().all()]
    without = trained(healthy, None, on_fault, scaled=False)
    under = trained(batches, tmp_path, on_fault, scaled=False)
    assert all(map(torch.equal, without, under))
    assert [path.name for path in tmp_path.iterdir()] == ["step_2.safetensors"]


def test_a_search_for_a_scale_leaves_it_alone(tmp_path: Path) -> None:
    """A step that is run again to be judged, and is no fault, has changed the state once."""
    batches = [torch.full((2, 3), number) for number in (0.1, 1e38, 0.3)]
    assert all(
        map(torch.equal, trained(batches, None, "", scaled=True), trained(batches, tmp_path, "raise", scaled=True))
    )


def test_what_is_copied() -> None:
    """Each once when it is new; then those alone that were written to since they were seen first."""
    first, second = torch.zeros(2), torch.zeros(2)
    attributes = Attributes()

    def copied(*tensors: torch.Tensor) -> list[int]:
        return [id(tensor) for tensor, _ in attributes.now(tensors)]

    assert copied(first, second) == [id(first), id(second)]
    first.add_(1)
    assert copied(first, second) == [id(first)]
    assert copied(first, second) == [id(first)]
    third = torch.zeros(2)
    assert copied(first, third) == [id(first), id(third)]
