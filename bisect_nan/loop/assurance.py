"""Knows without looking at any element whether the coming update of an optimizer leaves parameters and state finite."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import operator
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bisect_nan import finite
from bisect_nan.loop.growth import GROWTHS, PARAMETER, SCALARS, SIGNED, SQUARES, Bounds, Group, Range, after
from bisect_nan.loop.training import Training
from bisect_nan.recording.live import writes

KNOWN = frozenset(
    {
        "1bba18c22d56a377c636cae2d9f83840e4318f199131f82404712e059dd662e3",  # torch.optim.adadelta of torch 2.13
        "3cb068d041031cc0cc7315d01f5327bcee3c8439f4c72af700ee8c1c3db5096e",  # torch.optim.adagrad of torch 2.13
        "bde360b0bb9b7869f1cec04a3b41a90b8eabb84a613787d97b88d87f2f3ae1ec",  # torch.optim.adam of torch 2.13
        "1f15c2e8f2bba4b6847d8242c8ead071b9d7df1ee5add1d4412f2a7b4bc986ff",  # torch.optim.adamax of torch 2.13
        "d0f3a2d889a43b65ed48175900f634bb5a244c8cd79a3f1117dc852ddad4b1e9",  # torch.optim.adamw of torch 2.13
        "0a13fc5f5bf540ba64a0dd9f3fae894f3ad01d30864672e775ba36c23e3b2a2a",  # torch.optim.asgd of torch 2.13
        "2d215cc5829912c1d84fc11c83477c0aac2fc071495b69bb4b842011ebc2081e",  # torch.optim.nadam of torch 2.13
        "2e94d8a3f8e88361e853db1c0642f8dea407d42c3c931deaa0ea7a6d6129d45a",  # torch.optim.optimizer of torch 2.13
        "bc5053e66285959389c70672ebc75ae69a82612f4009f881bd07e689876a4b5a",  # torch.optim.radam of torch 2.13
        "0f2d29411df558c824b85d0c3c4aecb9a41ca806099b3de10a495f1fe3d1024c",  # torch.optim.rmsprop of torch 2.13
        "33c98d8a8fc789697a7bfecbe7aaf39f6346c42fef935169402d05ea131a38e7",  # torch.optim.sgd of torch 2.13
    }
)
"""Hashes of the source files of torch/optim that the bounds were derived from. With any other, nothing is assured."""

_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_DEVICES = frozenset({"cpu", "cuda"})
"""Both compute halves in float32, or round them after each operation. The CPU's kernels were executed; of CUDA's the source was read."""

_REFRESH = 1000
"""Updates after which bounds are measured again, though they hold: not every write is noticed."""

_UNSEEN = 1e-18
"""In float32 a sum of squares loses elements below 1e-19."""

_NAMES = {PARAMETER, *SCALARS, *SIGNED, *SQUARES}
"""What is measured."""

_PATIENCE = 100
"""How many updates go by at most, without a bound, until it is tried again to measure one that is of use."""


class Assurance:
    """Bounds of a training's parameters and optimizer state, measured once and moved on by each update.

        if assurance.holds(norm):   # right before the update
            optimizer.step()
            assurance.advance()     # right after it

    The bounds follow from the code of torch's optimizers and from their settings, which are read anew for every update. Whatever
    is not known (another class, a setting on an accelerator, a tensor of another kind) is not assured. Writes to parameters and
    state from outside are noticed, and the bounds measured again. Those that torch does not count are not: through `.data` to
    the same memory, and by the fused update of another optimizer. Tell of them with `forget`; else the bounds are wrong for up
    to 1000 updates, and what goes bad then is not the update's doing.
    """

    def __init__(self, training: Training) -> None:
        """Look whether the optimizer's code is known; nothing is measured yet.

        Args:
            training: Model and optimizer. A hook of the optimizer that will ask has to be registered before; for hooks that are
                registered later, which may change gradients after it, nothing is assured.
        """
        self._training = training
        kind: Any = type(training.optimizer)
        self._growth = GROWTHS.get(kind) if kind in GROWTHS and not unknown_sources(kind) else None
        self._step, self._hook = kind.step, self._last_hook()
        self._numbers = Range.of(frozenset())
        self._bounds: Bounds | None = None
        self._next: Bounds | None = None
        self._tensors: list[Any] = []  # that the bounds are about
        self._marks: list[int] = []  # and what changes when somebody writes to them
        self._age = self._pause = self._paused = 0

    def holds(self, gradient_norm: float) -> bool:
        """Tell whether the coming update leaves parameters and state finite for certain.

        Ask right before the update, when gradients and settings are final. An update with a closure computes its gradients
        itself: do not ask for one. Where bounds have to be measured this reads parameters and state once.

        Args:
            gradient_norm: The 2-norm over all gradients.
        """
        gradient = 1.01 * gradient_norm + _UNSEEN
        # Nothing is known about what comes after this until `advance`: fused updates are not counted as writes.
        bounds, self._bounds, self._next = self._bounds, None, None
        if not self._is_plain():
            return False
        if bounds is not None and self._age < _REFRESH and self._is_unchanged():
            self._next = self._proof(bounds, gradient)
        if self._next is None and self._may_measure(gradient):
            measured, self._age = self._measured(), 0
            self._next = None if measured is None else self._proof(measured, gradient)
            self._pause = 0 if self._next is not None else min(2 * self._pause + 1, _PATIENCE)
        return self._next is not None

    def advance(self) -> None:
        """Move the bounds on, after an update for which they held."""
        self._bounds, self._next = self._next, None
        self._age += 1
        self._tensors = self._present()
        self._marks = self._marked()

    def forget(self) -> None:
        """Measure again before the next update: parameters or state were written to in a way that is not noticed."""
        self._bounds = None

    def _proof(self, bounds: Bounds, gradient: float) -> Bounds | None:
        """Return the bounds after an update of all groups, or None where a number on the way may be non-finite."""
        optimizer, growth = self._training.optimizer, self._growth
        found: dict[str, float] = dict(bounds)
        for group in optimizer.param_groups:
            settings = Group(group, optimizer.defaults)
            moved = None if growth is None else after(settings, bounds, gradient, self._numbers, growth)
            if moved is None:
                return None
            found = {name: max(found.get(name, 0.0), bound) for name, bound in moved.items()}
        return found

    # --- what would make the bounds those of something else -----------------------------------------------------------

    def _is_plain(self) -> bool:
        """Whether nothing but the known code will run, on gradients and parameters of kinds that it was read for."""
        optimizer: Any = self._training.optimizer
        if self._growth is None or type(optimizer).step is not self._step or not _is_own(optimizer):
            return False
        if self._last_hook() != self._hook or torch.is_inference_mode_enabled():
            return False
        if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
            return False  # a fused optimizer is to unscale the gradients itself
        parameters = self._training.parameters()
        there = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
        dtypes = {parameter.dtype for parameter in parameters}
        plain = {gradient.layout for gradient in there} <= {torch.strided} and set(map(type, there)) <= {torch.Tensor}
        if not plain or not {gradient.dtype for gradient in there} <= dtypes <= _TYPES:
            return False
        self._numbers = Range.of(frozenset(dtypes))
        return True

    def _last_hook(self) -> int | None:
        """Return the number of the last hook that runs before an update, if there is one."""
        optimizer: Any = self._training.optimizer
        return next(reversed(optimizer._optimizer_step_pre_hooks), None)  # noqa: SLF001  (nothing public tells)

    def _is_unchanged(self) -> bool:
        """Whether the same tensors are there, and nobody has written to them."""
        present = self._present()
        same = len(present) == len(self._tensors) and all(map(operator.is_, present, self._tensors))
        return same and self._marked() == self._marks

    def _present(self) -> list[Any]:
        """Return parameters and state."""
        kept = [value for state in self._training.optimizer.state.values() for value in state.values()]
        return [*self._training.parameters(), *(value for value in kept if value is not None)]

    def _marked(self) -> list[int]:
        """Return how often each tensor was written to, and where parameters lie, which tells of new `.data`."""
        return [*map(writes, self._tensors), *map(torch.Tensor.data_ptr, self._training.parameters())]

    # --- measuring ----------------------------------------------------------------------------------------------------

    def _may_measure(self, gradient: float) -> bool:
        """Whether it can be of use: zeros would be, and after measuring in vain, the next tries are further and further apart."""
        if self._proof({PARAMETER: 0.0}, gradient) is None:
            return False
        if self._paused < self._pause:
            self._paused += 1
            return False
        self._paused = 0
        return True

    def _measured(self) -> Bounds | None:
        """Return the bounds of parameters and state as they are now, or None where they are not what updates leave."""
        tensors: dict[str, list[torch.Tensor]] = {PARAMETER: self._training.parameters()}
        for state in self._training.optimizer.state.values():
            for name, value in state.items():
                if value is not None:
                    tensors.setdefault(name, []).append(value)
        wide = {torch.float32, torch.float64}
        dtypes = wide | {parameter.dtype for parameter in tensors[PARAMETER]}
        bounds = {}
        for name, group in tensors.items():
            if not all(
                _is_readable(tensor) and tensor.dtype in (wide if name in SCALARS else dtypes) for tensor in group
            ):
                return None
            low, high = _ends(group)
            if not (math.isfinite(low) and math.isfinite(high)):
                return None
            lowest, highest = 0.0 if name in SQUARES or name in SCALARS else -math.inf, SCALARS.get(name, math.inf)
            if name not in _NAMES or low < lowest or high > highest:
                return None
            bounds[name] = max(-low, high)
        # An update that meets the same memory twice moves it twice.
        large = [t for name, group in tensors.items() if name not in SCALARS for t in group if t.numel()]
        places = {tensor.untyped_storage().data_ptr() for tensor in large}
        return {n: b for n, b in bounds.items() if n not in SCALARS} if len(places) == len(large) else None


def unknown_sources(kind: type[torch.optim.Optimizer]) -> list[str]:
    """Return what of an optimizer's code is not what the bounds follow: modules of torch, or `step` when that was replaced.

    Args:
        kind: One of torch's optimizers.
    """
    modules = {base.__module__ for base in kind.__mro__ if issubclass(base, torch.optim.Optimizer)}
    own = _file_of(inspect.unwrap(kind.step)) in {sys.modules[name].__file__ for name in modules}
    return [*sorted(name for name in modules if _fingerprint(name) not in KNOWN), *([] if own else ["step"])]


def _file_of(function: object) -> str:
    """Return the file that a function's code comes from; empty for what has none."""
    code = getattr(function, "__code__", None)
    return code.co_filename if isinstance(code, types.CodeType) else ""


@functools.cache
def _fingerprint(module: str) -> str:
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # a torch without its sources
        return ""
    return hashlib.sha256(source.encode()).hexdigest()


def _is_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` is that of its class, bare or as schedulers wrap it."""
    step: Any = vars(optimizer).get("step")
    if step is None:
        return True
    return _file_of(step) == torch.optim.lr_scheduler.__file__ and step.__wrapped__ is type(optimizer).step


def _is_readable(tensor: object) -> bool:
    """Whether it is a plain tensor of real numbers, in memory that the kernels which were read work on."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.device.type in _DEVICES
        and not tensor.is_inference()
    )


def _ends(tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Return the smallest and the largest element of some tensors, both NaN where one is, with one synchronisation per device."""
    ends: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            low, high = finite.extremes(tensor.detach())
            ends.setdefault(tensor.device, []).append(torch.stack([low, high]).double())
    read = [pair for group in ends.values() for pair in torch.stack(group).tolist()]
    if any(math.isnan(low) for low, _ in read):
        return math.nan, math.nan
    return min((low for low, _ in read), default=0.0), max((high for _, high in read), default=0.0)
