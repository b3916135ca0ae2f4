"""How large parameters and state can be after an update of one of torch's own optimizers, given how large they are before it.

Interval arithmetic on largest absolute values: every function here follows one optimizer's code in torch/optim, its loop over
tensors, its foreach and its fused implementation at once, and bounds each number on the way. What cannot be bounded becomes
NaN, which is below no limit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

PARAMETER = "parameter"
"""The key of the parameters among the bounds; the others are the names of the optimizer's state."""

SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta"})
"""State of which roots are taken, or that divides; no update makes it negative."""

SIGNED = frozenset({"exp_avg", "momentum_buffer", "ax", "eta"})
"""State of either sign."""

SCALARS: Mapping[str, float] = {"step": math.inf, "mu": 1.0, "mu_product": 1.0}
"""Single numbers in float32 or float64 that every update leaves finite and between 0 and these, so they need no bound."""

RATIO, REST = "ratio", "rest"
"""Of optimizers with two moments: the first is at most this ratio times the root of the second, plus this rest."""

_CLOSEST = 1e-6
"""How close to 1 a decay rate may be: torch computes what is left, 1 - beta**step, in float32 at worst, rounded by 6e-8."""

_SLACK = 1.1
"""For roundings within a quotient; in bfloat16 five of them are 2 %."""

Bounds = Mapping[str, float]
"""The largest absolute value of the parameters and of each kind of state. State that does not exist yet has none."""


@dataclass(frozen=True, slots=True)
class Range:
    """What several floating-point types hold, all of them together.

    Attributes:
        limit: An eighth of the largest number of the smallest type. The rest is for roundings between two bounds.
        smallest: The smallest number that none of them rounds to 0, also where subnormal numbers are flushed.
        growth: By what factor the roundings of one update, at most eight, can enlarge a number.
    """

    limit: float
    smallest: float
    growth: float

    @classmethod
    @functools.cache
    def of(cls, dtypes: frozenset[torch.dtype]) -> Range:
        """Return the range of some types, and of float32, in which steps, rates and intermediate results are kept."""
        infos = [torch.finfo(dtype) for dtype in {torch.float32, *dtypes}]
        return cls(
            limit=min(info.max for info in infos) / 8,
            smallest=max(info.tiny for info in infos),
            growth=1 + 4 * max(info.eps for info in infos),
        )

    def divisor(self, eps: float) -> float:
        """Return what is added to a divisor if it keeps it from being 0, else NaN."""
        return eps if eps >= self.smallest else math.nan

    def rounded(self, bound: float) -> float:
        """Return a bound of what a number may be after roundings; those next to 0 are no share of it."""
        return bound * self.growth + self.smallest

    def holds(self, numbers: Iterable[float]) -> bool:
        """Whether all of some numbers are below the limit; NaN is not."""
        return all(abs(number) < self.limit for number in numbers)


@dataclass(frozen=True, slots=True)
class Group:
    """The settings of a parameter group as plain numbers; what is none, or would have to be fetched, is NaN.

    Attributes:
        settings: The group itself.
        defaults: The optimizer's settings, of which new state is made.
    """

    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __getitem__(self, name: str) -> float:
        return _number(self.settings.get(name))

    def size(self, name: str) -> float:
        """Return the absolute value of a setting."""
        return abs(self[name])

    def left(self, place: int) -> float:
        """Return the least that `1 - beta**step` can be for one of the `betas` and any step from 1 on; NaN if that may be 0."""
        beta = _number(self.settings["betas"][place])
        return (1 - beta) / 2 if 0 <= beta <= 1 - _CLOSEST else math.nan

    def within(self, name: str, low: float, high: float = math.inf) -> float:
        """Return a setting that must be in a range, else NaN."""
        value = self[name]
        return value if low <= value <= high else math.nan


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor):
        fetched = value.device.type != "cpu" or value.requires_grad or value.numel() != 1
        return math.nan if fetched or value.dtype not in (torch.float32, torch.float64) else float(value)
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer beyond float64
        return math.inf


Result = tuple[dict[str, float], tuple[float, ...]]
"""The bounds after the update, yet without roundings, and all intermediate results that are not among them."""

Growth = Callable[[Group, Bounds, float, Range], Result]
"""Bounds an update: its group, the bounds before, the largest gradient, and the types."""


def after(group: Group, before: Bounds, gradient: float, numbers: Range, growth: Growth) -> Bounds | None:
    """Return bounds after an update of one group, or None when some number on the way may be non-finite.

    Args:
        group: The group's settings.
        before: Bounds before the update.
        gradient: Bound of the gradients' elements.
        numbers: What the types of parameters and state hold.
        growth: What is known about the optimizer.
    """
    # These variants compute in other orders: `centered` takes the root of a difference that may be negative.
    if any(group.settings.get(variant) for variant in ("capturable", "differentiable", "centered")):
        return None
    bounds, others = growth(group, before, gradient, numbers)
    rate, decay = group.size("lr"), group.size("weight_decay")
    bounds = {name: numbers.rounded(bound) for name, bound in bounds.items()}
    if not numbers.holds((*bounds.values(), *others, gradient, rate, decay, rate * decay)):
        return None
    # Parameters without a gradient stay as they are.
    return {**before, **{name: max(before.get(name, 0.0), bound) for name, bound in bounds.items()}}


def _decayed(group: Group, before: Bounds, gradient: float, numbers: Range) -> tuple[float, float]:
    """Return bounds of the gradients with the weight decay added, and of the parameters where it is taken from them instead."""
    decay, parameter = group.size("weight_decay"), before[PARAMETER]
    if group.settings.get("decoupled_weight_decay"):
        return gradient, numbers.rounded(parameter * (1 + group.size("lr") * decay))
    return numbers.rounded(gradient + decay * parameter) if decay else gradient, parameter


def _over_root(gradient: float, share: float, eps: float, numbers: Range) -> float:
    """Bound `gradient / (root of second moment + eps)` where the moment already contains a share of this gradient's square.

    That is at most 1 / root of the share, unless the square is so small that the moment lost it.
    """
    if share <= 0:
        return gradient / eps
    lost = math.sqrt(numbers.smallest / share)
    return min(gradient / eps, _SLACK / math.sqrt(share) + lost / eps)


def _sgd(group: Group, before: Bounds, gradient: float, numbers: Range) -> Result:
    gradient, parameter = _decayed(group, before, gradient, numbers)
    momentum, kept = group.size("momentum"), abs(1 - group["dampening"])
    # The first update makes the buffer of the gradient as it is, not dampened.
    buffer = max(gradient, momentum * before.get("momentum_buffer", 0.0) + kept * gradient)
    if group["momentum"] == 0:
        update, state = gradient, {}
    else:
        update = gradient + momentum * buffer if group.settings["nesterov"] else buffer
        state = {"momentum_buffer": buffer}
    return {PARAMETER: parameter + group.size("lr") * update, **state}, (momentum, kept, update)


def _moments(group: Group, before: Bounds, gradient: float, numbers: Range) -> dict[str, float]:
    """Bound the moving averages of a gradient and of its square: they stay between the old value and the new one."""
    first, second = max(before.get("exp_avg", 0.0), gradient), max(before.get("exp_avg_sq", 0.0), gradient * gradient)
    state = {"exp_avg": first, "exp_avg_sq": second, **_related(group, before, first, numbers)}
    if group.settings.get("amsgrad"):
        state["max_exp_avg_sq"] = max(before.get("max_exp_avg_sq", 0.0), second)
    return state


def _related(group: Group, before: Bounds, first: float, numbers: Range) -> dict[str, float]:
    """Bound the first moment by the second.

    With m' and v' before the update, m = beta1 m' + (1 - beta1) g. As v is no less than beta2 v' and than (1 - beta2) g^2, the
    roots of v' and of g^2 are at most root(v / beta2) and root(v / (1 - beta2)), so from |m'| <= ratio root(v') + rest follows a
    bound of |m| of the same form. Without it, weight decay would drive the bound of the parameters up exponentially.
    """
    beta1, beta2, growth = 1 - 2 * group.left(0), 1 - 2 * group.left(1), numbers.growth
    remains = growth * (beta1 + growth - 1)  # 1 - beta1 is rounded by a share of 1, not of beta1
    kept = remains * math.sqrt(growth / beta2) if beta2 > 0 else math.inf
    if not kept < 1:
        return {RATIO: 0.0, REST: first}
    ratio = kept * before.get(RATIO, 0.0) + growth * 2 * group.left(0) * math.sqrt(growth / (2 * group.left(1)))
    lost = ratio * math.sqrt(numbers.smallest) + numbers.smallest  # what the second moment loses where it is next to 0
    return {RATIO: ratio, REST: remains * before.get(REST, before.get("exp_avg", 0.0)) + lost}


def _normalised(state: Mapping[str, float], eps: float) -> float:
    """Bound `first moment / (root of second moment + eps)`."""
    return min(state["exp_avg"] / eps, _SLACK * state[RATIO] + state[REST] / eps)


def _adam(group: Group, before: Bounds, gradient: float, numbers: Range) -> Result:
    gradient, parameter = _decayed(group, before, gradient, numbers)
    state, eps = _moments(group, before, gradient, numbers), numbers.divisor(group["eps"])
    rate, root = group.size("lr") / group.left(0), numbers.divisor(math.sqrt(group.left(1)))
    first, second = state["exp_avg"], max(state["exp_avg_sq"], state.get("max_exp_avg_sq", 0.0))
    others = gradient, 2 * first, rate, rate * first, first / eps, 1 / root, math.sqrt(second) / root + eps
    return {PARAMETER: parameter + rate * _normalised(state, eps), **state}, others


def _nadam(group: Group, before: Bounds, gradient: float, numbers: Range) -> Result:
    gradient, parameter = _decayed(group, before, gradient, numbers)
    state, eps = _moments(group, before, gradient, numbers), numbers.divisor(group["eps"])
    rate, left = group.size("lr") / group.left(0), numbers.divisor(group.left(1))
    first, second = state["exp_avg"], state["exp_avg_sq"]
    others = (
        gradient,
        2 * first,
        rate,
        rate * first,
        first / eps,
        1 / left,
        second / left,
        math.sqrt(second / left) + eps,
    )
    moved = rate * (_over_root(gradient, 2 * group.left(1), eps, numbers) + _normalised(state, eps))
    return {PARAMETER: parameter + moved, **state}, (*others, group.within("momentum_decay", 0))


def _radam(group: Group, before: Bounds, gradient: float, numbers: Range) -> Result:
    gradient, parameter = _decayed(group, before, gradient, numbers)
    state, eps = _moments(group, before, gradient, numbers), numbers.divisor(group["eps"])
    corrected = state["exp_avg"] / group.left(0)
    rate = 2 * group.size("lr") / group.left(0)  # the rectification is at most 1
    # foreach computes 1 / ((root + eps) / rate); where the rate is 0, as in the first steps, that is 1 / inf = 0.
    factor = rate / eps + rate
    others = gradient, 2 * corrected, corrected * rate, rate, 1 / eps, corrected / eps, factor, group.left(1)
    moved = rate * (_normalised(state, eps) + state["exp_avg"])
    return {PARAMETER: parameter + moved, **state}, others


def _adamax(group: Group, before: Bounds, gradient: float, numbers: Range) -> Result:
    gradient, parameter = _decayed(group, before, gradient, numbers)
    eps, rate = numbers.divisor(group["eps"]), group.size("lr") / group.left(0)
    first = max(before.get("exp_avg", 0.0), gradient)
    largest = max(before.get("exp_inf", 0.0), gradient + eps)
    others = gradient, 2 * first, rate, rate * first, first / eps, group.left(1)
    return {PARAMETER: parameter + rate * (first / eps), "exp_avg": first, "exp_inf": largest}, others


def _adagrad(group: Group, before: Bounds, gradient: float, numbers: Range) -> Result:
    gradient, parameter = _decayed(group, before, gradient, numbers)
    eps, rate = numbers.divisor(group["eps"]), group.size("lr")
    start = Group(group.defaults, {}).within("initial_accumulator_value", 0)
    total = max(before.get("sum", 0.0), start) + gradient * gradient
    quotient = _over_root(gradient, 1.0, eps, numbers)
    others = gradient, start, rate * gradient, quotient, math.sqrt(total) + eps, group.within("lr_decay", 0)
    return {PARAMETER: parameter + rate * quotient, "sum": total}, others


def _asgd(group: Group, before: Bounds, gradient: float, numbers: Range) -> Result:
    gradient, parameter = _decayed(group, before, gradient, numbers)
    lambd, rate = group["lambd"], max(before.get("eta", 0.0), group.size("lr"))
    shrinks = lambd * group["lr"] if lambd * group["lr"] >= 0 else math.nan  # else the next rate may be beyond this one
    pulled = gradient + abs(lambd) * parameter
    moved = parameter * (1 + abs(lambd) * rate) + rate * pulled
    average = max(before.get("ax", 0.0), moved)
    others = gradient, lambd, lambd * rate, pulled, shrinks, 2 * average, group.within("alpha", 0), group["t0"]
    return {PARAMETER: moved, "ax": average, "eta": rate}, others


def _adadelta(group: Group, before: Bounds, gradient: float, numbers: Range) -> Result:
    gradient, parameter = _decayed(group, before, gradient, numbers)
    rho, eps = group.within("rho", 0, 1), numbers.divisor(group["eps"])
    square = max(before.get("square_avg", 0.0), gradient * gradient)
    root = math.sqrt(before.get("acc_delta", 0.0) + eps)
    delta = root * _over_root(gradient, 1 - rho, math.sqrt(eps), numbers)
    others = gradient, square + eps, root / math.sqrt(eps), delta, delta * delta
    # Not the larger of the two: delta's square may be 1 / (1 - rho) times as large as the average, which its share takes back.
    sums = rho * before.get("acc_delta", 0.0) + (1 - rho) * delta * delta
    return {PARAMETER: parameter + group.size("lr") * delta, "square_avg": square, "acc_delta": sums}, others


def _rmsprop(group: Group, before: Bounds, gradient: float, numbers: Range) -> Result:
    gradient, parameter = _decayed(group, before, gradient, numbers)
    alpha, eps = group.within("alpha", 0, 1), numbers.divisor(group["eps"])
    square = max(before.get("square_avg", 0.0), gradient * gradient)
    update, state = _over_root(gradient, 1 - alpha, eps, numbers), {"square_avg": square}
    others = gradient, alpha, update, math.sqrt(square) + eps, group.size("lr") * gradient, group.size("momentum")
    if group["momentum"] > 0:
        update += group["momentum"] * before.get("momentum_buffer", 0.0)
        state["momentum_buffer"] = update
    return {PARAMETER: parameter + group.size("lr") * update, **state}, others


GROWTHS: Mapping[type, Growth] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.Adamax: _adamax,
    torch.optim.Adagrad: _adagrad,
    torch.optim.ASGD: _asgd,
    torch.optim.Adadelta: _adadelta,
    torch.optim.RMSprop: _rmsprop,
}
"""The optimizers, by their exact class. No subclass is known, and the rest of torch's have no bound worth having."""
