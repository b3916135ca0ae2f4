"""Runs a stretch of a program: from a checkpoint to a cut, with interventions, as often as needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from bisect_nan import finite
from bisect_nan.errors import ReplayError
from bisect_nan.finite import NonFinite
from bisect_nan.recording.generators import GeneratorStates, ProcessGenerators, Source
from bisect_nan.recording.program import NO_STORAGE, Node, Value, substitute, tensors
from bisect_nan.replaying.bounds import Bounds
from bisect_nan.replaying.stretch import Checkpoint, Env, Stretch


@dataclass(frozen=True, slots=True)
class Executed:
    """A call with its live values.

    Attributes:
        node: The call.
        inputs: Its tensor arguments as they were before it, by value number.
        content: What it made or wrote, as it was right after, by value number.
        generator: State of its random generator before a random call.
        source: Which generator that is.
    """

    node: Node
    inputs: Env
    content: Env
    generator: torch.Tensor | None = None
    source: Source = 0

    def again(self, inputs: Env) -> Env:
        """Run the call on other inputs, which are not changed, and return what it makes or writes."""
        with as_recorded():
            return self.differentiably(inputs)

    def differentiably(self, inputs: Env) -> Env:
        """Do the same under the caller's autograd settings."""
        node = self.node
        own = {number: tensor.clone() if number in node.written else tensor for number, tensor in inputs.items()}
        generators = GeneratorStates({} if self.generator is None else {self.source: self.generator})
        arguments = substitute(node.args, own.__getitem__, generators.of)
        result = tensors(node.target(*arguments, **substitute(node.kwargs, own.__getitem__, generators.of)))
        made = {number: own[number] for number in node.written}
        made |= {n: t for n, t in zip(node.outputs, result, strict=False) if n is not None and t is not None}
        return made


Edit = Callable[[Executed], None]
"""Looks at a call that has just run, and may change the elements of its `content` in place."""


class Run:
    """One execution of a stretch, from a checkpoint on.

    Attributes:
        cut: How many calls have run.
        env: The values alive now.
    """

    def __init__(
        self,
        stretch: Stretch,
        checkpoint: Checkpoint,
        edits: Mapping[int, Edit] | None = None,
        state: Env | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        """Take over the checkpoint's values.

        Args:
            stretch: The calls.
            checkpoint: Where to start.
            edits: By program index: what to do to a call's results before anything reads them.
            state: Tensors that replace values of the checkpoint.
            bounds: Knows calls that need not run because their results are finite for sure; their values are then missing.
        """
        self._stretch, self._edits, self._bounds = stretch, edits or {}, bounds
        self.cut = checkpoint.cut
        self.env = stretch.own({**checkpoint.env, **(state or {})}, checkpoint.cut)
        self._generators = GeneratorStates(checkpoint.generators)

    def advance(self, cut: int, visit: Edit | None = None) -> None:
        """Execute the calls up to a cut.

        Args:
            cut: Where to stop.
            visit: Sees every call with its live values; those that a call before `cut` overwrites are copies.

        Raises:
            ReplayError: A call failed.
        """
        with as_recorded():
            self._advance(cut, visit)

    def _advance(self, cut: int, visit: Edit | None) -> None:
        stretch, grad = self._stretch, torch.is_grad_enabled()
        for place in range(self.cut, cut):
            node = stretch.nodes[place]
            if self._bounds is not None and self._bounds.cover(place, self.env):
                self._pass(place)
                continue
            if node.grad is not grad:  # some kernels keep more for the backward pass only then (mkldnn_rnn_layer)
                torch._C._set_grad_enabled(node.grad)
                grad = node.grad
            if stretch.announce is not None:
                stretch.announce(node.index)
            edit = self._edits.get(node.index) if self._edits else None
            seen = None if edit is None and visit is None else self._before(node, place, cut if visit else place + 1)
            try:
                result = self._call(place)
            except Exception as problem:
                raise _failure(node, problem) from problem
            self._keep(node, result)
            stretch.executed += 1
            if seen is not None:
                self._show(seen, edit, visit, place + 1, cut)
            self._pass(place)

    def _pass(self, place: int) -> None:
        """Go behind a call, and let go of what no later one needs."""
        self.cut = place + 1
        for number in self._stretch.free[place]:
            self.env.pop(number, None)

    def _keep(self, node: Node, result: Any) -> None:
        """Keep what a call returned.

        Raises:
            ReplayError: It is not of the recorded size: the recorded calls are then no longer what the step would do.
        """
        made = (result,) if isinstance(result, torch.Tensor) else tensors(result)
        for place, number in enumerate(node.outputs):
            if number is None:
                continue
            tensor = made[place] if place < len(made) else None
            expected = self._stretch.program.values[number].shape
            if tensor is None or tensor.shape != expected:
                raise ReplayError(
                    f"node {node.index} ({node.target}) gave {'nothing' if tensor is None else f'shape {tuple(tensor.shape)}'}",
                    f"{expected}, as recorded",
                    "replay where the step was recorded: with other values the step takes another path than the recorded one",
                    node=node.index,
                )
            self.env[number] = tensor

    def _before(self, node: Node, place: int, until: int) -> Executed:
        source = self._stretch.source(node) if node.random else 0
        state = self._generators.of(source).get_state() if node.random and node.generator is None else node.generator
        return Executed(node, self._kept(node.inputs(), place, until), {}, state, source)

    def _show(self, seen: Executed, edit: Edit | None, visit: Edit | None, cut: int, until: int) -> None:
        numbers = [
            n for n in dict.fromkeys([*seen.node.outputs, *seen.node.written]) if n is not None and n in self.env
        ]
        if edit is not None:
            edit(replace(seen, content={number: self.env[number] for number in numbers}))
        if visit is not None:
            visit(replace(seen, content=self._kept(numbers, cut, until)))

    def _kept(self, numbers: Iterable[int], place: int, until: int) -> Env:
        """Return values, copied where a call from `place` up to `until` overwrites them."""
        values, stretch = self._stretch.program.values, self._stretch
        return {
            n: self.env[n].clone() if stretch.changed(values[n].storage, place, until) else self.env[n] for n in numbers
        }

    def _call(self, place: int) -> Any:
        node = self._stretch.nodes[place]
        if node.generator is not None:
            self._generators.set(self._stretch.source(node), node.generator)
        if node.memory is not None:
            kept = node.memory
            return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=kept.device).copy_(kept)
        arguments, keywords = self._stretch.bindings[place].fill(node, self.env, self._generators.of)
        return node.target(*arguments, **keywords)

    def checkpoint(self) -> Checkpoint:
        """Return the present frontier; the run may go on."""
        return Checkpoint(self.cut, self._stretch.own(self.env, self.cut), self._generators.states())

    def frontier(self, since: int) -> list[torch.Tensor]:
        """Return the values alive now whose memory was made or written behind the cut `since`, one per distinct view."""
        values = self._stretch.program.values
        found: dict[Hashable, torch.Tensor] = {}
        for number, tensor in self.env.items():
            value: Value = values[number]
            if value.storage == NO_STORAGE:
                found[number] = tensor
            elif self._stretch.changed(value.storage, since, self.cut):
                found[value.storage, value.offset, value.shape, value.stride, value.dtype] = tensor
        return list(found.values())

    def probe(self, since: int) -> NonFinite:
        """Return the kinds of non-finite value that the frontier gained behind the cut `since`."""
        return finite.probe(self.frontier(since))


@contextlib.contextmanager
def as_recorded() -> Iterator[None]:
    """Run calls as the recorder saw them: below autograd (torch 2.6 to 2.13) and autocast, without building a graph."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def own_generator() -> Iterator[None]:
    """Leave the process's random generators as they are."""
    before = ProcessGenerators()
    try:
        yield
    finally:
        before.restore()


def _failure(node: Node, problem: Exception) -> ReplayError:
    where = f" at {node.source}" if node.source else ""
    return ReplayError(
        f"node {node.index} ({node.target}{where}) cannot be executed here: {problem}",
        "a torch build and a device that have this kernel",
        "open the snapshot where it was recorded, or move it with --device",
        node=node.index,
    )
