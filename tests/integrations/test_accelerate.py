"""A guard of what `accelerate.Accelerator` has prepared finds the line, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faults import Batch, Net, batches, blames, located, loss_of, raised
from torch import nn

pytestmark = pytest.mark.frameworks
accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402  (after the check that it is there)

from bisect_nan.integrations.accelerate import guard_for  # noqa: E402


def train(data: list[Batch], *, guarded: bool = True, on_fault: str = "raise", **options: Any) -> nn.Module:
    """Train as accelerate's own examples do, and return the model."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(model: nn.Module, batch: Batch) -> torch.Tensor:
        return loss_of(model(batch["x"]), batch)

    if guarded:
        step = guard_for(accelerator, model, optimizer, on_fault=on_fault).watch(step)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(step(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bfloat16": {"mixed_precision": "bf16"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_the_line_is_found(options: str, kind: str) -> None:
    """The user's line and the sample are named, whatever the wrappers do."""
    fault = raised(lambda: train(batches(4, kind, at=2), **OPTIONS[options]))
    assert blames(fault, kind)
    assert located(fault).culprit.samples == (2,)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_bad_step_is_left_out(options: str, kind: str) -> None:
    """Under `skip` the training goes to its end, and stays finite."""
    model = train(batches(4, kind, at=2), on_fault="skip", **OPTIONS[options])
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("options", OPTIONS)
def test_a_healthy_training_is_the_same(options: str) -> None:
    """With the guard it gives the same numbers as without, bit by bit."""
    guarded, plain = (train(batches(6), guarded=guarded, **OPTIONS[options]).state_dict() for guarded in (True, False))
    assert all(torch.equal(guarded[name], plain[name]) for name in plain)
