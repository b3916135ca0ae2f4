"""A script under watch is recorded as it runs, and its first non-finite step is told as if it had been captured alone."""

from __future__ import annotations

import copy
import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from bisect_nan import Finding, Phase, Snapshot, Verdict, locate
from bisect_nan.recording.recorder import Recorder
from bisect_nan.watching import stream, tape
from bisect_nan.watching.watch import Fault, Watch


class Ended(BaseException):
    """The fault ends the script, which catches no such thing."""


class Seen:
    """What a watch has told."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.watch: Watch

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot of the only fault."""
        (fault,) = self.faults
        assert fault.snapshot is not None
        return fault.snapshot

    def finding(self) -> Finding:
        """What its file says of it."""
        finding = locate(self.snapshot, remedies=False)
        assert finding.verdict is Verdict.LOCATED
        return finding


@contextmanager
def watched(from_step: int = 0) -> Iterator[Seen]:
    """Watch what runs inside; a fault ends it."""
    seen = Seen()

    def caught(fault: Fault) -> None:
        seen.faults.append(fault)
        raise Ended

    watch = seen.watch = Watch(from_step=from_step, caught=caught)
    watch.start()
    try:
        yield seen
    except Ended:
        pass
    finally:
        watch.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Torch is as before when a watch has ended."""
    before = torch.autograd.backward, torch.autograd.grad, nn.Module.__call__, torch.compile, torch.Tensor.register_hook
    yield
    now = torch.autograd.backward, torch.autograd.grad, nn.Module.__call__, torch.compile, torch.Tensor.register_hook
    assert now == before
    assert torch._C._len_torch_dispatch_stack() == 0


def line_of(mark: str) -> int:
    """Return the line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"  # {mark}"))
    return found


def blamed(finding: Finding) -> tuple[str, Phase, int]:
    """Return cause, phase and line of the only culprit, which lies in this file."""
    (culprit,) = finding.culprits
    assert culprit.source is not None
    assert Path(culprit.source.file).name == Path(__file__).name
    return culprit.cause, culprit.phase, culprit.source.line


class Net(nn.Module):
    """Running statistics, dropout, and parts that a batch can make bad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x) * scale)  # buffer
        return self.last(F.dropout(torch.relu(hidden), 0.2))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss with a logarithm of and a root over parts of the batch."""
    scores = model(batch["x"], batch["scale"])
    loss = F.cross_entropy(scores, batch["y"])
    loss = loss + batch["positive"].log().mean() * scores.square().mean()  # loss
    loss = loss + (scores * batch["gate"]).square().sum(-1).sqrt().mean()  # gradient
    return loss * batch["weight"]


def batch_of(seed: int, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
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


def hole(*shape: int) -> torch.Tensor:
    """Return ones with a zero in row 2."""
    tensor = torch.ones(*shape)
    tensor[2] = 0.0
    return tensor


BAD: dict[str, dict[str, torch.Tensor]] = {
    "input": batch_of(7, x=torch.full((6, 4), torch.nan)),
    "loss": batch_of(7, positive=hole(6)),
    "gradient": batch_of(7, gate=hole(6, 1)),
    "buffer": batch_of(7, scale=torch.tensor(1e25)),
    "optimizer": batch_of(7, weight=torch.tensor(1e24)),
}
"""Kind of fault: a batch that makes it."""


class Loop:
    """A training loop as people write them."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Net()
        self.optimizer = make(self.model.parameters(), **{"lr": 0.01, **options})

    def run(self, batches: Iterable[Any]) -> None:
        """Train on each batch."""
        for batch in batches:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, batch)
            loss.backward()
            self.optimizer.step()  # update

    def weights(self) -> list[Any]:
        """Return the trained numbers."""
        return [(name, tensor.tolist()) for name, tensor in self.model.state_dict().items()]


def loaded(*batches: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Return batches from a data loader, which gives them their names."""
    return iter(DataLoader(list(batches), batch_size=None))  # type: ignore[arg-type]


# --- against a captured step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BAD)
def test_the_answer_is_that_of_the_captured_step(kind: str) -> None:
    """Cause, phase, line, operation and samples are what capturing the same step, from the same state, leads to."""
    with watched() as seen:
        loop = Loop()
        loop.run(loaded(batch_of(0), batch_of(1)))
        bad = next(loaded(BAD[kind]))  # a data loader draws a random number
        state = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        random, moments = torch.get_rng_state(), copy.deepcopy(loop.optimizer.state_dict())
        loop.run([bad])
    (fault,) = seen.faults
    assert fault.step == 2
    loop.model.load_state_dict(state)
    loop.optimizer.load_state_dict(moments)
    torch.set_rng_state(random)
    if kind == "optimizer":
        loop.optimizer.zero_grad()
        loss_of(loop.model, BAD[kind]).backward()
        other = Snapshot.capture_update(loop.model, loop.optimizer, 0.0)
    else:
        other = Snapshot.capture(loop.model, BAD[kind], loss_of)
    assert other.observed is not None
    assert seen.snapshot.observed is not None
    assert seen.snapshot.observed.symptom == other.observed.symptom
    assert torch.equal(seen.snapshot.observed.tensor.isfinite(), other.observed.tensor.isfinite())
    mine, theirs = seen.finding().culprit, locate(other, remedies=False).culprit
    assert mine is not None
    assert theirs is not None
    same = ("phase", "op", "name", "samples", "module", "autograd") + (
        ("cause", "source") if kind != "optimizer" else ()
    )
    assert [getattr(mine, name) for name in same] == [getattr(theirs, name) for name in same]
    if kind == "optimizer":
        assert blamed(seen.finding())[2] == line_of("update")


@pytest.mark.parametrize("kind", BAD)
def test_the_file_says_the_same(kind: str, tmp_path: Path) -> None:
    """A saved and loaded snapshot leads to the same culprit."""
    with watched() as seen:
        Loop().run(loaded(batch_of(0), BAD[kind]))
    live, saved = seen.finding().culprit, locate(Snapshot.load(seen.snapshot.save(tmp_path / "a.safetensors"))).culprit
    assert live is not None
    assert saved is not None
    assert (live.cause, live.source, live.element) == (saved.cause, saved.source, saved.element)
    assert kind in ("optimizer", "input") or (saved.remedy is not None and saved.remedy.verified)


def test_a_parameter_that_was_bad_before() -> None:
    """The first step that uses it is told, and the parameter named."""
    loop = Loop()
    with torch.no_grad():
        loop.model.last.weight[1, 2] = torch.inf
    with watched() as seen:
        loop.run([batch_of(0)])
    culprit = seen.finding().culprit
    assert culprit is not None
    assert (culprit.phase, culprit.name) == (Phase.PARAMETER, "last.weight")


def test_an_update_that_overflows() -> None:
    """The update is a program of its own, which starts from finite gradients."""
    with watched() as seen:
        Loop(torch.optim.SGD, lr=1e30).run([batch_of(0, weight=torch.tensor(1e12))])
    assert blamed(seen.finding()) == ("overflow", Phase.OPTIMIZER, line_of("update"))
    assert {node.phase for node in seen.snapshot.program.nodes} == {Phase.OPTIMIZER}


def test_a_healthy_training_is_the_same_bit_by_bit() -> None:
    """Watching changes no number."""
    ends = []
    for watching in (False, True):
        loop = Loop()
        if watching:
            with watched() as seen:
                loop.run(batch_of(seed) for seed in range(12))
            assert not seen.faults
        else:
            loop.run(batch_of(seed) for seed in range(12))
        ends.append((loop.weights(), torch.get_rng_state().tolist()))
    assert ends[0] == ends[1]


def test_data_without_a_loader_is_an_input() -> None:
    """A NaN in a tensor that the script made by itself is no literal of the program."""
    with watched() as seen:
        loop = Loop()
        loop.run([batch_of(0)])
        loop.run([BAD["input"]])
    culprit = seen.finding().culprit
    assert culprit is not None
    assert culprit.cause == "input_nonfinite"


# --- ways to train ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guilty", [0, 1, 3])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_the_guilty_one_of_accumulated_micro_batches(kind: str, guilty: int) -> None:
    """The program is that of one micro-batch, whichever it is."""
    with watched() as seen:
        loop = Loop()
        for number in range(4):
            batch = next(loaded(BAD[kind] if number == guilty else batch_of(number)))
            (loss_of(loop.model, batch) / 4).backward()
        loop.optimizer.step()
    assert blamed(seen.finding())[2] == line_of(kind)
    forward = [node for node in seen.snapshot.program.nodes if "native_batch_norm.default" in str(node.target)]
    assert len(forward) == 1


def test_the_first_of_several_bad_micro_batches_is_told() -> None:
    """What comes after it adds to gradients that are bad already."""
    with watched() as seen:
        loop = Loop()
        for kind in ("gradient", "loss"):
            loss_of(loop.model, BAD[kind]).backward()
        loop.optimizer.step()
    assert blamed(seen.finding())[2] == line_of("gradient")


def test_gradients_that_the_script_spoils_after_the_backward_pass() -> None:
    """The line that did it is found; it counts to the backward phase."""
    with watched() as seen:
        loop = Loop()
        loss_of(loop.model, batch_of(0)).backward()
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= parameter.grad.sub(parameter.grad).sum()  # spoiled
        loop.optimizer.step()
    assert {(c.phase, c.source and c.source.line) for c in seen.finding().culprits} == {
        (Phase.BACKWARD, line_of("spoiled"))
    }


def test_bad_gradients_that_the_script_throws_away() -> None:
    """Without an update that uses them there is no fault, and the next step is recorded like any other."""
    for clear in (True, False):
        with watched() as seen:
            loop = Loop()
            loss_of(loop.model, BAD["gradient"]).backward()
            loss_of(loop.model, BAD["loss"]).backward()
            loop.optimizer.zero_grad(set_to_none=clear)
            loop.run([batch_of(0)])
            assert not seen.faults
            loop.run([BAD["loss"]])
        assert blamed(seen.finding())[2] == line_of("loss")


@pytest.mark.parametrize("fused", [False, True])
def test_updates_that_a_scaler_skips_are_no_fault(fused: bool) -> None:
    """A scaled gradient overflows until the scale is small enough; a true fault is told."""
    with watched() as seen:
        loop = Loop(torch.optim.AdamW, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        scales = []
        for batch in [*(batch_of(seed, weight=torch.tensor(8.0)) for seed in range(8)), BAD["gradient"]]:
            loop.optimizer.zero_grad()
            scaler.scale(loss_of(loop.model, batch)).backward()
            scaler.step(loop.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert not seen.faults
    assert scales[0] < 2.0**127
    assert scales[-1] < scales[-2]


def test_autocast() -> None:
    """An overflow of a half-precision product is told as such."""
    with watched() as seen:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in (1.0, 1e5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                hidden = model(torch.ones(4, 8)) * size  # half
                loss = hidden.float().square().mean()
            loss.backward()
            optimizer.step()
    assert blamed(seen.finding()) == ("fp16_overflow", Phase.FORWARD, line_of("half"))


def gan(bad: str) -> None:
    """Train a generator and a discriminator, whose updates alternate over one graph."""
    torch.manual_seed(0)
    generator, discriminator = (
        nn.Sequential(nn.Linear(3, 5), nn.Tanh()),
        nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)),
    )
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (generator, discriminator)]
    for step in range(4):
        zero = 0.0 if step == 3 else 1.0
        fake = (generator(torch.randn(6, 3)) * (zero if bad == "generator" else 1.0)).square().sqrt()  # generator
        optimizers[1].zero_grad()
        scores = discriminator(torch.randn(6, 5)) - discriminator(fake.detach())
        (scores * (zero if bad == "discriminator" else 1.0)).square().sqrt().mean().backward()  # discriminator
        optimizers[1].step()
        optimizers[0].zero_grad()
        discriminator(fake).mean().backward()
        optimizers[0].step()


@pytest.mark.parametrize("bad", ["generator", "discriminator"])
def test_two_optimizers_over_one_graph(bad: str) -> None:
    """The forward pass of the generator is still known when its backward pass fails, an update of the other later."""
    with watched() as seen:
        gan(bad)
    (fault,) = seen.faults
    assert fault.step == (6 if bad == "discriminator" else 7)
    assert blamed(seen.finding())[1:] == (Phase.BACKWARD, line_of(bad))
    names = {p.name for p in seen.snapshot.program.placeholders if p.phase is Phase.PARAMETER}
    assert "0.weight" in names
    assert "Sequential.0.weight" in names or bad == "discriminator"


def test_closures() -> None:
    """A bad loss within L-BFGS is that of one evaluation."""
    with watched() as seen:
        torch.manual_seed(0)
        x = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.LBFGS([x], lr=1.0, max_iter=8)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (x.sum() - 1.0).log() + x.square().sum()  # closure
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    cause, phase, line = blamed(seen.finding())
    assert (cause, line) == ("log_of_negative", line_of("closure"))
    assert phase is Phase.FORWARD
    assert len(seen.snapshot.program.nodes) < 30


def test_closures_that_write_to_buffers() -> None:
    """What one recorder keeps of memory that is written to is no call for the one around it."""
    with watched() as seen:
        loop = Loop(torch.optim.LBFGS, max_iter=2)

        def closure(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loop.optimizer.zero_grad()
            loss = loss_of(loop.model, batch)
            loss.backward()
            return loss

        for given in (batch_of(0), BAD["loss"]):
            loop.optimizer.step(functools.partial(closure, given))
        assert not seen.watch.unrecorded
    assert blamed(seen.finding())[1:] == (Phase.FORWARD, line_of("loss"))


def test_gradients_by_autograd_grad() -> None:
    """Where nobody calls `backward`, the loss is unknown, and the gradients are looked at."""
    with watched() as seen:
        weight = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        loss = weight.square().sum().sqrt()  # grad
        (weight.grad,) = torch.autograd.grad(loss, weight)
        optimizer.step()
    assert blamed(seen.finding())[2] == line_of("grad")


def test_checkpoints_and_functions() -> None:
    """Activations that are computed again, and backward code in Python, come out as they ran."""

    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sqrt()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * 0.5 * x.rsqrt()  # function

    with watched() as seen:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for zero in (1.0, 0.0):
            optimizer.zero_grad()
            hidden = checkpoint(lambda x, zero=zero: model(x).square() * zero, torch.ones(2, 3), use_reentrant=False)
            Root.apply(hidden).sum().backward()
            optimizer.step()
    assert seen.finding().culprits[0].source is not None
    assert blamed(seen.finding())[2] == line_of("function")


def test_an_optimizer_inside_of_the_backward_pass() -> None:
    """An update made by a hook is looked at as well, and the program goes on through it."""
    with watched() as seen:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        for zero in (1.0, 0.0):
            model.zero_grad()
            (model(torch.ones(2, 3)) * zero).square().sum(-1).sqrt().sum().backward()  # inside
    (fault,) = seen.faults
    assert fault.step == 4
    assert blamed(seen.finding())[2] == line_of("inside")


def test_an_update_that_raises() -> None:
    """It is forgotten, and what comes then is recorded."""
    with watched() as seen:
        loop = Loop()
        loop.optimizer.param_groups[0]["betas"] = "wrong"
        with pytest.raises((TypeError, ValueError)):
            loop.run([batch_of(0)])
        loop.optimizer.param_groups[0]["betas"] = (0.9, 0.99)
        loop.run([batch_of(1), BAD["loss"]])
    assert blamed(seen.finding())[2] == line_of("loss")


def test_modes_of_the_script_come_and_go() -> None:
    """A dispatch mode that the script enters before, and leaves after, the recording begins stays where it belongs."""
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415  (imports much)

    with watched(from_step=1) as seen:
        loop = Loop()
        with FlopCounterMode(display=False) as counter:
            loop.run([batch_of(0), batch_of(1)])
        flops = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            loop.run([batch_of(0), batch_of(1)])
        assert counter.get_total_flops() == flops > 0
        loop.run([BAD["loss"]])
    assert blamed(seen.finding())[2] == line_of("loss")


def test_what_cannot_be_recorded_ends_the_program_and_not_the_script() -> None:
    """The step is counted, its parameters are looked at, and the next step is recorded again."""
    with watched() as seen:
        loop = Loop()
        for grown in (True, True, False):
            loop.optimizer.zero_grad()
            loss = loss_of(loop.model, batch_of(0) if grown else BAD["loss"])
            if grown:
                torch.ones(2).resize_(9)
            loss.backward()
            loop.optimizer.step()
    assert blamed(seen.finding())[2] == line_of("loss")
    assert seen.watch.unrecorded == 2
    with watched() as seen:
        loop = Loop()
        loss = loss_of(loop.model, BAD["loss"])
        torch.ones(2).resize_(9)
        loss.backward()
        loop.optimizer.step()
    (fault,) = seen.faults
    assert fault.snapshot is None
    assert fault.problem is not None
    assert "grow" in fault.problem.got


def test_copies_of_a_model_between_steps() -> None:
    """Where no step is under way, the program begins behind what cannot be recorded."""
    with watched() as seen:
        loop = Loop()
        loop.run([batch_of(0)])
        best = copy.deepcopy(loop.model.state_dict())
        loop.run([BAD["loss"]])
    assert blamed(seen.finding())[2] == line_of("loss")
    assert torch.equal(best["first.weight"], loop.model.first.weight)


@pytest.mark.parametrize("kind", ["loss", "optimizer"])
def test_a_script_that_goes_on_after_its_fault(kind: str) -> None:
    """Nothing is watched any more, and hooks of the script's own are all called."""
    faults: list[Fault] = []
    watch = Watch(from_step=0, caught=faults.append)
    watch.start()
    called: list[str] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: called.append("before")),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    ]
    try:
        Loop().run([batch_of(0), BAD[kind], BAD[kind], batch_of(1)])
        assert torch._C._len_torch_dispatch_stack() == 0
    finally:
        watch.close()
        for hook in hooks:
            hook.remove()
    assert len(faults) == 1
    assert called == ["before", "after"] * 4


# --- from which step on -----------------------------------------------------------------------------------------------------


def test_recording_from_a_later_step() -> None:
    """Before it no call is seen; at it the step is recorded from its beginning."""
    with watched(from_step=2) as seen:
        loop = Loop()
        loop.run([batch_of(0)])
        assert torch._C._len_torch_dispatch_stack() == 0
        loop.run(loaded(batch_of(1), BAD["gradient"]))
    assert blamed(seen.finding())[2] == line_of("gradient")
    assert len(seen.snapshot.history) == 3


def test_a_fault_before_the_recording() -> None:
    """Parameters that become bad are told with the step, and without a snapshot."""
    with watched(from_step=9) as seen:
        Loop().run([batch_of(0), BAD["gradient"], batch_of(1)])
    (fault,) = seen.faults
    assert (fault.step, fault.snapshot) == (1, None)


def test_compiled_models_run_eagerly_while_recorded() -> None:
    """What was compiled before the recording runs eagerly during it, so that its calls are seen."""
    with watched(from_step=1) as seen:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for zero in (1.0, 0.0):
            optimizer.zero_grad()
            (compiled(torch.ones(2, 3)).square() * zero + zero).sqrt().sum().backward()  # compiled
            optimizer.step()
    assert blamed(seen.finding())[2] == line_of("compiled")
    assert any("addmm" in str(node.target) for node in seen.snapshot.program.nodes)


# --- memory -----------------------------------------------------------------------------------------------------------------


def recorders() -> int:
    """Return how many recorders are alive."""
    gc.collect()
    return sum(type(item) is Recorder for item in gc.get_objects())


def test_nothing_of_a_finite_step_is_kept() -> None:
    """Batches and activations die as they would without a watch, and one program is held."""
    with watched() as seen:
        loop, batches, others = Loop(), [], recorders() - 1
        for seed in range(6):
            batch = batch_of(seed)
            batches.append(weakref.ref(batch["x"].untyped_storage()))
            loop.run([batch])
            del batch
            assert recorders() - others <= 1
        assert sum(ref() is not None for ref in batches) <= 1
    assert not seen.faults
    assert recorders() == others


def test_a_retained_graph_holds_a_few_steps_at_most() -> None:
    """Graphs that are never run again are given up after some updates."""
    with watched() as seen:
        loop, refs = Loop(), []
        for seed in range(20):
            batch = batch_of(seed)
            loss = loss_of(loop.model, batch)
            loss.backward(retain_graph=True)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            refs.append(weakref.ref(batch["gate"].untyped_storage()))
            del batch
        gc.collect()
        assert sum(ref() is not None for ref in refs) <= tape._SPAN + 1
    assert not seen.faults


def test_a_sum_of_losses_holds_no_program() -> None:
    """`total += loss` grows a graph without tensors, which no backward pass needs."""
    with watched() as seen:
        loop, total, refs = Loop(), torch.zeros(()), []
        for seed in range(5):
            batch = batch_of(seed)
            loop.optimizer.zero_grad()
            loss = loss_of(loop.model, batch)
            loss.backward()
            loop.optimizer.step()
            total = total + loss
            refs.append(weakref.ref(batch["gate"].untyped_storage()))
            del batch
        gc.collect()
        assert sum(ref() is not None for ref in refs) <= 1
    assert not seen.faults


def test_a_long_evaluation_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes without gradients between two updates are given up when they become many, and the next step is told."""
    monkeypatch.setattr(stream, "_CALLS", 500)
    with watched() as seen:
        loop, refs = Loop(), []
        loop.run([batch_of(0)])
        with torch.no_grad():
            for seed in range(400):
                batch = batch_of(seed)
                loss_of(loop.model, batch)
                refs.append(weakref.ref(batch["gate"].untyped_storage()))
                del batch
        alive = sum(ref() is not None for ref in refs)
        loop.run([BAD["gradient"]])
    assert alive < 60
    assert blamed(seen.finding())[2] == line_of("gradient")


def test_large_batches_without_gradients_are_given_up_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls may hold much memory."""
    monkeypatch.setattr(stream, "_BYTES", 2**16)
    with watched(), torch.no_grad():
        refs = []
        for _ in range(400):
            data = torch.from_numpy(torch.ones(2**12).numpy())
            refs.append(weakref.ref(data.untyped_storage()))
            data.mean()
            del data
        assert sum(ref() is not None for ref in refs) < 260


def test_workers_of_data_loaders() -> None:
    """A forked worker is not watched, and its batches come with their names."""
    data = TensorDataset(torch.randn(8, 3), torch.tensor([1.0] * 6 + [0.0] * 2))
    with watched() as seen:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork"):
            optimizer.zero_grad()
            (model(x).squeeze(-1).square() + y.log()).mean().backward()  # worker
            optimizer.step()
    assert blamed(seen.finding())[1:] == (Phase.FORWARD, line_of("worker"))
    assert {p.name for p in seen.snapshot.program.placeholders} >= {"batch[0]", "batch[1]"}


def stopping(model: nn.Module, check: Callable[[torch.Tensor], object], *, batches: Iterable[int] = range(3)) -> None:
    """Train, with a zero under a logarithm in batch 1, and let the script look at its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in batches:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 3)).square() * (number != 1)).log().mean()  # looked at
        if check(loss) == "break":
            break
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def refused(loss: torch.Tensor) -> None:
    """Raise for a loss that is not finite."""
    if not math.isfinite(loss.item()):
        raise ArithmeticError(f"loss is {loss.item()}")


def left(loss: torch.Tensor) -> None:
    """End the script for a loss that is not finite."""
    if not torch.isfinite(loss):
        raise SystemExit(1)


@pytest.mark.parametrize("check", [refused, left])
def test_a_script_that_ends_at_its_own_look(check: Callable[[torch.Tensor], object]) -> None:
    """What it raises is explained by what it has looked at, before any backward pass."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with watched() as seen:
        try:
            stopping(model, check)
        except (ArithmeticError, SystemExit) as error:
            fault = seen.watch.ended(error)
            assert fault is not None
            seen.faults.append(fault)
    assert seen.faults[0].step == 1
    assert blamed(seen.finding()) == ("log_of_zero", Phase.FORWARD, line_of("looked at"))
    symptom = seen.finding().symptom
    assert symptom is not None
    assert symptom.kind == "value"


def test_a_script_that_comes_to_its_end_early() -> None:
    """A loop that it leaves at a NaN counts, one that goes on does not, nor an infinity, which may be meant."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with watched() as seen:
        stopping(model, lambda loss: "break" if torch.isnan(loss - loss) else None)
        fault = seen.watch.ended(None)
    assert fault is not None
    seen.faults.append(fault)
    assert blamed(seen.finding())[0] == "log_of_zero"
    for batches, quotient in (((1, 0), 0.0), ((0, 2), 1.0)):  # a bad batch that is left out, and none
        with watched() as seen:
            stopping(model, lambda loss: "break" if torch.isnan(loss - loss) else None, batches=batches[1:])
            assert math.isinf((torch.ones(()) / torch.tensor(quotient)).item()) == (quotient == 0)
            assert seen.watch.ended(None) is None


def test_a_gradient_that_the_script_looks_at() -> None:
    """A script that raises for the norm of its gradients is explained by its backward pass; an unrelated end is none."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with watched() as seen:
        model(torch.ones(2, 3)).mul(0).square().sum().sqrt().backward()  # of zero
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert not torch.isfinite(norm)
        fault = seen.watch.ended(ArithmeticError())
    assert fault is not None
    seen.faults.append(fault)
    assert blamed(seen.finding()) == ("sqrt_grad_at_zero", Phase.BACKWARD, line_of("of zero"))
    with watched() as seen:
        model(torch.ones(2, 3)).mul(0).square().sum().sqrt().backward()
        assert seen.watch.ended(KeyboardInterrupt()) is None
    model.zero_grad()
    with watched() as seen:
        model(torch.ones(2, 3)).sum().backward()
        assert seen.watch.ended(KeyError("another reason")) is None


def test_anomaly_mode_of_the_script() -> None:
    """The backward pass runs to its end, which the watch looks at, and the mode stays on."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.autograd.set_detect_anomaly(mode=True)
    try:
        with watched() as seen:
            model(torch.ones(2, 3)).mul(0).square().sum().sqrt().backward()  # anomaly
            assert torch.is_anomaly_enabled()
            optimizer.step()
    finally:
        torch.autograd.set_detect_anomaly(mode=False)
    assert blamed(seen.finding()) == ("sqrt_grad_at_zero", Phase.BACKWARD, line_of("anomaly"))
