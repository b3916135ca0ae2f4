"""A guard tells the first non-finite step, saves it, and leaves the training as it was before that step."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_capture import fingerprint, generators
from torch import nn
from torch.nn import functional

from bisect_nan import Finding, Guard, NonFiniteStep, Phase, Snapshot, Verdict, finite, locate
from bisect_nan.errors import BisectNanError, RecordingError

Batch = dict[str, torch.Tensor]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the usual optimizer."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return one with little state."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    """Return one that evaluates the loss several times in a step."""
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)


class Net(nn.Module):
    """Dropout, running statistics, a counter, and a term that a batch can make bad in forward or in backward only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 3),
        )
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        hidden = self.norm(self.first(batch["x"]) * batch["scale"])  # buffer
        hidden = self.drop(torch.relu(hidden)) + random.random() + float(np.random.rand())  # noqa: NPY002, S311
        return self.last(hidden)


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss with a logarithm of and a root over parts of the batch."""
    scores = model(batch)
    loss = functional.cross_entropy(scores, batch["y"])
    loss = loss + batch["positive"].log().mean() * scores.mean()  # loss
    loss = loss + (scores * batch["gate"]).square().sum(-1).sqrt().mean()  # gradient
    return loss * batch["weight"]


def batch_of(seed: int, **changes: torch.Tensor) -> Batch:
    """Return a healthy batch, or one with some tensors replaced."""
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "x": torch.randn(6, 4, generator=generator),
        "y": torch.randint(0, 3, (6,), generator=generator),
        "positive": torch.rand(6, generator=generator) + 0.5,
        "gate": torch.ones(6, 1),
        "scale": torch.ones(()),
        "weight": torch.ones(()),
    }
    return batch | changes


def hole(size: int, row: int, *, width: int | None = None) -> torch.Tensor:
    """Return ones with a zero in one row."""
    tensor = torch.ones(size) if width is None else torch.ones(size, width)
    tensor[row] = 0.0
    return tensor


BAD: dict[str, tuple[Make, Batch]] = {
    "loss": (adam, batch_of(7, positive=hole(6, 2))),
    "gradient": (adam, batch_of(7, gate=hole(6, 4, width=1))),
    "buffer": (sgd, batch_of(7, scale=torch.tensor(1e25))),
    "optimizer": (adam, batch_of(7, weight=torch.tensor(1e24))),
    "parameter": (lambda model: torch.optim.SGD(model.parameters(), lr=1e30), batch_of(7, weight=torch.tensor(1e12))),
}
"""Kind of fault: an optimizer and a batch that make it."""
KINDS = list(BAD)
PHASES = {"loss": Phase.FORWARD, "gradient": Phase.BACKWARD, "buffer": Phase.FORWARD}


def line_of(mark: str, file: str = __file__) -> int:
    """Return the line of a file that ends with a comment."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    (found,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"  # {mark}"))
    return found


def located(fault: NonFiniteStep) -> Finding:
    """Return what the saved snapshot says."""
    assert fault.path is not None, str(fault)
    return locate(Snapshot.load(fault.path))


def blamed(fault: NonFiniteStep, mark: str, file: str = __file__) -> bool:
    """Whether the culprit is the marked line of a file."""
    culprit = located(fault).culprit
    assert culprit is not None
    assert culprit.source is not None
    return Path(culprit.source.file).name == Path(file).name and culprit.source.line == line_of(mark, file)


def raised(train: Callable[[], Any], match: str = "finite") -> NonFiniteStep:
    """Run a piece of training that ends with a fault, and return that."""
    with pytest.raises(NonFiniteStep, match=match) as caught:
        train()
    return caught.value


def update(optimizer: torch.optim.Optimizer) -> None:
    """Apply the gradients."""
    optimizer.step()  # optimizer


class Loop:
    """A usual training loop; with a directory, under a guard that is caught and forgotten."""

    def __init__(self, make: Make, directory: Path | None = None, *, to_none: bool = True) -> None:
        torch.manual_seed(3)
        random.seed(4)
        np.random.seed(5)  # noqa: NPY002
        self.model = Net()
        self.optimizer = make(self.model)
        self.guard = None if directory is None else Guard(self.model, self.optimizer, directory=directory)
        self.step = step if self.guard is None else self.guard.watch(step)
        self.faults: list[NonFiniteStep] = []
        self.before: Any = None
        self.to_none = to_none

    def state(self, batch: Batch) -> Any:
        """Return everything that a step can change."""
        return fingerprint([self.model, self.optimizer, batch]), generators()

    def run(self, batches: Iterable[Batch]) -> None:
        """Train on each batch."""
        for batch in batches:
            self.optimizer.zero_grad(set_to_none=self.to_none)
            self.before = self.state(batch)
            try:
                self.step(self.model, batch).backward()
                update(self.optimizer)
            except NonFiniteStep as fault:
                self.faults.append(fault)
                assert self.state(batch) == self.before

    def end(self) -> Any:
        """Return the trained numbers, without what differs between two processes' memory."""
        state = self.optimizer.state_dict()["state"]
        moments = [[(k, v.tolist()) for k, v in part.items() if isinstance(v, torch.Tensor)] for part in state.values()]
        weights = [(name, tensor.tolist()) for name, tensor in self.model.state_dict().items()]
        return weights, moments, self.model.calls, self.model.seen, generators()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_is_told_once_saved_and_located(kind: str, tmp_path: Path) -> None:
    """The error names the kind, and the file that it names leads to the line."""
    make, bad = BAD[kind]
    loop = Loop(make, tmp_path / "crashes")
    healthy = [] if kind == "parameter" else [batch_of(0), batch_of(1)]
    loop.run([*healthy, bad])
    (fault,) = loop.faults
    assert fault.symptom.kind == kind
    assert fault.path == tmp_path / "crashes" / f"step_{len(healthy)}.safetensors"
    assert f"bisect-nan run {fault.path}" in str(fault)
    finding = located(fault)
    assert finding.verdict is Verdict.LOCATED
    assert finding.culprit is not None
    assert finding.culprit.phase is PHASES.get(kind, Phase.OPTIMIZER)
    assert blamed(fault, kind if kind in PHASES else "optimizer")


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "parameter"])
def test_training_goes_on_as_if_the_bad_batch_had_not_been_there(kind: str, to_none: bool, tmp_path: Path) -> None:
    """Model, optimizer, gradients, counters and random numbers are those of a training without the batch, bit by bit."""
    make, bad = BAD[kind]
    guarded, plain = Loop(make, tmp_path, to_none=to_none), Loop(make, to_none=to_none)
    guarded.run([batch_of(0), batch_of(1), bad, batch_of(2), bad, batch_of(3)])
    with_guard = guarded.end()
    plain = Loop(make, to_none=to_none)
    plain.run([batch_of(0), batch_of(1), batch_of(2), batch_of(3)])
    assert with_guard == plain.end()
    assert [fault.path for fault in guarded.faults] == [tmp_path / f"step_{number}.safetensors" for number in (2, 3)]


def test_a_healthy_training_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    """A guard changes no number and writes nothing."""
    ends = []
    for directory in (None, tmp_path / "crashes"):
        loop = Loop(adam, directory)
        loop.run(batch_of(seed) for seed in range(20))
        ends.append(loop.end())
    assert ends[0] == ends[1]
    assert not (tmp_path / "crashes").exists()


def test_two_crashes_of_one_step_leave_two_files(tmp_path: Path) -> None:
    """A file that is there is not written over."""
    loop = Loop(*BAD["loss"][:1], tmp_path)
    loop.run([BAD["loss"][1]] * 3)
    names = [fault.path.name for fault in loop.faults if fault.path]
    assert names == ["step_0.safetensors", "step_0_2.safetensors", "step_0_3.safetensors"]


def test_random_draws_of_the_step_reproduce(tmp_path: Path) -> None:
    """A fault that depends on draws of torch, NumPy and Python shows again."""

    def draws(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        lucky = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002, S311
        kept = functional.dropout(model(batch), 0.5)
        return (kept.abs() if lucky > 1.9 else kept.exp()).log().mean()  # draws

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched, batch = guard.watch(draws), torch.ones(4, 3)

    def train() -> None:
        for _ in range(200):
            optimizer.zero_grad()
            watched(model, batch).backward()
            optimizer.step()

    assert blamed(raised(train), "draws")


# --- ways to train ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guilty", [0, 1, 3])
def test_the_guilty_one_of_accumulated_micro_batches_is_saved(guilty: int, tmp_path: Path) -> None:
    """Of several calls before one update, the snapshot is that of the one whose gradient is bad."""
    loop = Loop(adam, tmp_path)
    batches = [BAD["gradient"][1] if number == guilty else batch_of(number) for number in range(4)]
    loop.optimizer.zero_grad()
    before = loop.state(batches[0])

    def train() -> None:
        for batch in batches:
            (loop.step(loop.model, batch) / 4).backward()
        loop.optimizer.step()

    fault = raised(train)
    assert fault.symptom.kind == "gradient"
    assert loop.state(batches[0]) == before
    assert blamed(fault, "gradient")
    assert fault.path is not None
    snapshot = Snapshot.load(fault.path)
    (x,) = (p.value for p in snapshot.program.placeholders if p.name == "batch['x']")
    assert torch.equal(snapshot.tensors()[x], batches[guilty]["x"])


def test_a_bad_micro_batch_can_be_left_out(tmp_path: Path) -> None:
    """A bad loss takes back its own call; gradients that others have accumulated stay."""
    ends = []
    for batches in ([batch_of(0), BAD["loss"][1], batch_of(1)], [batch_of(0), batch_of(1)]):
        loop = Loop(adam, tmp_path)
        for batch in batches:
            try:
                loop.step(loop.model, batch).backward()
            except NonFiniteStep as fault:
                loop.faults.append(fault)
        loop.optimizer.step()
        ends.append(loop.end())
        assert len(loop.faults) == len(batches) - 2
    assert ends[0] == ends[1]


def test_clipped_gradients(tmp_path: Path) -> None:
    """Clipping the norm spreads NaN to all gradients; the call that made the first is found."""
    loop = Loop(adam, tmp_path)
    loop.step(loop.model, BAD["gradient"][1]).backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    assert blamed(raised(loop.optimizer.step), "gradient")


def test_gradients_spoiled_after_the_backward_pass(tmp_path: Path) -> None:
    """What neither call nor update computes is told, saved with what was seen, and not reproduced."""
    loop = Loop(adam, tmp_path)
    loop.step(loop.model, batch_of(0)).backward()
    for parameter in loop.model.parameters():
        parameter.grad /= torch.zeros(())
    fault = raised(loop.optimizer.step, match="finite when it was run again")
    assert located(fault).verdict is Verdict.NOT_REPRODUCED


def test_gradients_without_a_watched_call(tmp_path: Path) -> None:
    """Where there is nothing to run again, the fault is told without a file."""
    loop = Loop(adam, tmp_path)
    step(loop.model, BAD["gradient"][1]).backward()
    with pytest.raises(NonFiniteStep, match="nothing that the guard can run again computes it") as caught:
        loop.optimizer.step()
    assert caught.value.path is None
    assert list(tmp_path.iterdir()) == []


def closure_of(loop: Loop, batch: Batch) -> Callable[[], torch.Tensor]:
    """Return what an optimizer calls to compute loss and gradients again."""

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.step(loop.model, batch)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("make", [sgd, lbfgs])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_closures(make: Make, kind: str, tmp_path: Path) -> None:
    """A fault in what `optimizer.step(closure)` evaluates first is one of the step, and everything is taken back."""
    loop = Loop(make, tmp_path)
    loop.optimizer.step(closure_of(loop, batch_of(0)))
    before = loop.state(BAD[kind][1])
    with pytest.raises(NonFiniteStep) as caught:
        loop.optimizer.step(closure_of(loop, BAD[kind][1]))
    assert loop.state(BAD[kind][1]) == before
    assert blamed(caught.value, kind)
    loop.optimizer.step(closure_of(loop, batch_of(1)))


def test_an_optimizer_may_try_out_parameters(tmp_path: Path) -> None:
    """Evaluations after the first are the optimizer's own: training is the same as without a guard, and only its end counts."""
    ends = []
    for directory in (None, tmp_path):
        loop = Loop(lbfgs, directory)
        for seed in range(3):
            loop.optimizer.step(closure_of(loop, batch_of(seed)))
        ends.append(loop.end())
    assert ends[0] == ends[1]


def test_an_optimizer_that_runs_away_in_one_step(tmp_path: Path) -> None:
    """What a line search without bounds does to the parameters is a fault of the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(), nn.Linear(16, 3))
    x, y = torch.randn(32, 4), torch.poisson(torch.rand(32, 3) * 30)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=25)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(lambda m, b: (m(b[0]).exp() - b[1]).square().mean())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = watched(model, (x, y))
        loss.backward()
        return loss

    def train() -> None:
        for _ in range(5):
            optimizer.step(closure)

    fault = raised(train)
    assert fault.symptom.kind == "parameter"
    culprit = located(fault).culprit
    assert culprit is not None
    assert culprit.phase is Phase.OPTIMIZER
    assert culprit.cause == "learning_rate_explosion"


class Estimating(torch.optim.SGD):
    """Keeps a number of its own, which only the next step multiplies its rate by."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, lr=0.1)
        self.factor = torch.tensor(1.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        total = torch.stack([gradient.abs().sum() for gradient in gradients]).sum()
        self.param_groups[0]["lr"] = 0.1 * float(self.factor)
        super().step(closure)
        self.factor = total / total  # factor


def test_a_number_of_the_optimizer_is_caught_before_it_reaches_a_weight(tmp_path: Path) -> None:
    """What an optimizer keeps for the next step is looked at in the step that makes it."""
    model = nn.Linear(3, 1)
    optimizer = Estimating(model.parameters())
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(lambda m, b: m(b).relu().sum())

    def train() -> None:
        for value in (1.0, 0.0, 1.0):
            nn.init.constant_(model.bias, value)
            nn.init.zeros_(model.weight)
            optimizer.zero_grad()
            watched(model, torch.ones(2, 3)).backward()
            optimizer.step()

    fault = raised(train, match="the optimizer's optimizer.factor is nan")
    assert fault.path == tmp_path / "step_1.safetensors"
    assert float(optimizer.factor) == 1.0
    assert blamed(fault, "factor")


class Twice(torch.optim.SGD):
    """Calls the step of its base class twice, and scales the gradients in between."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        super().step(closure)


@pytest.mark.parametrize("prepared", [False, True])
def test_subclasses_that_call_the_step_of_their_base(prepared: bool, tmp_path: Path) -> None:
    """Hooks of torch may run once for each level; the update counts once, from its outermost beginning to its end."""
    if prepared:
        torch.optim.SGD([torch.zeros(1)])  # lets torch hook the base class as well
    model = nn.Linear(3, 1)
    optimizer = Twice(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(lambda m, b: m(b).square().mean())
    for rate in (0.1, 0.1, math.nan):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        watched(model, torch.ones(2, 3)).backward()
        gradient = model.weight.grad.clone()
        weight = model.weight.detach().clone()
        if math.isnan(rate):
            with pytest.raises(NonFiniteStep) as caught:
                update(optimizer)
        else:
            update(optimizer)
    assert torch.equal(model.weight, weight)
    assert model.weight.grad is None
    assert gradient.isfinite().all()
    assert caught.value.path == tmp_path / "step_2.safetensors"
    culprit = located(caught.value).culprit
    assert culprit is not None
    assert culprit.cause == "learning_rate_nonfinite"


def test_schedulers(tmp_path: Path) -> None:
    """A schedule that divides 0 by 0 is found in the update that it spoils."""
    loop = Loop(sgd, tmp_path)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        loop.optimizer, lambda count: float(torch.tensor(1.0) / (count != 2)) - 1 + 1
    )
    for seed in range(4):
        loop.run([batch_of(seed)])
        schedule.step()
    (fault,) = loop.faults
    culprit = located(fault).culprit
    assert culprit is not None
    assert culprit.cause == "learning_rate_nonfinite"


def test_several_guards_on_one_model(tmp_path: Path) -> None:
    """Each optimizer has its guard, and the step is watched by both; a fault is told once."""
    torch.manual_seed(0)
    model = Net()
    parts = [model.first.parameters(), model.last.parameters()]
    optimizers = [torch.optim.Adam(part, lr=0.01) for part in parts]
    watched = step
    for number, optimizer in enumerate(optimizers):
        watched = Guard(model, optimizer, directory=tmp_path / str(number)).watch(watched)

    def train(batch: Batch) -> None:
        model.zero_grad()
        watched(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()

    train(batch_of(0))
    train(batch_of(1))
    for kind in ("loss", "gradient"):
        with pytest.raises(NonFiniteStep) as caught:
            train(BAD[kind][1])
        assert blamed(caught.value, kind)
        train(batch_of(2))


def test_parameters_outside_of_the_model(tmp_path: Path) -> None:
    """What only the optimizer knows is watched and taken back, too."""
    model, temperature = nn.Linear(3, 2), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [temperature], "lr": 0.1}], lr=0.1)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(lambda m, b: (m(b) * temperature).square().mean())
    for rate in (0.1, math.inf):
        optimizer.param_groups[1]["lr"] = rate
        optimizer.zero_grad()
        watched(model, torch.ones(2, 3)).backward()
        value = temperature.detach().clone()
        if math.isinf(rate):
            with pytest.raises(NonFiniteStep, match=r"param_groups\[1\].params\[0\]") as caught:
                optimizer.step()
        else:
            optimizer.step()
    assert torch.equal(temperature, value)
    culprit = located(caught.value).culprit
    assert culprit is not None
    assert culprit.phase is Phase.OPTIMIZER


def test_evaluation_through_the_watched_step(tmp_path: Path) -> None:
    """A bad validation loss is a fault of the loss; healthy ones do not count as parts of an update."""
    loop = Loop(adam, tmp_path)
    loop.run([batch_of(0)])
    loop.model.eval()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert math.isfinite(loop.step(loop.model, batch_of(1)))
            with pytest.raises(NonFiniteStep) as caught:
                loop.step(loop.model, BAD["loss"][1])
        assert blamed(caught.value, "loss")
    assert loop.guard is not None
    assert loop.guard._vigil.calls == []
    loop.model.train()
    loop.run([batch_of(2)])
    assert loop.faults == []


@pytest.mark.parametrize("form", [dict, tuple])
def test_several_losses(form: type, tmp_path: Path) -> None:
    """A step may return a mapping or sequence of losses; any of them counts."""

    def several(model: nn.Module, batch: torch.Tensor) -> Any:
        output = model(batch)
        fit, size = output.square().mean(), output.relu().sum(-1).add(batch.sum(-1)).log().mean()  # several
        return {"fit": fit, "size": size} if form is dict else (fit, size)

    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(several)
    losses = watched(model, torch.ones(2, 3))
    assert isinstance(losses, form)
    sum(losses.values() if form is dict else losses).backward()
    optimizer.step()
    assert guard._vigil.journal.entries[-1]["loss"] == pytest.approx(math.log(3.0))
    with pytest.raises(NonFiniteStep) as caught:
        watched(model, torch.zeros(2, 3) - 5)
    assert blamed(caught.value, "several")


def test_a_step_with_other_arguments_is_refused(tmp_path: Path) -> None:
    """It is told where the guard is made, and not by the call: what takes three arguments is said to take two otherwise."""
    model = nn.Linear(2, 1)
    guard = Guard(model, sgd(model), directory=tmp_path)
    with pytest.raises(BisectNanError, match=r"got a step <lambda>\(m, x, y\)\nexpected: step\(model, batch\)"):
        guard.watch(lambda m, x, y: m(x) - y)  # type: ignore[misc,arg-type]
    for step in (lambda *both: both[1], lambda m, b, weight=1.0: b * weight + 0 * m.bias.sum()):
        assert guard.watch(step)(model, torch.ones(())) == 1


def test_a_step_without_a_loss(tmp_path: Path) -> None:
    """What is no loss is refused at once, with what to return."""
    model = nn.Linear(3, 2)
    guard = Guard(model, sgd(model), directory=tmp_path)
    with pytest.raises(RecordingError, match=r"return the loss that you call backward\(\) on"):
        guard.watch(lambda m, b: m(b))(model, torch.ones(2, 3))


def test_autocast_around_the_call(tmp_path: Path) -> None:
    """The modes of the call are those of its second run, though the update that asks for it runs without them."""
    model = nn.Linear(64, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(lambda m, b: m(b).float().mean() * 1e6)
    with torch.autocast("cpu", torch.float16):
        loss = watched(model, torch.ones(2, 64))
    loss.backward()
    culprit = located(raised(optimizer.step)).culprit
    assert culprit is not None
    assert culprit.cause == "grad_overflow_fp16"


def test_a_gradient_scaler_drops_updates_that_overflow(tmp_path: Path) -> None:
    """Where the scaler finds an infinity, no update is made and nothing is told."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched, scaler = guard.watch(lambda m, b: m(b).square().mean()), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(watched(model, torch.ones(2, 4) * 100)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**127
    assert 0 < guard._vigil.steps < 20


def test_a_step_that_the_scaler_left_out_last_is_no_fault(tmp_path: Path) -> None:
    """Its gradients overflow by their scale alone: `check` runs the step again without it, and leaves all as it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched, scaler = guard.watch(lambda m, b: m(b).square().mean()), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(watched(model, torch.rand(8, 4) * 100)).backward()
    scaler.step(optimizer)
    scaler.update()
    before = [tensor.clone() for tensor in [*model.state_dict().values(), torch.get_rng_state()]]
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    guard.check()
    after = [*model.state_dict().values(), torch.get_rng_state()]
    assert all(map(torch.equal, before, after))
    assert all(finite.same(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_writes_to_its_batch(tmp_path: Path) -> None:
    """The batch of the bad call is as it was: labels that the step pops, and elements that it overwrites."""

    def greedy(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        target = batch.pop("target")
        batch["x"].sub_(1.0)
        return (model(batch["x"]) - target).square().mean() + batch["x"].log().mean()  # greedy

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(greedy)
    for value in (3.0, 2.5, 1.0):
        batch = {"x": torch.full((2, 3), value), "target": torch.ones(2, 1)}
        optimizer.zero_grad()
        if value > 1.0:
            watched(model, batch).backward()
            optimizer.step()
            continue
        with pytest.raises(NonFiniteStep) as caught:
            watched(model, batch)
    assert blamed(caught.value, "greedy")
    assert list(batch) == ["x", "target"]
    assert batch["x"].tolist() == [[1.0] * 3] * 2


# --- what is no fault -------------------------------------------------------------------------------------------------


def test_infinities_that_are_meant(tmp_path: Path) -> None:
    """A mask among the buffers, a frozen infinite parameter and an optimizer's sentinel are no faults; a new NaN is."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.limit = nn.Parameter(torch.full((3,), math.inf), requires_grad=False)
            self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
            self.register_buffer("lowest", torch.full((3,), math.inf))
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.linear(x) + self.mask
            self.mean += x.log().mean(0)  # mask
            return torch.minimum(scores.softmax(-1) @ x, self.limit).square().mean()

    model = Masked()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.best = torch.tensor(math.inf)  # type: ignore[attr-defined]
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(lambda m, b: m(b))
    for number in range(4):
        model.lowest.fill_(math.inf)
        optimizer.best = optimizer.best * 2  # type: ignore[attr-defined]
        optimizer.zero_grad()
        watched(model, torch.ones(3, 3)).backward()
        optimizer.step()
        assert number + 1 == guard._vigil.steps
    guard.check()
    optimizer.zero_grad()
    watched(model, -torch.ones(3, 3)).backward()
    with pytest.raises(NonFiniteStep, match="the buffer mean is nan") as caught:
        optimizer.step()
    assert blamed(caught.value, "mask")


def test_exceptions_pass_through(tmp_path: Path) -> None:
    """An error or an interrupt in the step or in the update is the same object outside, and the guard stays armed."""
    loop = Loop(adam, tmp_path)
    assert loop.guard is not None
    for error in (ValueError("no data"), KeyboardInterrupt()):

        def fails(_: Any, __: Any, error: BaseException = error) -> torch.Tensor:
            raise error

        with pytest.raises(type(error)) as caught:
            loop.guard.watch(fails)(loop.model, None)
        assert caught.value is error
        loop.run([batch_of(0)])

        def interrupted(error: BaseException = error) -> float:
            raise error

        with pytest.raises(type(error)) as caught:
            loop.optimizer.step(interrupted)
        assert caught.value is error
        loop.run([batch_of(1)])
    assert loop.faults == []
    loop.run([BAD["gradient"][1], BAD["loss"][1], BAD["optimizer"][1]])
    assert [fault.symptom.kind for fault in loop.faults] == ["gradient", "loss", "optimizer"]


# --- when something is in the way -------------------------------------------------------------------------------------


def test_a_fault_that_does_not_show_again(tmp_path: Path) -> None:
    """A step that is finite when it runs again is saved with what was seen, and located as not reproduced."""
    model, values = nn.Linear(3, 1), iter([1.0, math.nan, 1.0])
    guard = Guard(model, sgd(model), directory=tmp_path)
    watched = guard.watch(lambda m, b: m(b).mean() * next(values))
    watched(model, torch.ones(2, 3))
    with pytest.raises(NonFiniteStep, match="the loss is nan") as caught:
        watched(model, torch.ones(2, 3))
    assert "finite when it was run again" in str(caught.value)
    assert located(caught.value).verdict is Verdict.NOT_REPRODUCED


def test_a_step_that_fails_when_it_runs_again(tmp_path: Path) -> None:
    """The fault is told all the same, with what went wrong."""
    model, values = nn.Linear(3, 1), iter([math.nan])
    guard = Guard(model, sgd(model), directory=tmp_path)
    watched = guard.watch(lambda m, b: m(b).mean() * next(values))
    with pytest.raises(NonFiniteStep, match="the loss is nan; no snapshot was written: StopIteration") as caught:
        watched(model, torch.ones(2, 3))
    assert caught.value.path is None
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """The fault is told without a path, and the training is as before."""
    (tmp_path / "crashes").write_text("a file")
    loop = Loop(adam, tmp_path / "crashes")
    loop.run([batch_of(0), BAD["gradient"][1], batch_of(1)])
    (fault,) = loop.faults
    assert fault.path is None
    assert "no snapshot was written" in str(fault)
    assert "do this: model, optimizer and batch are as before the step" in str(fault)
    assert (tmp_path / "crashes").read_text() == "a file"


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 4 KB meanwhile, pytest's own output included."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(tmp_path: Path) -> None:
    """The fault is told without a path, and no half of a file is left."""
    loop = Loop(adam, tmp_path)
    with full_disk():
        loop.run([batch_of(0), BAD["loss"][1], batch_of(1)])
    (fault,) = loop.faults
    assert fault.path is None
    assert "cannot be written" in str(fault)
    assert list(tmp_path.iterdir()) == []


# --- over time --------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow(tmp_path: Path) -> None:
    """A thousand steps, with evaluations whose losses nobody takes back, hold no more tensors and objects than a few hundred."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)
    optimizer = sgd(model)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(lambda m, b: m(b["x"]).square().mean())

    def alive() -> tuple[int, int]:
        gc.collect()
        objects = gc.get_objects()
        return sum(issubclass(type(item), torch.Tensor) for item in objects), len(objects)

    counts = []
    for number in range(1000):
        optimizer.zero_grad()
        watched(model, {"x": x * 2})
        watched(model, {"x": x * 1}).backward()
        optimizer.step()
        if number in (299, 999):
            counts.append(alive())
    assert counts[1][0] <= counts[0][0]
    assert counts[1][1] <= counts[0][1] + 50
    assert len(guard._vigil.journal.entries) == 200


def test_history_tells_how_it_came_to_this(tmp_path: Path) -> None:
    """The snapshot holds loss, gradient norm and parameter norm of the steps before, and what is known of the bad one."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(lambda m, b: (m(b) - b.log()).sum())
    for value in (1.0, 1.0, 0.0):
        optimizer.zero_grad()
        batch = torch.full((1, 1), value)
        if value:
            watched(model, batch).backward()
            optimizer.step()
            continue
        with pytest.raises(NonFiniteStep) as caught:
            watched(model, batch)
    assert caught.value.path is not None
    snapshot = Snapshot.load(caught.value.path)
    assert snapshot.step_number == 2
    assert snapshot.history == (
        {"step": 0, "loss": 3.0, "gradient_norm": 1.0, "parameter_norm": 3.0, "learning_rate": 0.5},
        {"step": 1, "loss": 2.5, "gradient_norm": 1.0, "parameter_norm": 2.5, "learning_rate": 0.5},
        {"step": 2, "parameter_norm": 2.0, "learning_rate": 0.5},
    )


@pytest.mark.parametrize(("rate", "cause"), [(5.0, "learning_rate_explosion"), (0.001, "exp_overflow")])
def test_weights_that_run_away(rate: float, cause: str, tmp_path: Path) -> None:
    """An exponential that overflows is the place where a divergence shows, unless the weights are as they always were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(lambda m, b: (m(b["x"]) * b["scale"]).exp().mean() + m(b["x"]).square().mean())  # exp
    batch = {"x": torch.randn(16, 4), "scale": torch.ones(())}

    def train() -> None:
        for number in itertools.count():
            optimizer.zero_grad()
            last = rate < 1 and number == 20
            watched(model, batch | {"scale": torch.tensor(1e6)} if last else batch).backward()
            optimizer.step()

    culprit = located(raised(train)).culprit
    assert culprit is not None
    assert culprit.cause == cause


def test_check_at_the_end(tmp_path: Path) -> None:
    """Gradients that no update has used yet are looked at on request."""
    loop = Loop(adam, tmp_path)
    assert loop.guard is not None
    loop.run([batch_of(0)])
    loop.guard.check()
    loop.step(loop.model, BAD["gradient"][1]).backward()
    with pytest.raises(NonFiniteStep) as caught:
        loop.guard.check()
    assert blamed(caught.value, "gradient")
    loop.guard.check()


def test_close_takes_the_hooks_away(tmp_path: Path) -> None:
    """A closed guard tells nothing any more, and leaves no trace in the optimizer."""
    model = Net()
    optimizer = adam(model)
    bare = fingerprint(optimizer)
    with Guard(model, optimizer, directory=tmp_path) as guard:
        watched = guard.watch(step)
        watched(model, batch_of(0))
    assert fingerprint(optimizer) == bare
    assert not watched(model, BAD["loss"][1]).isfinite()
    guard.close()


def test_leaving_the_context_checks(tmp_path: Path) -> None:
    """What nobody looked at is looked at in the end, but an exception that is on its way is not replaced."""
    for error in (None, ValueError("stop")):

        def train(error: Exception | None = error) -> None:
            model = Net()
            with Guard(model, adam(model), directory=tmp_path) as guard:
                guard.watch(step)(model, BAD["gradient"][1]).backward()
                if error is not None:
                    raise error

        with pytest.raises(NonFiniteStep if error is None else ValueError):
            train()
