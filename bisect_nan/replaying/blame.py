"""Asks one call: which of your bad output elements are your own, and which input elements made the others bad?

Elementwise calls are answered by position. Any other call is asked by experiment: run it again with bad inputs neutralised (what
stays bad is its own), and follow its derivative from the bad outputs to the inputs that they depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bisect_nan import finite
from bisect_nan.finite import NonFinite
from bisect_nan.replaying.contraction import some
from bisect_nan.replaying.influence import aligned, gathered, influences, is_number, union
from bisect_nan.replaying.neutral import SMALL, distinct, neutralised, tamed
from bisect_nan.replaying.replay import Executed
from bisect_nan.replaying.stretch import Env

_TRIALS = 64
"""Runs of one call at most to tell which of its bad inputs matter."""


@dataclass(frozen=True, slots=True)
class Split:
    """Bad elements of one value, sorted by where they come from; three bool masks of its shape.

    Attributes:
        born: No bad input explains them.
        inherited: Bad inputs explain them.
        converted: The part of `inherited` that is NaN though the inputs that explain it are infinite, not NaN.
    """

    born: torch.Tensor
    inherited: torch.Tensor
    converted: torch.Tensor


def split(executed: Executed, number: int, mask: torch.Tensor) -> Split:
    """Sort the bad elements `mask` of the value `number` that a call made."""
    made, bad = executed.content[number], _bad_inputs(executed)
    none = torch.zeros_like(mask)
    if not bad:
        return Split(mask, none, none)
    nans = {n: finite.mask(executed.inputs[n], NonFinite.NAN) for n in bad}
    is_nan = finite.mask(made, NonFinite.NAN)
    seen = aligned(executed, number, bad)
    if seen is not None:
        inherited = mask & union(seen.values(), mask)
        from_nan = union([m & nans[n].expand(mask.shape) for n, m in seen.items()], mask)
        return Split(mask & ~inherited, inherited, inherited & is_nan & ~from_nan)
    born = _own(executed, number, mask, bad)
    inherited, still_nan = mask & ~born, is_nan
    if any(some(m) for m in nans.values()):
        healthy = {n: neutralised(t, nans[n]) if n in bad else t for n, t in executed.inputs.items()}
        still_nan = finite.mask(executed.again(healthy)[number], NonFinite.NAN)
    return Split(born, inherited, inherited & is_nan & still_nan)


def responsible(executed: Executed, number: int, mask: torch.Tensor) -> Env:
    """Return the bad input elements that made the elements `mask` of the value `number` bad, by value number."""
    bad = _bad_inputs(executed)
    seen = aligned(executed, number, bad)
    if seen is not None:
        return {n: gathered(mask & m, executed.inputs[n].shape) & bad[n] for n, m in seen.items()}
    found: Env = {}
    for influence in influences(executed, number, mask):
        found = {n: m & bad[n] for n, m in influence.items() if n in bad}
        if _any(found):
            return found
    if sum(m.numel() for m in bad.values()) <= SMALL:
        found = _by_halves(executed, number, mask, bad)
    return found if _any(found) else bad


def _bad_inputs(executed: Executed) -> Env:
    return {n: finite.mask(t) for n, t in executed.inputs.items() if is_number(t) and finite.probe([t])}


def _own(executed: Executed, number: int, mask: torch.Tensor, bad: Env) -> torch.Tensor:
    """Return those elements of `mask` that stay bad whatever stands in the place of the bad inputs."""

    def still(replacement: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        inputs = {n: replacement(t, bad[n]) if n in bad else t for n, t in executed.inputs.items()}
        return born & finite.mask(executed.again(inputs)[number])

    born = mask
    for stand_in in (neutralised, lambda t, m: neutralised(t, m, distinct(t)), lambda t, m: neutralised(t, m, 0.0)):
        born = still(stand_in)
        if not some(born):
            return born
    # The neighbours of an overflowed element are huge themselves; what fails on them alone is still the same fault, provided that
    # it depends on the bad element at all.
    tame = still(lambda t, m: tamed(neutralised(t, m)))
    if tame.equal(born):
        return born
    return tame | born & ~still(lambda t, m: neutralised(tamed(neutralised(t, m)), m, math.nan))


def _by_halves(executed: Executed, number: int, mask: torch.Tensor, bad: Env) -> Env:
    """Find bad inputs that matter by leaving only a part of them bad, and half of it while the result is bad."""
    found = {n: torch.zeros_like(m) for n, m in bad.items()}
    trials, queue = 0, [(n, m.flatten().nonzero().flatten()) for n, m in bad.items()]
    while queue:
        n, places = queue.pop(0)
        part = torch.zeros_like(found[n]).flatten().index_fill_(0, places, value=True).reshape(found[n].shape)
        if trials < _TRIALS:
            trials += 1
            others = {k: m & ~part if k == n else m for k, m in bad.items()}
            inputs = {k: neutralised(t, others[k], distinct(t)) if k in bad else t for k, t in executed.inputs.items()}
            if not some(mask & finite.mask(executed.again(inputs)[number])):
                continue
            if len(places) > 1:
                middle = len(places) // 2
                queue += [(n, places[:middle]), (n, places[middle:])]
                continue
        found[n] |= part
    return found


def _any(masks: Env) -> bool:
    return any(some(mask) for mask in masks.values())
