"""Evidence for the tests of the catalog: runs code or one call eagerly and hands over what a matcher may look at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bisect_nan import finite
from bisect_nan.causes.evidence import Call, Evidence
from bisect_nan.causes.operands import ops
from bisect_nan.finding import Phase, SourceLine, Symptom

LOSS = Symptom("loss", "loss", ("nan",))
GRADIENT = Symptom("gradient", "weight", ("nan",))
PARAMETER = Symptom("parameter", "weight", ("nan",))
LITERALS = frozenset(
    {"full", "full_like", "fill", "masked_fill", "scalar_tensor", "where", "_to_copy", "triu", "index_put"}
)
"""Ops that write the infinities which a program means."""

_MOVES = ops(
    "add sub rsub mul div neg sqrt rsqrt clamp clamp_min clamp_max _to_copy clone expand_as index gather abs pow where"
)
"""Ops that the walk over ancestors passes through."""
_TORCH = str(Path(torch.__file__).parent)


@dataclass(slots=True)
class Observed:
    """One call that ran, with what ties it to other calls."""

    call: Call
    forward: Call | None
    makers: dict[str, Observed] = field(default_factory=dict)
    intended: bool = False


def bind(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arguments of a call by its schema, defaults included."""
    schema = target._schema.arguments
    positional = {spec.name: value for spec, value in zip(schema, args, strict=False)}
    defaults = {
        spec.name: spec.default_value for spec in schema if spec.name not in positional and spec.has_default_value()
    }
    return {**positional, **defaults, **kwargs}


def tensors(tree: Any) -> tuple[torch.Tensor | None, ...]:
    """Flatten the result of a call."""
    items = tree if isinstance(tree, list | tuple) else (tree,)
    return tuple(item if isinstance(item, torch.Tensor) else None for item in items)


def frozen(tree: Any) -> Any:
    """Copy every tensor of a tree, so that later writes do not reach it."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


def frames() -> Iterator[FrameType]:
    """The Python frames of the running call, the innermost first, without this file's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__ and "torch_dispatch" not in frame.f_code.co_name:
            yield frame
        frame = frame.f_back


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every ATen call that runs, with copies of what went in and came out."""

    def __init__(self) -> None:
        """Start with nothing observed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Observed] = []
        self._by_sequence: dict[int, Call] = {}
        self._by_storage: dict[int, Observed] = {}
        self._alive: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the call and keep it."""
        arguments = bind(func, args, kwargs or {})
        before = frozen(arguments)
        makers = {
            name: self._by_storage[value.untyped_storage()._cdata]
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._by_storage
        }
        result = func(*args, **(kwargs or {}))
        self._alive.append((args, kwargs, result))
        phase, source, forward, name = self._place()
        written = tensors(result if func._schema.returns else args[0])
        call = Call(func, before, frozen(written), phase, name, source)
        observed = Observed(call, forward, makers, call.op in LITERALS)
        observed.intended |= any(maker.intended for maker in makers.values())
        # An infinity that no call made was handed in on purpose by the test.
        observed.intended |= any(
            finite.has([v], finite.NonFinite.INF) for k, v in call.tensors().items() if k not in makers
        )
        self.seen.append(observed)
        self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, call)  # type: ignore[attr-defined]
        fresh = [item for item in written if item is not None and item.untyped_storage().size()]
        if not func.is_view and call.op != "detach":
            self._by_storage.update({item.untyped_storage()._cdata: observed for item in fresh})
        return result

    def _place(self) -> tuple[Phase, SourceLine, Call | None, str | None]:
        node: Any = torch._C._current_autograd_node()
        around = list(frames())
        user = next((frame for frame in around if not frame.f_code.co_filename.startswith(_TORCH)), around[-1])
        source = SourceLine(user.f_code.co_filename, user.f_lineno, user.f_code.co_name)
        if node is not None:
            engine = next(
                (i for i, frame in enumerate(around) if frame.f_code.co_name == "_engine_run_backward"), len(around)
            )
            in_python = user in around[:engine]
            forward = None if in_python else self._by_sequence.get(node._sequence_nr())
            return Phase.BACKWARD, (forward.source if forward and forward.source else source), forward, node.name()
        optimizing = any(f"torch{'/'}optim" in frame.f_code.co_filename for frame in around)
        return (Phase.OPTIMIZER if optimizing else Phase.FORWARD), source, None, None


def lineage(observed: Observed, name: str) -> tuple[str, ...]:
    """The ops behind an argument, nearest first, up to the one that says what it is."""
    found: list[str] = []
    maker = observed.makers.get(name.split("[", maxsplit=1)[0])
    while maker is not None and len(found) < 12:
        found.append(maker.call.op)
        if maker.call.op not in _MOVES:
            break
        maker = next(iter(maker.makers.values()), None)
    return tuple(found)


def _widened(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()


def rerun(call: Call, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...] | None:
    """Run a call again with its floating inputs in another type."""
    arguments = pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: _widened(tensor, dtype),
        dict(call.arguments),
    )
    schema = call.target._schema.arguments
    positional = [arguments[spec.name] for spec in schema if not spec.kwarg_only and spec.name in arguments]
    keywords = {spec.name: arguments[spec.name] for spec in schema if spec.kwarg_only and spec.name in arguments}
    try:
        result = call.target(*positional, **keywords)
    except (RuntimeError, TypeError):
        return None
    return tensors(result if call.target._schema.returns else positional[0])


def evidence_of(
    observed: Observed,
    mask: torch.Tensor,
    *,
    output: int = 0,
    symptom: Symptom = LOSS,
    intended: Sequence[SourceLine] = (),
    seen: Sequence[Observed] = (),
) -> Evidence:
    """Make the evidence for one observed call and its blamed elements; `seen` are all calls, if their updates count."""
    return Evidence(
        call=observed.call,
        output=output,
        mask=mask,
        symptom=symptom,
        forward=observed.forward,
        intended=tuple(intended),
        recompute=lambda dtype: rerun(observed.call, dtype),
        ancestors=lambda name: lineage(observed, name),
        history=tuple(parameter_norms(seen)),
    )


def parameter_norms(seen: Sequence[Observed]) -> Iterator[Mapping[str, float]]:
    """The norm of the parameter before each update of plain gradient descent."""
    for observed in seen:
        if observed.call.phase is Phase.OPTIMIZER and observed.call.op == "add":
            yield {
                "parameter_norm": float(torch.linalg.vector_norm(observed.call.arguments["self"], dtype=torch.float64))
            }


def run_one(
    target: torch._ops.OpOverload,
    *args: Any,
    phase: Phase = Phase.FORWARD,
    symptom: Symptom = LOSS,
    forward: Call | None = None,
    ancestors: Mapping[str, tuple[str, ...]] | None = None,
    autograd: str | None = None,
    output: int = 0,
    blame_all: bool = False,
    **kwargs: Any,
) -> Evidence:
    """Run one ATen overload eagerly and blame its non-finite elements (or all of them)."""
    arguments = bind(target, args, kwargs)
    before = frozen(arguments)
    result = target(*args, **kwargs)
    call = Call(target, before, frozen(tensors(result if target._schema.returns else args[0])), phase, autograd)
    blamed = call.outputs[output]
    assert blamed is not None
    mask = torch.ones(blamed.shape, dtype=torch.bool) if blame_all else finite.mask(blamed, finite.NonFinite.ANY)
    known = ancestors or {}
    return Evidence(
        call, output, mask, symptom, forward, (), lambda dtype: rerun(call, dtype), lambda name: known.get(name, ())
    )


def births(seen: Sequence[Observed]) -> Iterator[tuple[Observed, int, torch.Tensor]]:
    """Each output that holds a bad element which no input explains: where inputs are finite, or a meant Inf became NaN."""
    for observed in seen:
        meant = observed.call.op in LITERALS and observed.call.op != "_to_copy"
        for index, value in enumerate(observed.call.outputs):
            if value is None or not (value.is_floating_point() or value.is_complex()):
                continue
            born = finite.mask(value, finite.NonFinite.NAN if meant else finite.NonFinite.ANY)
            for source in observed.call.tensors().values():
                bad = finite.mask(source, finite.NonFinite.ANY)
                if bad.any() and observed.intended and not finite.has([source], finite.NonFinite.NAN):
                    born = born & finite.mask(value, finite.NonFinite.NAN)
                elif bad.any():
                    born = born & ~_spread(bad, born.shape)
            if born.any():
                yield observed, index, born


def _spread(bad: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    try:
        return bad.expand(shape)
    except RuntimeError:
        return torch.ones(shape, dtype=torch.bool)


def leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """The leaf tensors behind a loss that take a gradient."""
    found: list[torch.Tensor] = []
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        pending.extend(parent for parent, _ in node.next_functions)
    return found


def defined(code: str, name: str) -> Callable[[], torch.Tensor]:
    """Execute a piece of example code and return the function of that name."""
    scope: dict[str, Any] = {}
    exec(compile(code, f"<{name}>", "exec"), scope)  # noqa: S102  (the catalog's own examples)
    function: Callable[[], torch.Tensor] = scope[name]
    return function


def observe(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor], list[Observed]]:
    """Run a function and its backward pass under an `Observer`: the loss, the gradients behind it, and all calls."""
    with Observer() as observer:
        loss = function()
        behind = leaves(loss)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), [leaf.grad for leaf in behind if leaf.grad is not None], observer.seen
