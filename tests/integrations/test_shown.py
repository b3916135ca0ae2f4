"""README's code for other packages' loops runs, on a model and batches like a reader's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import Batch, Net, batches, loss_of
from test_readme import blocks
from torch import nn


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss."""
    return loss_of(model(batch["x"]), batch)


def run(package: str, **names: Any) -> dict[str, Any]:
    """Run README's block for a package, and return its names."""
    ((_, code),) = blocks(f"python {package}")
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102  (it is our own text)
    return names


@pytest.mark.frameworks
def test_lightning() -> None:
    """The trainer trains, and disarms the module afterwards."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Batch) -> torch.Tensor:
            return step(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    names = run("lightning", model=Module(), loader=torch.utils.data.DataLoader(batches(2), batch_size=None))
    assert names["trainer"].global_step == 4


@pytest.mark.frameworks
def test_transformers() -> None:
    """The trainer trains."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    arguments = transformers.TrainingArguments("out", num_train_epochs=1, use_cpu=True, report_to=[], disable_tqdm=True)
    rows = [{"x": row, "labels": torch.tensor(1)} for row in torch.randn(8, 3)]
    names = run("transformers", model=Model(), arguments=arguments, dataset=rows)
    assert names["trainer"].state.global_step == 1


@pytest.mark.frameworks
def test_accelerate() -> None:
    """The loop runs."""
    pytest.importorskip("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)
    model = Net()
    names = run(
        "accelerate",
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loader=torch.utils.data.DataLoader(batches(2), batch_size=None),
        step=step,
    )
    assert len(names["optimizer"].state) == 4


def test_distributed(tmp_path: Path) -> None:
    """The step is watched in a process that is the only one of its group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        names = run("distributed", torch=torch, model=model, optimizer=optimizer, step=step)
        names["step"](names["model"], batches(1)[0]).backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()
