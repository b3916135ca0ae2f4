"""Why a step raised: many faults are first met by a check of the script's, of a library's or of torch's, and never reach a loss.

`torch.distributions` refuses NaN among its parameters, `multinomial` among its probabilities, an assertion compares boxes, a solver in
NumPy gets a matrix. The tensor that was looked at last is what such a step is judged by.
"""

from __future__ import annotations

import itertools
import math
import re
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only  # torch 2.6 to 2.13

from bisect_nan import finite
from bisect_nan.errors import BisectNanError
from bisect_nan.finding import SourceLine
from bisect_nan.finite import NonFinite
from bisect_nan.recording.calls import Call
from bisect_nan.recording.lines import Lines
from bisect_nan.recording.memory import extent, view
from bisect_nan.recording.program import NO_STORAGE, Ref, tensors
from bisect_nan.recording.recorder import Recorder
from bisect_nan.recording.traits import READS

_LATEST, _LAST = 64, 8
"""How many calls before the exception are searched for numbers that Python read, and for results that it can have used otherwise."""

_MOST = 256
"""How many values are followed back from one number at most."""

_REFUSED = NonFinite.NAN | NonFinite.POS_INF
"""What torch's own calls refuse; a mask of negative infinities is nothing that one of another kind would be about."""

_ABOUT = re.compile(r"\b(nans?|infs?|infinit\w*|(non-?|in)?finite)\b", re.IGNORECASE)
"""Words of messages about numbers that are not finite."""

Looked = tuple[str, torch.Tensor]
"""A non-finite tensor, and what a report calls it: `behind the ValueError at model.py:12`."""


def reason(recorder: Recorder, error: BaseException) -> Looked | None:
    """Return the non-finite tensor that explains an exception of the step.

    Where a call of torch raised, that is one of its arguments; else what the latest number was computed from that Python read, or a NaN in
    the last results. Its memory must be there still, which it is as a rule while the exception holds the frames that it came through.

    Args:
        recorder: What the step ran under; not active any more.
        error: What it raised.

    Returns:
        The tensor with its name, or None where the exception has nothing to do with NaN or infinity, as far as can be seen.
    """
    if isinstance(error, BisectNanError | MemoryError | torch.OutOfMemoryError):
        return None
    refused = _refused(recorder, error)
    looked = itertools.chain(_read(recorder), _left(recorder, tells=_tells(error)))
    found = next(looked if refused is None else refused, None)
    return None if found is None else (_behind(error, found[0]), found[1])


def read(recorder: Recorder, call: Call) -> Looked | None:
    """Return the non-finite tensor that a number comes from which Python reads; None where there is none.

    Args:
        recorder: What records.
        call: The call that reads, just written down.
    """
    found = _nonfinite(recorder, [ref.value for ref in _refs(call.args)], NonFinite.ANY)
    return None if found is None else (f"read{_at(call.source)}", found)


def suspicion(error: BaseException) -> Looked | None:
    """Return what may be behind the exception of a step that nobody has recorded, and so is worth another run; None for nothing.

    That is a non-finite tensor in a variable of a function that the exception went through, the innermost first. An assertion, and a
    message about numbers that are not finite, are enough as well: then the tensor is a single NaN.
    """
    if isinstance(error, BisectNanError | MemoryError | torch.OutOfMemoryError):
        return None
    name = _behind(error, Lines().raised(error))
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for item in list(frame.f_locals.values()):
            parts = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else [item]
            for part in parts:
                if isinstance(part, torch.Tensor) and finite.probe([part]):
                    return name, part.detach()
    return (name, torch.tensor(math.nan)) if _tells(error) else None


def _tells(error: BaseException) -> bool:
    """Whether an exception is about numbers, as far as its kind and its message tell."""
    return isinstance(error, AssertionError | ArithmeticError) or _ABOUT.search(str(error)) is not None


def _refused(recorder: Recorder, error: BaseException) -> Iterator[tuple[SourceLine | None, torch.Tensor]] | None:
    """Yield what a call of torch was given that raised, if that is why it did; None where no call raised."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [known for known in frames if known.get("self") is recorder and "node_args" in known]  # not written down
    if not calls:
        return None
    arguments = [*calls[-1]["node_args"], *calls[-1].get("node_kwargs", {}).values()]
    found = _nonfinite(recorder, [ref.value for ref in _refs(arguments)], _REFUSED)
    is_reason = found is not None and _takes_others(calls[-1]["func"], calls[-1]["args"], calls[-1]["kwargs"])
    return iter([(Lines().raised(error), found)] if found is not None and is_reason else [])


def _takes_others(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a call that raised would have run with one half in the place of all that is not finite."""

    def healthy(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        return copy.nan_to_num_(0.5, 0.5, 0.5) if tensor.is_floating_point() and finite.probe([tensor]) else copy

    given = [tensor for tensor in tensors([*args, *kwargs.values()]) if tensor is not None]
    if not finite.probe(given):
        return True  # what it was given was computed from that
    try:
        func(*tree_map_only(torch.Tensor, healthy, args), **tree_map_only(torch.Tensor, healthy, kwargs))
    except Exception:  # noqa: BLE001  (whatever it is, NaN is not the reason)
        return False
    return True


def _read(recorder: Recorder) -> Iterator[tuple[SourceLine | None, torch.Tensor]]:
    """Yield what numbers come from that Python has read, the latest first."""
    for call in reversed(recorder.calls[-_LATEST:]):
        if call.target in READS and (found := read(recorder, call)) is not None:
            yield call.source, found[1]


def _left(recorder: Recorder, *, tells: bool) -> Iterator[tuple[SourceLine | None, torch.Tensor]]:
    """Yield the last results that hold a NaN, since what leaves torch is looked at by others; if nothing tells, those without a graph."""
    for call in reversed(recorder.calls[-_LAST:]):
        if call.grad and not tells:
            continue
        if (found := _nonfinite(recorder, [v for v in call.outputs if v is not None], NonFinite.NAN)) is not None:
            yield call.source, found


def _nonfinite(recorder: Recorder, numbers: list[int], which: NonFinite) -> torch.Tensor | None:
    """Return the first made of the non-finite tensors that some values are, or were computed from.

    Booleans and integers are followed back to what was compared or rounded, and so are tensors whose memory is gone.
    """
    values, bad = recorder.values, dict[int, torch.Tensor]()
    waiting, met = [(number, which) for number in numbers], set(numbers)
    while waiting and len(met) < _MOST:
        number, kinds = waiting.pop(0)
        dtype, tensor = values.value(number).dtype, _alive(recorder, number)
        floats = dtype.is_floating_point or dtype.is_complex
        if floats and tensor is not None:
            # What is meant is a longer question, and nearly all that a script looks at is finite.
            if finite.has([tensor], kinds) and finite.has([tensor], kinds & _unmeant(recorder, number)):
                bad[number] = tensor
            continue
        for ref in _refs(_given(recorder, number)):
            if ref.value not in met:
                met.add(ref.value)
                waiting.append((ref.value, kinds & _REFUSED if floats else kinds))
    return bad[min(bad)] if bad else None


def _unmeant(recorder: Recorder, number: int) -> NonFinite:
    """Return what is no intention in a value: a NaN, and an infinity unless one was written on the way (`masked_fill`, a limit)."""
    literals = [place.value for place in recorder.values.placeholders if place.constant]
    limits = {number for number in literals if finite.has([recorder.values.tensors[number]], NonFinite.INF)}
    waiting, met = [number], {number}
    while waiting and len(met) < _MOST:
        value = waiting.pop()
        given = _given(recorder, value)
        if value in limits or any(isinstance(item, float) and math.isinf(item) for item in given):
            return NonFinite.NAN
        further = {ref.value for ref in _refs(given)} - met
        met |= further
        waiting += further
    return NonFinite.ANY


def _given(recorder: Recorder, number: int) -> list[Any]:
    """Return the arguments of the call that made a value; none for what came from outside."""
    maker = recorder.values.makers[number]
    call = recorder.calls[maker] if 0 <= maker < len(recorder.calls) else None
    return [] if call is None else [*call.args, *call.kwargs.values()]


def _refs(item: object) -> Iterator[Ref]:
    if isinstance(item, Ref):
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _refs(part)


def _alive(recorder: Recorder, number: int) -> torch.Tensor | None:
    """Return a value as it is now; None when its memory is gone."""
    values = recorder.values
    if values.storages[number] == NO_STORAGE:
        return None
    storage, value = values.memories[values.storages[number]].reference(), values.value(number)
    return None if storage is None or storage.nbytes() < extent(value) else view(storage, value)


def _behind(error: BaseException, source: SourceLine | None) -> str:
    return f"behind the {type(error).__name__.strip('_')}{_at(source)}"


def _at(source: SourceLine | None) -> str:
    return "" if source is None else f" at {source}"
