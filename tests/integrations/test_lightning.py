"""The callback for `lightning.Trainer` finds the line in the user's module, and leaves the training as it is without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Batch, Net, batches, blames, located, loss_of, raised
from torch import nn

pytestmark = pytest.mark.frameworks
lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402  (after the check that it is there)
from torchmetrics import MeanMetric  # noqa: E402

from bisect_nan.integrations.lightning import GuardCallback  # noqa: E402


class Module(lightning.LightningModule):
    """Automatic optimization, with a log, a metric, a counter and a validation that comes out NaN."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__()
        self.net, self.metric, self.calls, self.make = Net(), MeanMetric(), 0, optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.calls += 1
        loss = loss_of(self.net(batch["x"]), batch)
        self.metric.update(loss)
        self.log("loss", loss, on_epoch=True)
        return {"loss": loss, "batch": batch_idx}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("validation", self.net(batch["x"]).sum() * torch.nan + batch_idx)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), lr=0.01)


class Manual(lightning.LightningModule):
    """Two networks that are trained in turns, as in a GAN; the second step uses what the first update left."""

    def __init__(self, faulty: str = "", at: int = 0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge, self.drop = nn.Linear(3, 4), nn.Linear(4, 1), nn.Dropout(0.5)
        self.faulty, self.at, self.calls = faulty, at, 0

    def bad(self, name: str, batch_idx: int) -> float:
        """Return 0 where a step is to fail, else 1."""
        return 0.0 if (name, batch_idx) == (self.faulty, self.at) else 1.0

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.calls += 1
        first, second = self.optimizers()
        made = self.drop(self.maker(batch["x"]))
        loss = self.judge(made).square().mean()
        loss = loss + (self.judge(made).square() * self.bad("first", batch_idx)).sqrt().mean()  # first
        self.log("made", loss)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.toggle_optimizer(second)
        loss = self.judge(made.detach()).square().mean()
        loss = loss + (self.judge(made.detach()).square() * self.bad("second", batch_idx)).sqrt().mean()  # second
        loss = loss + (self.judge(made.detach()).square() * self.bad("loss", batch_idx)).log().mean() * 1e-3  # loss

        def closure() -> None:
            second.zero_grad()
            self.manual_backward(loss)

        second.step(closure)
        self.untoggle_optimizer(second)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.maker, self.judge)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)]


class Skipping(Module):
    """A module that has nothing to learn from every other batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


def fit(module: Any, data: list[Batch], *, guarded: bool = True, on_fault: str = "raise", **options: Any) -> Any:
    """Train, and return the trainer."""
    torch.manual_seed(0)
    callbacks = [GuardCallback(on_fault=on_fault)] if guarded else []
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", callbacks=callbacks, **quiet, **options)
    module.trainer_seen = trainer
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    trainer.fit(module, loader, loader if isinstance(module, Module) else None)
    return trainer


def scaled(scale: float) -> MixedPrecision:
    """Return float16 with a scaler, which Lightning does not choose on a CPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "accumulated": lambda: {"accumulate_grad_batches": 2},
    "clipped": lambda: {"gradient_clip_val": 1.0},
    "bfloat16": lambda: {"precision": "bf16-mixed"},
    "float16": lambda: {"plugins": [scaled(1024.0)]},
}


@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "float16"])
def test_a_bad_gradient_is_found(options: str) -> None:
    """The line of the user's code is named, whatever Lightning does around the step; the module is as before, and disarmed."""
    module = Module()
    fault = raised(lambda: fit(module, batches(4, "gradient", at=2), **OPTIONS[options]()))
    assert blames(fault, "gradient")
    assert module.calls == 2
    assert not {"training_step", "log"} & set(vars(module))


def test_a_bad_loss_is_found() -> None:
    """It is told before the backward pass, with the sample; counter and metric are as before the step."""
    module = Module()
    fault = raised(lambda: fit(module, batches(4, "loss", at=2)))
    assert blames(fault, "loss")
    assert located(fault).culprit.samples == (2,)
    assert module.calls == 2
    assert module.metric.weight == 2


def test_a_bad_update_is_found() -> None:
    """The update is run again without its closure, which is the whole step."""
    module = Module(lambda parameters, lr: torch.optim.SGD(parameters, lr=lr * torch.inf))
    fault = raised(lambda: fit(module, batches(4)))
    assert located(fault).symptom.kind == "parameter"
    assert module.calls == 0


@pytest.mark.parametrize("faulty", ["first", "second", "loss"])
def test_manual_optimization(faulty: str) -> None:
    """The step is run again up to the loss that went bad, without the updates before."""
    module = Manual(faulty, at=2)
    fault = raised(lambda: fit(module, batches(4)))
    assert blames(fault, faulty)
    assert module.calls == 3


@pytest.mark.parametrize("faulty", ["first", "second", "loss"])
def test_manual_optimization_goes_on(faulty: str) -> None:
    """Under `skip` the training goes to its end, and both networks stay finite."""
    module = Manual(faulty, at=2)
    assert fit(module, batches(4), on_fault="skip").global_step == 16
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_a_scaler_looks_for_its_scale() -> None:
    """Gradients beyond float16 that it leaves out are no fault; one that is bad without any scale is."""
    assert fit(Module(), batches(4), plugins=[scaled(2.0**30)]).precision_plugin.scaler.get_scale() < 2.0**30
    assert blames(raised(lambda: fit(Module(), batches(4, "gradient", at=2), plugins=[scaled(1024.0)])), "gradient")


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_bad_step_is_left_out(kind: str, options: str) -> None:
    """Under `skip` the training goes to its end, and stays finite."""
    module = Module()
    trainer = fit(module, batches(4, kind, at=2), on_fault="skip", **OPTIONS[options]())
    assert trainer.global_step == 8 // (trainer.accumulate_grad_batches)
    assert all(value.isfinite().all() for value in module.net.state_dict().values())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "make",
    [Module, lambda: Module(torch.optim.LBFGS), Manual, Skipping],
    ids=["usual", "closure", "manual", "skipping"],
)
def test_a_healthy_training_is_the_same(options: str, make: Callable[[], Any]) -> None:
    """With the callback it gives the same numbers as without, bit by bit; a NaN in the validation is nobody's fault."""
    lbfgs, manual = getattr(make(), "make", None) is torch.optim.LBFGS, isinstance(make(), Manual)
    if (lbfgs and options == "float16") or (manual and options in ("clipped", "accumulated")):
        pytest.skip("Lightning does not do that")
    modules = [make(), make()]
    modules[1].load_state_dict(modules[0].state_dict())
    trainers = [fit(module, batches(4), guarded=n == 1, **OPTIONS[options]()) for n, module in enumerate(modules)]
    states = [module.state_dict() for module in modules]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert modules[0].calls == modules[1].calls
    assert trainers[0].global_step == trainers[1].global_step
    assert str(trainers[0].callback_metrics) == str(trainers[1].callback_metrics)


def test_a_compiled_module() -> None:
    """A compiled module is run again eagerly."""
    module = Module()
    fault = raised(lambda: fit(torch.compile(module, backend="eager"), batches(4, "gradient", at=2)))
    assert blames(fault, "gradient")


def test_folder(tmp_path: Path) -> None:
    """Snapshots go to `crashes`, below the folder that the training runs in."""
    fault = raised(lambda: fit(Module(), batches(4, "loss", at=1)))
    assert fault.path is not None
    assert (tmp_path / fault.path).parent == tmp_path / "crashes"
