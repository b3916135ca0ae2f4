"""What the operands of a culprit are at the blamed elements, as plain numbers, and how a note speaks of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from bisect_nan import finite
from bisect_nan.causes.evidence import Call, Evidence

ENOUGH = 1 / 3
"""Share of the blamed elements that must show a cause: one call makes at most three kinds of fault, so one always has it."""

HALVES = (torch.float16,)
"""The types whose largest number is small enough to be met in training."""

_DIVISOR = {
    "div": ("self", "other"),
    "true_divide": ("self", "other"),
    "floor_divide": ("self", "other"),
    "remainder": ("self", "other"),
    "fmod": ("self", "other"),
    "reciprocal": ("", "self"),
    "rsqrt": ("", "self"),
    "addcdiv": ("tensor1", "tensor2"),
    "softplus": ("", "beta"),
}


@dataclass(frozen=True, slots=True)
class Quotient:
    """A division at the blamed elements.

    Attributes:
        numerator: 1-D.
        denominator: 1-D, same length; under a reciprocal root the number under the root.
        divisor: Schema name of the argument that is divided by, as `Evidence.ancestors` takes it.
    """

    numerator: torch.Tensor
    denominator: torch.Tensor
    divisor: str


def ops(names: str) -> frozenset[str]:
    """Return the set of op names in a text, separated by blanks."""
    return frozenset(names.split())


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as float64 (or complex128) on the CPU: every type compares and prints in the same way there."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().resolve_conj().resolve_neg().cpu().to(wide)


def argument_name(evidence: Evidence, name: str, call: Call | None = None) -> str:
    """Return `self[2]` for the member of a list argument that belongs to the blamed output, else the name itself."""
    listed = isinstance((call or evidence.call).arguments.get(name), list | tuple)
    return f"{name}[{evidence.output}]" if listed else name


def operand(evidence: Evidence, name: str, call: Call | None = None) -> torch.Tensor | None:
    """Return an operand at the blamed elements as plain numbers.

    Args:
        evidence: The culprit.
        name: Schema name; for the argument lists of `_foreach_` ops the member of the blamed output is taken.
        call: The call to look at; the blamed call when not given.

    Returns:
        1-D float64 or complex128, aligned with the blamed elements where the operand broadcasts to them; None when the
        argument is absent or no number.
    """
    call = call or evidence.call
    argument = call.arguments.get(name)
    if isinstance(argument, list | tuple):
        if evidence.output >= len(argument):
            return None
        call = replace(call, arguments={name: argument[evidence.output]})
    found = evidence.operand(name, call)
    return None if found is None else numbers(found)


def aligned(evidence: Evidence, name: str, call: Call | None = None) -> torch.Tensor | None:
    """Like `operand`, but None for an operand that has no one value for each blamed element."""
    value = (call or evidence.call).arguments.get(name)
    if isinstance(value, list | tuple):
        value = value[evidence.output] if evidence.output < len(value) else None
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return operand(evidence, name, call) if _broadcasts(shape, evidence.mask.shape) else None


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(mine in (1, theirs) for mine, theirs in pairs)


def result(evidence: Evidence) -> torch.Tensor:
    """Return the blamed elements' values as plain numbers, 1-D."""
    return numbers(evidence.result)


def enough(condition: torch.Tensor | None) -> bool:
    """Whether a condition holds for a share of the blamed elements that makes it the cause."""
    return condition is not None and condition.numel() > 0 and condition.double().mean().item() >= ENOUGH


def literals(evidence: Evidence) -> list[tuple[str, float]]:
    """Return the Python numbers among the arguments of the call that are not finite, each with the argument's name."""
    found = []
    for name, value in evidence.call.arguments.items():
        members = value if isinstance(value, list | tuple) else [value]
        found += [(name, member) for member in members if isinstance(member, float) and not math.isfinite(member)]
    return found


def base_op(call: Call) -> str:
    """Return the op's name without the `_foreach_` of its list form."""
    return call.op.removeprefix("_foreach_")


def quotient(evidence: Evidence, call: Call | None = None) -> Quotient | None:
    """Return numerator and denominator when the call divides element by element, else None."""
    call = call or evidence.call
    above, below = _DIVISOR.get(base_op(call), ("", ""))
    for divisor in (below, "scalar", "scalars") if below else ():
        denominator = aligned(evidence, divisor, call)
        if denominator is not None:
            break
    else:
        return None
    numerator = aligned(evidence, above, call) if above else torch.ones_like(denominator)
    if numerator is None:
        return None
    return Quotient(numerator, _as_computed(evidence, denominator), argument_name(evidence, divisor, call))


def _as_computed(evidence: Evidence, denominator: torch.Tensor) -> torch.Tensor:
    """Round a divisor to the type of the computation: a Python number of 1e-50 is 0 for a float32 tensor."""
    dtype = evidence.result.dtype
    if denominator.is_complex() or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return denominator
    exact = base_op(evidence.call) in ("fmod", "remainder")  # a quotient is computed in float32 for narrower types
    return denominator.to(dtype if exact else torch.float32).double()


def under_root(evidence: Evidence, call: Call | None = None) -> torch.Tensor | None:
    """Return the number under a real square root, or None when the call takes no root."""
    call = call or evidence.call
    found = aligned(evidence, "self", call) if base_op(call) in ("sqrt", "rsqrt") else None
    return None if found is None or found.is_complex() else found


def under_log(evidence: Evidence, call: Call | None = None) -> torch.Tensor | None:
    """Return the number whose logarithm the call takes, or None when it takes none."""
    call = call or evidence.call
    op = base_op(call)
    if op in ("log", "log2", "log10", "special_entr"):
        return aligned(evidence, "self", call)
    if op == "log1p":
        return _plus_one(aligned(evidence, "self", call))
    if op in ("xlogy", "special_xlogy"):
        return aligned(evidence, "other", call)
    if op == "special_xlog1py":
        return _plus_one(aligned(evidence, "other", call))
    if op == "logit":
        found, eps = aligned(evidence, "self", call), call.arguments.get("eps")
        found = found if found is None or eps is None or eps < 0 else found.clamp(eps, 1 - eps)
        return None if found is None else torch.minimum(found, 1 - found)
    return _determinant(evidence, call)


def _plus_one(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values + 1


def _determinant(evidence: Evidence, call: Call) -> torch.Tensor | None:
    """The sign of a determinant whose logarithm is taken: `logdet` selects a literal NaN with `where` when it is negative."""
    if call.op == "_linalg_slogdet" and evidence.output == 1 and call.outputs[0] is not None:
        return numbers(call.outputs[0][evidence.mask])
    if refused_determinant(evidence, call):
        return torch.full((result(evidence).numel(),), -1.0, dtype=torch.float64)
    return None


def refused_determinant(evidence: Evidence, call: Call | None = None) -> bool:
    """Whether a call is a part of `torch.logdet`: the NaN that it keeps at hand, or the choice of it, for a negative determinant."""
    op = (call or evidence.call).op
    condition = evidence.ancestors("condition") if op == "where" else ()
    return "_linalg_slogdet" in (evidence.selected_by() if op == "scalar_tensor" else condition)


def finite_inputs(evidence: Evidence) -> bool:
    """Whether everything that the blamed elements are computed from is finite, as far as it can be lined up."""
    for name, tensor in evidence.call.tensors().items():
        if not finite.has([tensor], finite.NonFinite.ANY):
            continue
        values = aligned(evidence, name.split("[")[0])
        if values is None or not enough(torch.isfinite(values)):
            return False
    return True


def written_by(evidence: Evidence) -> tuple[str, ...]:
    """Return a note on who wrote the intended infinities among the inputs, if there are any."""
    if not evidence.intended or not evidence.inputs_kinds() & finite.NonFinite.INF:
        return ()
    lines = [f"`{line.text}` at {line}" if line.text else str(line) for line in dict.fromkeys(evidence.intended)]
    return (f"the infinities among the inputs were written by {' and '.join(lines[:3])} and are intended",)


def where(evidence: Evidence, condition: torch.Tensor | None = None, name: str = "") -> str:
    """Return ` at 3 of 50 elements, first at [1, 0]`, or "" for a single number.

    Args:
        evidence: The culprit.
        condition: Bool over the blamed elements; all of them when not given.
        name: The operand that the sentence speaks of (see `argument_name`): its own elements are counted, each once, where it is
            smaller than the result; those of the result when not given.
    """
    argument = evidence.call.tensors().get(name)
    shape = evidence.mask.shape if argument is None else argument.shape
    if shape.numel() == 1 if argument is not None else not shape:
        return ""
    if shape == evidence.mask.shape or not _broadcasts(shape, evidence.mask.shape):
        hits = int(evidence.mask.sum() if condition is None else condition.sum())
        return f" at {hits} of {evidence.mask.numel()} elements, first at {first_index(evidence, condition)}"
    met = evidence.mask.clone()
    if condition is not None:
        met[evidence.mask] = condition.flatten().to(met.device)
    own = met.double().sum_to_size(shape) > 0
    return f" at {int(own.sum())} of {own.numel()} elements, first at {own.nonzero()[0].tolist()}"


def first_index(evidence: Evidence, condition: torch.Tensor | None = None) -> list[int]:
    """Return the index of the first blamed element (for which the condition holds, where it is aligned with them)."""
    places = evidence.mask.nonzero().cpu()
    if condition is not None and condition.numel() == len(places) and condition.any():
        places = places[condition.flatten()]
    return [int(i) for i in places[0]] if len(places) else []


def show(value: torch.Tensor | complex) -> str:
    """Return a number in five digits."""
    number = value.item() if isinstance(value, torch.Tensor) else value
    return f"{number:.5g}"


def first(values: torch.Tensor, condition: torch.Tensor) -> str:
    """Return the first value for which a condition holds, in five digits."""
    return show(values[condition][0])
