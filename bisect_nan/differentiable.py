"""Runs the recorded forward pass under autograd with some of its calls changed, and then its backward pass.

A change to a forward call changes the derivative, too, so the recorded backward calls no longer belong to it: autograd has to
derive them anew. What autograd cannot derive from recorded calls is the backward code of a custom `torch.autograd.Function`: where it
was recorded, those calls are run again on the new gradients; else autograd derives the Function's forward calls in its stead, and the
run says so (`Rerun.derived`). Hooks do not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bisect_nan.applications import RECOMPUTING
from bisect_nan.errors import ReplayError
from bisect_nan.finding import Phase
from bisect_nan.generators import GeneratorStates
from bisect_nan.program import Application, Arguments, Node, Program, Tracking, named, substitute, tensors
from bisect_nan.stretch import Env, Stretch

Change = Callable[[torch._ops.OpOverload, Arguments], Any]
"""Runs in the place of a call and returns what the call would return; must not write to the arguments unless the call does."""


class Types:
    """In which element types the calls of a run are executed; this one leaves all as recorded."""

    def placeholder(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what to use in the place of a tensor from outside."""
        return tensor

    def before(self, node: Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that a call is to be run with."""
        del node
        return args, kwargs

    def after(self, node: Node, result: Any) -> Any:
        """Return what is kept of a call's result."""
        del node
        return result


class Several(Types):
    """Several choices of types at once, one after the other."""

    def __init__(self, types: Sequence[Types]) -> None:
        """Remember them."""
        self._types = types

    def placeholder(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what all of them together make of a tensor from outside."""
        return functools.reduce(lambda item, types: types.placeholder(item), self._types, tensor)

    def before(self, node: Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return what all of them together make of a call's arguments."""
        for types in self._types:
            args, kwargs = types.before(node, args, kwargs)
        return args, kwargs

    def after(self, node: Node, result: Any) -> Any:
        """Return what all of them together keep of a result, the last one first."""
        return functools.reduce(lambda item, types: types.after(node, item), reversed(self._types), result)


class Rerun:
    """One execution of a step's forward calls under autograd.

    Attributes:
        env: The values alive now.
        leaves: The tensors that gradients are left in, by value number.
        derived: Names of custom autograd Functions whose own backward code was not run: autograd derived their forward calls.
    """

    def __init__(
        self,
        stretch: Stretch,
        placeholders: Mapping[int, torch.Tensor],
        changes: Mapping[int, Change] | None = None,
        types: Types | None = None,
    ) -> None:
        """Prepare.

        Args:
            stretch: The calls of the forward pass that the loss needs.
            placeholders: The tensors from outside, by value number; they are not written to.
            changes: By program index: what runs in the place of a call.
            types: In which element types the calls run; as recorded when not given.
        """
        self._stretch, self._changes, self._types = stretch, changes or {}, types or Types()
        placeholders = {n: self._types.placeholder(tensor.detach()) for n, tensor in placeholders.items()}
        self.env: Env = stretch.own(placeholders, 0)
        self.leaves: Env = {}
        self._made_outside = set(self.env)
        self._uses = _recorded_uses(stretch)
        self._within, self._tracked, self.derived = _without_graph(stretch, self._uses)
        self._materialised = {number for node in stretch.nodes for number in _materialised(node, stretch)}
        self._generators = GeneratorStates({})

    def forward(self) -> None:
        """Execute all calls.

        Raises:
            ReplayError: A call failed, made another size than the recorded one, or takes a value that autograd tracked in the step
                and does not track here.
        """
        for place, node in enumerate(self._stretch.nodes):
            try:
                with torch.set_grad_enabled(node.grad or node.index in self._within):
                    result = self._call(node)
            except ReplayError:
                raise
            except Exception as problem:
                got = f"node {node.index} ({node.target}) cannot be executed with the change: {problem}"
                raise ReplayError(
                    got, "a change that the rest of the step can follow", "", node=node.index
                ) from problem
            self._keep(node, result)
            for use in self._uses.get(node.index, ()):
                self._connect(use)
            for number in self._stretch.free[place]:
                self.env.pop(number, None)

    def gradients(self, output: torch.Tensor, scale: float = 1.0) -> Env:
        """Return the gradient of a scalar with respect to every leaf that it depends on, by value number.

        Args:
            output: The loss.
            scale: What the backward pass starts with, in the place of 1.
        """
        leaves = {n: leaf for n, leaf in self.leaves.items() if leaf.requires_grad}
        if not leaves or not output.requires_grad:
            return {}
        seed = torch.full_like(output, scale)
        found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            output, list(leaves.values()), seed, allow_unused=True
        )
        return {n: gradient for n, gradient in zip(leaves, found, strict=True) if gradient is not None}

    def _call(self, node: Node) -> Any:
        if node.generator is not None:
            self._generators.set(self._stretch.source(node), node.generator)
        if node.memory is not None and node.index not in self._changes:
            kept = node.memory
            return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=kept.device).copy_(kept)
        usual = Tracking.GRAPH if node.index in self._within else Tracking.NO
        tracked = iter(node.tracked or [usual] * sum(1 for _ in node.inputs()))

        def take(number: int) -> torch.Tensor:
            return self._argument(number, next(tracked), node)

        args = substitute(node.args, take, self._generators.of)
        kwargs = substitute(node.kwargs, take, self._generators.of)
        args, kwargs = self._types.before(node, args, kwargs)
        change = self._changes.get(node.index)
        result = (
            node.target(*args, **kwargs) if change is None else change(node.target, named(node.target, args, kwargs))
        )
        return self._types.after(node, result)

    def _connect(self, use: Application) -> None:
        """Give what a Function returned its own backward code again."""
        inputs = [self._leaf(number) for number in use.inputs if number is not None]
        if any(tensor.requires_grad for tensor in inputs):
            outputs: tuple[torch.Tensor, ...] = _Recorded.apply(self, use, *inputs)  # type: ignore[no-untyped-call]
            numbers = [number for number in use.outputs if number is not None]
            self.env.update(zip(numbers, outputs, strict=True))

    def _leaf(self, number: int) -> torch.Tensor:
        tensor = self.env[number]
        if number in self._made_outside and number in self._tracked and not tensor.requires_grad:
            tensor = self.env[number] = self.leaves[number] = tensor.detach().requires_grad_()
        return tensor

    def backward_code(self, use: Application, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run the recorded backward code of a Function on new gradients, and return those that it returns."""
        values = self._stretch.program.values
        env = dict(self.env)
        for number, gradient in zip(use.given, given, strict=True):
            if number is not None:
                value = values[number]
                zero = (
                    torch.zeros(value.shape, dtype=value.dtype, device=value.device) if gradient is None else gradient
                )
                env[number] = zero
        for node in self._stretch.program.nodes[use.first : use.last]:
            if node.generator is not None:
                self._generators.set(self._stretch.source(node), node.generator)
            args = substitute(node.args, env.__getitem__, self._generators.of)
            kwargs = substitute(node.kwargs, env.__getitem__, self._generators.of)
            args, kwargs = self._types.before(node, args, kwargs)
            change = self._changes.get(node.index)
            made = (
                node.target(*args, **kwargs)
                if change is None
                else change(node.target, named(node.target, args, kwargs))
            )
            kept = self._types.after(node, made)
            flat = (kept,) if isinstance(kept, torch.Tensor) else tensors(kept)
            env.update({n: t for n, t in zip(node.outputs, flat, strict=False) if n is not None and t is not None})
        return [None if number is None else env[number] for number in use.returned]

    def _argument(self, number: int, tracking: Tracking, node: Node) -> torch.Tensor:
        """Return an argument as autograd knew it in the step."""
        tensor = self.env[number]
        if tracking is Tracking.NO or not (tensor.is_floating_point() or tensor.is_complex()):
            # `.data` rather than `detach`: where the step wrote to it, it did so behind autograd's back, or autograd had raised.
            return tensor.data if tensor.requires_grad and number not in self._materialised else tensor
        if tensor.requires_grad:
            return tensor
        if node.index in self._within and number not in self._tracked:
            return tensor
        if number in self._made_outside or tracking is Tracking.LEAF:
            leaf = self.env[number] = self.leaves[number] = tensor.detach().requires_grad_()
            return leaf
        got = f"node {node.index} ({node.target}) uses a result of a custom autograd Function or of a reentrant checkpoint"
        raise ReplayError(got, "forward calls that autograd can derive", "", node=node.index)

    def _keep(self, node: Node, result: Any) -> None:
        made = (result,) if isinstance(result, torch.Tensor) else tensors(result)
        for number, tensor in zip(node.outputs, made, strict=False):
            if number is None or tensor is None or (number in node.written and number in self.env):
                continue
            expected = self._stretch.program.values[number].shape
            if tensor.shape != expected:
                got = f"node {node.index} ({node.target}) gave shape {tuple(tensor.shape)} with the change"
                raise ReplayError(got, f"{expected}, as recorded", "", node=node.index)
            self.env[number] = tensor


class _Recorded(torch.autograd.Function):
    """What a Function of the step returned, with the backward code that was recorded of it."""

    @staticmethod
    def forward(ctx: Any, rerun: Rerun, use: Application, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del inputs
        ctx.rerun, ctx.use = rerun, use
        ctx.set_materialize_grads(False)
        return tuple([rerun.env[number].detach() for number in use.outputs if number is not None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[Any, ...]:
        places = iter(given)
        gradients = [None if number is None else next(places) for number in ctx.use.outputs]
        returned = ctx.rerun.backward_code(ctx.use, gradients)
        wanted = [gradient for number, gradient in zip(ctx.use.inputs, returned, strict=True) if number is not None]
        return None, None, *wanted


def saved(program: Program) -> list[int]:
    """Return the values of the forward pass that the recorded backward code of Functions reads."""
    made = {number for node in program.nodes if node.phase is Phase.FORWARD for number in node.outputs}
    nodes = [node for use in program.applications for node in program.nodes[use.first : use.last]]
    read = {number for node in nodes for number in node.inputs()}
    inputs = {number for use in program.applications for number in use.inputs if number is not None}
    return sorted((read | inputs) & {number for number in made if number is not None})


def _recorded_uses(stretch: Stretch) -> dict[int, list[Application]]:
    """Return the uses of Functions whose backward code is known, by the call behind which all that they returned is there."""
    makers = {number: node.index for node in reversed(stretch.nodes) for number in node.outputs if number is not None}
    found: dict[int, list[Application]] = {}
    for use in stretch.program.applications:
        outputs = [number for number in use.outputs if number is not None]
        if outputs and all(number in makers for number in outputs):
            found.setdefault(max(makers[number] for number in outputs), []).append(use)
    return found


def _without_graph(
    stretch: Stretch, applications: Mapping[int, Sequence[Application]]
) -> tuple[set[int], set[int], tuple[str, ...]]:
    """Find calls that autograd did not see though it tracked what they made: inside of Functions and of scripted code, and views.

    Returns:
        The calls; the placeholders that gradients are left in; the names of the custom Functions among them.
    """
    program = stretch.program
    makers: dict[int, Node] = {}
    for node in stretch.nodes:
        for number in node.outputs:
            if number is not None:
                makers.setdefault(number, node)
    within: set[int] = set()
    wanted = {number for number in stretch.targets if program.values[number].function}
    leaves: set[int] = set()
    for node in reversed(stretch.nodes):
        for use in applications.get(node.index, ()):
            if wanted.intersection(use.outputs):
                wanted.difference_update(use.outputs)
                inputs = {given for given in use.inputs if given is not None}
                wanted |= inputs
                leaves |= inputs
        if any(node.tracked):
            uses = list(zip(node.inputs(), node.tracked, strict=False))
            wanted |= {number for number, tracking in uses if tracking is Tracking.GRAPH}
            leaves |= {number for number, tracking in uses if tracking is Tracking.LEAF}
            continue
        made = [n for n in [*node.outputs, *node.written] if n in wanted and n in makers and not any(makers[n].tracked)]
        if made:
            within.add(node.index)
            wanted.update(node.inputs())
    leaves |= {p.value for p in program.placeholders if p.phase is Phase.PARAMETER and p.value in wanted}
    names = {program.values[n].function for n in wanted if n in makers and makers[n].index in within} - {""}
    custom = sorted(name.removesuffix("Backward") for name in names if name not in RECOMPUTING)
    return within, leaves, tuple(custom)


def _materialised(node: Node, stretch: Stretch) -> Iterator[int]:
    """Yield the values that torch made of lazily conjugated or negated views below autograd, which knows only the views."""
    values = stretch.program.values
    if node.target is torch.ops.aten.clone.default and any(values[n].conj or values[n].neg for n in node.inputs()):
        yield from (number for number in node.outputs if number is not None)
