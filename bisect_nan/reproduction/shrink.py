"""Makes a draft smaller while it still shows the fault: fewer elements, fewer dimensions, rounder numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from bisect_nan import finite
from bisect_nan.reproduction.draft import Draft, Literal
from bisect_nan.reproduction.literals import LARGEST
from bisect_nan.reproduction.oracle import Oracle
from bisect_nan.reproduction.reduction import ddmin

_ONE_BY_ONE = 12
"""Elements of a tensor whose numbers are made rounder one by one."""

_ROUNDS = 2
"""Rounder numbers may let go of further elements, once."""


def shrink(draft: Draft, oracle: Oracle) -> Draft:
    """Return the smallest draft that was found in the oracle's budget.

    Args:
        draft: One that shows the fault.
        oracle: Tells whether another one does.
    """
    for _ in range(_ROUNDS):
        before = draft
        for change in (_gradients, _sizes, _dimensions, _numbers, _constants):
            draft = change(draft, oracle)
        if draft is before or oracle.spent:
            break
    return _recipes(draft, oracle)


def _gradients(draft: Draft, oracle: Oracle) -> Draft:
    """Ask for no more gradients than the fault needs."""
    for place, literal in enumerate(draft.literals):
        if literal.grad:
            draft = _first([_with(draft, place, replace(literal, grad=False))], oracle, draft)
    return draft


def _sizes(draft: Draft, oracle: Oracle) -> Draft:
    """Keep few indices of every dimension: first of all dimensions of one size together, then of each alone."""
    sizes = sorted({size for literal in draft.literals for size in literal.tensor.shape if size > 1}, reverse=True)
    for size in sizes:
        everywhere = [
            (place, dim)
            for place, literal in enumerate(draft.literals)
            for dim, own in enumerate(literal.tensor.shape)
            if own == size
        ]
        smaller = _cut(draft, everywhere, size, oracle)
        if smaller is draft and len(everywhere) > 1:
            for axis in everywhere:
                smaller = _cut(smaller, [axis], size, oracle)
        draft = smaller
    return draft


def _cut(draft: Draft, axes: Sequence[tuple[int, int]], size: int, oracle: Oracle) -> Draft:
    """Keep few of the indices of some dimensions, all of one size; the element that is blamed is tried first."""
    wanted = sorted({index for index in draft.element if index < size} | {0})
    named = any(_resized((step.args, step.kwargs), size, 0) != (step.args, step.kwargs) for step in draft.steps)
    for numbers in (True, False) if named else (False,):
        made = functools.partial(_selected, draft, axes, size, numbers=numbers)
        smaller = _first((made([index]) for index in wanted), oracle, draft)
        if smaller is not draft:
            return smaller
        kept = ddmin(range(size), functools.partial(_shown, made, oracle))
        if len(kept) < size:
            return made(kept)
    return draft


def _shown(made: Callable[[list[int]], Draft], oracle: Oracle, indices: list[int]) -> bool:
    return oracle.shows(made(indices))


def _selected(draft: Draft, axes: Sequence[tuple[int, int]], size: int, indices: list[int], *, numbers: bool) -> Draft:
    literals = list(draft.literals)
    for place, dim in axes:
        tensor = literals[place].tensor
        chosen = tensor.index_select(dim, torch.tensor(indices, device=tensor.device))
        literals[place] = replace(literals[place], tensor=chosen)
    steps = draft.steps
    if numbers:
        steps = tuple(
            replace(
                step, args=_resized(step.args, size, len(indices)), kwargs=_resized(step.kwargs, size, len(indices))
            )
            for step in steps
        )
    return replace(draft, literals=tuple(literals), steps=steps)


def _resized(item: Any, old: int, new: int) -> Any:
    """Replace a size wherever it stands in a list of whole numbers."""
    if isinstance(item, dict):
        return {key: _resized(part, old, new) for key, part in item.items()}
    if isinstance(item, list) or (isinstance(item, tuple) and item and all(type(part) is int for part in item)):
        return type(item)([new if type(part) is int and part == old else _resized(part, old, new) for part in item])
    return type(item)(_resized(part, old, new) for part in item) if isinstance(item, tuple) else item


def _dimensions(draft: Draft, oracle: Oracle) -> Draft:
    """Leave out dimensions of one element, in front and behind, of the tensors that have the most dimensions."""
    for dim in (0, -1):
        while any(literal.tensor.dim() > 1 and literal.tensor.shape[dim] == 1 for literal in draft.literals):
            most = max(literal.tensor.dim() for literal in draft.literals)
            together = tuple(
                replace(literal, tensor=literal.tensor.squeeze(dim)) if literal.tensor.dim() == most > 1 else literal
                for literal in draft.literals
            )
            smaller = _first([replace(draft, literals=together, element=())], oracle, draft)
            if smaller is draft or all(
                a.tensor.shape == b.tensor.shape for a, b in zip(draft.literals, together, strict=True)
            ):
                break
            draft = smaller
    return draft


def _numbers(draft: Draft, oracle: Oracle) -> Draft:
    """Write rounder numbers: of whole tensors, then of single elements of small ones."""
    for place in range(len(draft.literals)):
        literal = draft.literals[place]
        draft = _first(
            (_with(draft, place, replace(literal, tensor=t)) for t in _rounder(literal.tensor)), oracle, draft
        )
        literal = draft.literals[place]
        if 1 < literal.tensor.numel() <= _ONE_BY_ONE:
            for position in range(literal.tensor.numel()):
                draft = _first(_one_rounder(draft, place, position), oracle, draft)
    return draft


def _one_rounder(draft: Draft, place: int, position: int) -> Iterator[Draft]:
    literal = draft.literals[place]
    flat = literal.tensor.flatten()
    for number in _rounder(flat[position]):
        changed = flat.clone()
        changed[position] = number
        yield _with(draft, place, replace(literal, tensor=changed.reshape(literal.tensor.shape)))


def _rounder(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield rounder tensors than this one, the roundest first; nothing that it is already."""
    tried = [tensor]
    for other in _candidates(tensor):
        if finite.same(other, tensor):
            return
        if not any(finite.same(other, known) for known in tried):
            tried.append(other)
            yield other


def _candidates(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield torch.zeros_like(tensor)
    if tensor.dtype is torch.bool:
        yield torch.ones_like(tensor)
        return
    yield torch.ones_like(tensor)
    if tensor.is_floating_point():
        for digits in (1, 2, 3):
            yield torch.tensor(
                [float(f"{value:.{digits}g}") for value in tensor.flatten().tolist()],
                dtype=tensor.dtype,
                device=tensor.device,
            ).reshape(tensor.shape)


def _constants(draft: Draft, oracle: Oracle) -> Draft:
    """Write rounder numbers among the arguments of calls."""
    for digits in (3, 2, 1):
        steps = tuple(
            replace(step, args=_rounded(step.args, digits), kwargs=_rounded(step.kwargs, digits))
            for step in draft.steps
        )
        if steps != draft.steps:
            draft = _first([replace(draft, steps=steps)], oracle, draft)
    return draft


def _rounded(item: Any, digits: int) -> Any:
    if isinstance(item, dict):
        return {key: _rounded(part, digits) for key, part in item.items()}
    if isinstance(item, list | tuple):
        return type(item)([_rounded(part, digits) for part in item])
    return float(f"{item:.{digits}g}") if isinstance(item, float) else item


def _recipes(draft: Draft, oracle: Oracle) -> Draft:
    """Put random numbers of the same kind in the place of tensors that are too large to be written down."""
    for place, literal in enumerate(draft.literals):
        tensor = literal.tensor
        if tensor.numel() <= LARGEST or not tensor.is_floating_point():
            continue
        scale = float(f"{tensor[tensor.isfinite()].float().abs().mean().item():.1g}")
        generator = torch.Generator().manual_seed(0)
        drawn = (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype).to(tensor.device)
        recipe = f"torch.randn({tuple(tensor.shape)}, generator=torch.Generator().manual_seed(0)) * {scale!r}"
        draft = _first([_with(draft, place, replace(literal, tensor=drawn, recipe=recipe))], oracle, draft)
    return draft


def _with(draft: Draft, place: int, literal: Literal) -> Draft:
    return replace(draft, literals=(*draft.literals[:place], literal, *draft.literals[place + 1 :]))


def _first(candidates: Iterable[Draft], oracle: Oracle, otherwise: Draft) -> Draft:
    """Return the first draft that shows the fault."""
    return next((draft for draft in candidates if oracle.shows(draft)), otherwise)
