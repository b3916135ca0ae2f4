"""The states of Python's and NumPy's global random generators, without reading one again that has not moved.

Both turn 624 words into Python objects, which takes 10 and 40 microseconds; the memory that holds the words is compared in one.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

_LATEST: dict[str, tuple[Any, Any]] = {}
"""Per library: the memory of its generator when the state was read the last time, and that state."""


def python_state() -> Any:
    """Return `random.getstate()`."""
    generator = getattr(random.getstate, "__self__", None)
    readable = generator.__class__ is random.Random and python_memory_is_known()
    return _state("python", _python_memory(generator) if readable else None, random.getstate)


def numpy_state() -> Any:
    """Return `numpy.random.get_state(legacy=False)`, or None where NumPy has not been imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator, bits = getattr(numpy.random.get_state, "__self__", None), numpy.random.get_bit_generator()
    readable = generator.__class__ is numpy.random.RandomState and type(bits) is numpy.random.MT19937
    memory = _numpy_memory(generator, bits) if readable and numpy_memory_is_known() else None
    return _state("numpy", memory, functools.partial(numpy.random.get_state, legacy=False))


def _state(library: str, memory: Any, read: Callable[[], Any]) -> Any:
    """Return a generator's state; `memory` holds all of it, or is None where that is not known."""
    if memory is None:
        return read()
    known, state = _LATEST.get(library, (None, None))
    if known != memory:
        state = read()
        _LATEST[library] = memory, state
    return state


def _python_memory(generator: Any) -> Any:
    """Return what holds the state of a `random.Random`, or None while it has a normal number in store."""
    return _own_memory(generator, random.Random.__base__) if generator.gauss_next is None else None


def _numpy_memory(generator: Any, bits: Any) -> Any:
    """Return what holds the state of a `RandomState`: its words, and its own fields, where a normal number in store is."""
    return ctypes.string_at(bits.ctypes.state_address, 2500), _own_memory(generator, type(generator))


def _own_memory(item: Any, kind: Any) -> bytes:
    """Return the fields that a type written in C adds to an object; `id` is its address in CPython."""
    head = object.__basicsize__
    return ctypes.string_at(id(item) + head, kind.__basicsize__ - head)


@functools.cache
def python_memory_is_known() -> bool:
    """Whether the fields of a `random.Random` are 624 words and before them the number of the next one (CPython 3.11 to 3.14)."""
    generator = random.Random(1)  # noqa: S311
    generator.random()
    *words, place = generator.getstate()[1]
    memory: bytes = _python_memory(generator)
    return memory[:2500] == struct.pack("i624I", place, *words)


@functools.cache
def numpy_memory_is_known() -> bool:
    """Whether the memory of a `RandomState` is 624 words and the number of the next one, and its fields show a normal number in store.

    That is so in NumPy 1.24 to 2.4.
    """
    numpy: Any = sys.modules["numpy"]
    bits = numpy.random.MT19937(1)
    generator = numpy.random.RandomState(bits)
    generator.standard_normal()
    name, words, place, *_ = generator.get_state()
    stored = _numpy_memory(generator, bits)
    generator.set_state((name, words, place, 0, 0.0))
    memory, fields = _numpy_memory(generator, bits)
    return bool(memory == struct.pack("624Ii", *words, place) and stored[1] != fields)
