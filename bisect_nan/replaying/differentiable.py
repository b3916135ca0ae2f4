"""Runs the recorded forward pass under autograd with some of its calls changed, and then its backward pass.

A change to a forward call changes the derivative, too, so the recorded backward calls no longer belong to it: autograd has to
derive them anew. What autograd cannot derive from recorded calls is the backward code of a custom `torch.autograd.Function`: where it
was recorded, those calls are run again on the new gradients; else autograd derives the Function's forward calls in its stead, and the
run says so (`Rerun.derived`). Hooks do not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_map_only

from bisect_nan import finite
from bisect_nan.errors import ReplayError
from bisect_nan.recording.generators import GeneratorStates
from bisect_nan.recording.program import Application, Arguments, Node, Tracking, named, substitute, tensors
from bisect_nan.replaying.stretch import Env, Stretch
from bisect_nan.replaying.tracking import materialised, recorded_uses, without_graph

Change = Callable[[torch._ops.OpOverload, Arguments], Any]
"""Runs in the place of a call and returns what the call would return; must not write to the arguments unless the call does."""


_FOLLOWED = "a change that the rest of the step can follow"
_OTHERWISE = "try another change, or make this one in the code of the step and run that"


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
        changed: The calls that were changed.
        moved: Whether a change moved a healthy result of a call.
        derived: Names of custom autograd Functions whose own backward code was not run: autograd derived their forward calls.
    """

    def __init__(
        self,
        stretch: Stretch,
        placeholders: Mapping[int, torch.Tensor],
        changes: Mapping[int, Change] | None = None,
        types: Types | None = None,
        careful: Collection[int] = (),
    ) -> None:
        """Prepare.

        Args:
            stretch: The calls of the forward pass that the loss needs.
            placeholders: The tensors from outside, by value number; they are not written to.
            changes: By program index: what runs in the place of a call.
            types: In which element types the calls run; as recorded when not given.
            careful: Changed calls whose healthy results are compared with those of the call itself.
        """
        self._careful, self.moved, self.changed = careful, False, set(changes or {})
        self._stretch, self._changes, self._types = stretch, changes or {}, types or Types()
        placeholders = {n: self._types.placeholder(tensor.detach()) for n, tensor in placeholders.items()}
        self.env: Env = stretch.own(placeholders, 0)
        self.leaves: Env = {}
        self._made_outside = set(self.env)
        self._uses = recorded_uses(stretch)
        self._within, self._tracked, self.derived = without_graph(stretch, self._uses)
        self._materialised = {number for node in stretch.nodes for number in materialised(node, stretch)}
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
                raise ReplayError(got, _FOLLOWED, _OTHERWISE, node=node.index) from problem
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
        if node.memory is not None and node.index not in self._changes:
            kept = node.memory
            return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=kept.device).copy_(kept)
        usual = Tracking.GRAPH if node.index in self._within else Tracking.NO
        tracked = iter(node.tracked or [usual] * len(node.inputs()))

        def take(number: int) -> torch.Tensor:
            return self._argument(number, next(tracked), node)

        args, kwargs = self._arguments(node, take)
        before = self._plainly(node, args, kwargs) if node.index in self._careful and not node.random else None
        result = self._changed(node, args, kwargs)
        if before is not None and isinstance(result, torch.Tensor) and not stays(result.detach(), before):
            self.moved = True
        return self._types.after(node, result)

    def _arguments(self, node: Node, take: Callable[[int], torch.Tensor]) -> tuple[Any, Any]:
        """Return the live arguments of a call, with its generator as it was before it."""
        if node.generator is not None:
            self._generators.set(self._stretch.source(node), node.generator)
        args = substitute(node.args, take, self._generators.of)
        kwargs = substitute(node.kwargs, take, self._generators.of)
        return self._types.before(node, args, kwargs)

    def _changed(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Run a call, or what runs in its place."""
        change = self._changes.get(node.index)
        return node.target(*args, **kwargs) if change is None else change(node.target, named(node.target, args, kwargs))

    def _plainly(self, node: Node, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Run a call as it is, on copies, and return its first result."""
        with torch.no_grad():
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs))
            made = node.target(*args, **kwargs)
        return made if isinstance(made, torch.Tensor) else None

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
            if number is not None and gradient is not None:
                env[number] = gradient
            elif number is not None:
                value = values[number]
                env[number] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        for node in self._stretch.program.nodes[use.first : use.last]:
            made = tensors(self._types.after(node, self._changed(node, *self._arguments(node, env.__getitem__))))
            env.update({n: t for n, t in zip(node.outputs, made, strict=False) if n is not None and t is not None})
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
        raise ReplayError(got, "forward calls that autograd can derive", _OTHERWISE, node=node.index)

    def _keep(self, node: Node, result: Any) -> None:
        for number, tensor in zip(node.outputs, tensors(result), strict=False):
            if number is None or tensor is None or (number in node.written and number in self.env):
                continue
            expected = self._stretch.program.values[number].shape
            if tensor.shape != expected:
                got = f"node {node.index} ({node.target}) gave shape {tuple(tensor.shape)} with the change"
                raise ReplayError(got, f"{expected}, as recorded", _OTHERWISE, node=node.index)
            self.env[number] = tensor


TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far a remedy may move healthy results of a call, relative to themselves; `_TOLERANCE` in other types."""
_TOLERANCE = 1e-3


def stays(after: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether the healthy elements of a result are as they were, within the tolerance of their type."""
    if not (before.is_floating_point() or before.is_complex()) or before.layout is not torch.strided:
        return True
    limit = torch.finfo(before.dtype).max ** 0.4  # beyond, it is part of an overflow
    healthy = finite.with_kernels(before).abs() < limit
    if not bool(healthy.any()):
        return True
    tolerance = TOLERANCE.get(before.dtype, _TOLERANCE)
    wide = torch.complex128 if before.is_complex() else torch.float64
    return torch.allclose(after[healthy].to(wide), before[healthy].to(wide), rtol=tolerance, atol=tolerance * 1e-3)


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
