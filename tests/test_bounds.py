"""What a run leaves out because it is finite for sure: never anything that is not, and all gradients of weights."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import Plan, RandomProgram, programs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bisect_nan import Snapshot, finite, locate
from bisect_nan.blaming.confirm import Interventions
from bisect_nan.blaming.trace import Birth, Origin
from bisect_nan.replaying.bounds import Bounds
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Run
from bisect_nan.replaying.stretch import Stretch

SCALES = (1e-30, 1.0, 240.0, 6e4, 1e19, 3e38, math.inf, math.nan)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def compared(stretch: Stretch, tensors: Any) -> set[int]:
    """Run a stretch in full and with bounds; return the targets that were left out, after looking at all values that were made."""
    start, bounds = stretch.start(tensors), Bounds(stretch)
    plain, short = Run(stretch, start), Run(stretch, start, bounds=bounds)
    plain.advance(len(stretch))
    short.advance(len(stretch))
    assert short.env.keys() == plain.env.keys() - bounds.left_out
    assert all(finite.same(tensor, plain.env[number]) for number, tensor in short.env.items())
    left_out = plain.env.keys() & bounds.left_out
    assert not finite.probe(plain.env[number] for number in left_out)
    return left_out


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.sampled_from(DTYPES), *[st.sampled_from(SCALES)] * 2, st.integers(1, 40), st.sampled_from(["mm", "bmm", "sum"])
)
def test_what_is_left_out_is_finite(dtype: torch.dtype, left: float, right: float, inner: int, op: str) -> None:
    """Products and sums near the end of the range, beyond it, and of NaN, in every type."""
    torch.manual_seed(0)
    a, b = torch.ones(3, inner, dtype=dtype), torch.ones(inner, 2, dtype=dtype)
    a[1, -1], b[0, 1] = left, right

    def step(_: None, batch: list[torch.Tensor]) -> torch.Tensor:
        first, second = batch
        ends = {
            "mm": lambda: first @ second,
            "bmm": lambda: torch.bmm(first[None], second[None]).squeeze(0),
            "sum": lambda: first.sum(1),
        }
        ends[op]().t()
        return first.new_zeros(())

    snapshot = Snapshot.capture(None, [a, b], step)
    nodes = snapshot.program.nodes
    ends = [number for number in nodes[-2].outputs if number is not None]  # the loss comes last
    left_out = compared(Stretch(snapshot.program, range(len(nodes)), ends), snapshot.tensors())
    if all(abs(scale) < 100 for scale in (left, right)):
        assert left_out == set(ends)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(programs(Plan(most=2, length=12, backward=True)))
def test_steps_come_out_the_same(program: RandomProgram) -> None:
    """What is not left out holds the same values, bit for bit."""
    model, batch = program.build()
    torch.manual_seed(program.seed)
    snapshot = Snapshot.capture(model, batch, program.step())
    targets = [*snapshot.program.targets.gradients.values(), snapshot.program.targets.loss]
    compared(Stretch(snapshot.program, range(len(snapshot.program.nodes)), targets), snapshot.tensors())


class Tagger(nn.Module):
    """An embedding, three linear layers that a root at zero follows, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.twice = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, ids: torch.Tensor, *, fails: bool) -> torch.Tensor:
        x = self.twice(self.twice(self.words(ids)))
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean() + ((x * 0).sqrt().sum() if fails else 0)


def captured(*, fails: bool) -> Snapshot:
    """Record a step."""
    torch.manual_seed(0)
    return Snapshot.capture(Tagger(), torch.tensor([[0, 3, 3], [1, 2, 6]]), lambda model, ids: model(ids, fails=fails))


def test_gradients_of_weights_are_left_out() -> None:
    """Nothing reads the gradients of an embedding, of weights and of biases; those of a layer that is used twice are added up."""
    program = captured(fails=False).program
    names = {number: name for name, number in program.targets.gradients.items()}
    left_out = compared(Stretch(program, range(len(program.nodes)), names), captured(fails=False).tensors())
    assert {names[number] for number in left_out} == {name for name in names.values() if not name.startswith("twice")}


def test_a_call_that_is_needed_runs() -> None:
    """Where a result is to be changed, it has to be made."""
    program = captured(fails=False).program
    target = program.targets.gradients["layers.0.weight"]
    stretch = Stretch(program, range(len(program.nodes)), program.targets.gradients.values())
    for needed in ((), range(len(program.nodes))):
        bounds = Bounds(stretch, needed)
        run = Run(stretch, stretch.start(captured(fails=False).tensors()), bounds=bounds)
        run.advance(len(stretch))
        assert (target in bounds.left_out) is (needed == ())


def test_what_is_written_to_later_is_made() -> None:
    """A product that somebody adds to in place is not the end of it."""
    weight = torch.ones(2, 2)

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        product = x @ weight
        product.view(-1)[:1].mul_(1e30)
        return product.new_zeros(())

    snapshot = Snapshot.capture(None, torch.full((2, 2), 1e20), step)
    nodes = snapshot.program.nodes
    targets = [node.outputs[0] for node in nodes if node.target is torch.ops.aten.mm.default]
    assert not compared(
        Stretch(snapshot.program, range(len(nodes)), [t for t in targets if t is not None]), snapshot.tensors()
    )


class Calls(TorchDispatchMode):
    """Counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def test_a_confirmation_does_not_make_them() -> None:
    """Behind a fault in the last layer, the gradients of five inputs are computed, and of the weight that is used twice."""
    snapshot = captured(fails=True)
    program, observed = snapshot.program, snapshot.observed
    assert observed is not None
    targets = [program.targets.gradients[name] for name in observed.names]
    stretch = Stretch(program, Dependence(program).slice(targets), targets)
    (culprit,) = locate(snapshot).culprits
    value = program.nodes[culprit.node].outputs[0]
    assert value is not None
    birth = Birth(culprit.node, value, torch.ones(program.values[value].shape, dtype=torch.bool), Origin.MADE)
    court = Interventions(stretch, [stretch.start(snapshot.tensors())], targets)
    with Calls() as calls:
        assert court.heals([birth])
    assert court.runs == 1
    assert calls.counts[torch.ops.aten.mm.default] == 5 + 2
    assert calls.counts[torch.ops.aten.embedding_dense_backward.default] == 0
