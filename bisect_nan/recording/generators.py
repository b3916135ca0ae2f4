"""Random generators of a step: which one a call draws from, where its state is not what the previous draw left, and all of them.

Checkpointing rewinds a generator in the middle of a step, and any code may seed it, so the state is kept wherever it is not the
continuation of the previous draw. All other draws follow by themselves when the calls are run again in order.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from bisect_nan.recording.program import GeneratorRef, tensors
from bisect_nan.recording.unmoved import numpy_state, python_state

Source = int | torch.device
"""What a call draws from: the generator that it was passed (`GeneratorRef.index`), else the default one of a device other than
the CPU; 0 is the CPU's default generator in either case."""


class Draws:
    """Watches the generators that a step draws from."""

    def __init__(self) -> None:
        """Start with the CPU's default generator, which is always number 0."""
        self._passed: list[torch.Generator] = [torch.default_generator]
        self._at_first: list[torch.Tensor] = [torch.default_generator.get_state()]
        self._left: dict[Source, torch.Tensor] = {}

    def reference(self, generator: torch.Generator) -> GeneratorRef:
        """Return the reference to a generator that the step passes to a call."""
        for index, known in enumerate(self._passed):
            if known is generator:
                return GeneratorRef(index)
        self._passed.append(generator)
        self._at_first.append(generator.get_state())
        return GeneratorRef(len(self._passed) - 1)

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the state that the call with these arguments starts from, or None when the previous draw left it so."""
        source, generator = self._source(args, kwargs)
        state, left = generator.get_state(), self._left.get(source)
        return None if left is not None and torch.equal(state, left) else state

    def after(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember the state that the call left."""
        source, generator = self._source(args, kwargs)
        self._left[source] = generator.get_state()

    def states(self) -> Mapping[Source, torch.Tensor]:
        """Return the states that the latest draws left, by generator."""
        return self._left

    def restore(self) -> None:
        """Put the generators that were passed to calls back to where they were at first."""
        for generator, state in zip(self._passed, self._at_first, strict=True):
            generator.set_state(state)

    def _source(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Source, torch.Generator]:
        for item in [*args, *kwargs.values()]:
            if isinstance(item, torch.Generator):
                return self.reference(item).index, item
        source = _implicit(
            [tensor.device for tensor in tensors(list(args)) if tensor is not None], kwargs.get("device")
        )
        return source, default_generator(source)


def source_of(args: Iterable[Any], devices: Iterable[torch.device]) -> Source:
    """Return what a recorded call draws from.

    Args:
        args: All its arguments.
        devices: Where the tensors that it makes or writes to are.
    """
    for item in args:
        if isinstance(item, GeneratorRef):
            return item.index
    return _implicit(devices, None)


def default_generator(source: Source) -> torch.Generator:
    """Return the default generator of the CPU (for 0) or of another device."""
    if isinstance(source, int):
        return torch.default_generator
    generators = torch.get_device_module(source).default_generators  # torch 2.6 to 2.13: torch.cuda, torch.xpu
    generator: torch.Generator = generators[source.index or 0]
    return generator


def _implicit(devices: Iterable[torch.device], made_on: torch.device | str | None) -> Source:
    """Return the source of a call that was passed no generator: that of the first device other than the CPU."""
    for device in [*devices, *([] if made_on is None else [torch.device(made_on)])]:
        if device.type != "cpu":
            return torch.device(device.type, device.index or 0)
    return 0


class GeneratorStates:
    """The generators of a replay: the process's default ones, and one of its own for each that the step passed to calls."""

    def __init__(self, states: Mapping[Source, torch.Tensor]) -> None:
        """Put generators into the given states."""
        self._own: dict[Source, torch.Generator] = {}
        for source, state in states.items():
            self.set(source, state)

    def of(self, source: Source) -> torch.Generator:
        """Return a generator; one of the replay's own has been given a state before, since every first draw has one."""
        if source not in self._own:
            self._own[source] = default_generator(source)
        return self._own[source]

    def set(self, source: Source, state: torch.Tensor) -> None:
        """Put a generator into a state."""
        if isinstance(source, int) and source > 0 and source not in self._own:
            on_cpu = state.numel() == torch.default_generator.get_state().numel()
            self._own[source] = torch.Generator("cpu" if on_cpu else "cuda")
        self.of(source).set_state(state)

    def states(self) -> dict[Source, torch.Tensor]:
        """Return the present state of the CPU's default generator and of all others used so far."""
        return {source: self.of(source).get_state() for source in {0: None, **dict.fromkeys(self._own)}}


class ProcessGenerators:
    """The states of torch's default generators, and of Python's and NumPy's, as they were when this object was made."""

    def __init__(self) -> None:
        """Remember the present states; NumPy's only where NumPy has been imported."""
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._python = python_state()
        self._numpy = numpy_state()

    def restore(self) -> None:
        """Put the states back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def state_of(item: Any) -> Callable[[], object] | None:
    """Return a function that puts a random generator of torch, Python or NumPy back; None when `item` is no such thing."""
    kind = type(item).__name__
    if kind not in {"Generator", "Random", "RandomState"}:
        return None
    if isinstance(item, torch.Generator):
        return functools.partial(item.set_state, item.get_state())
    if isinstance(item, random.Random):
        return functools.partial(item.setstate, item.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(item, numpy.random.RandomState):
        return functools.partial(item.set_state, item.get_state())
    if numpy is not None and isinstance(item, numpy.random.Generator):
        return functools.partial(setattr, item.bit_generator, "state", item.bit_generator.state)
    return None
