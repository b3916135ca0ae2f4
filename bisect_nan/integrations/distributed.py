"""Guards for data parallel training: every process watches its own step, and together they name the rank that failed first.

The protocol, with `DistributedDataParallel` (DDP):

1. A healthy step exchanges nothing. What a rank finds is at first its own business: a bad loss on one rank is not told there and then,
   because the others are waiting for this rank's gradients. Its gradients are made NaN (a bad loss need not make them so by itself),
   the backward pass runs, and the all-reduce carries the news: it leaves the same bad gradients on all ranks.
2. So all ranks find bad gradients in the same step, before the update, and do the same about them.
3. Each runs its own step again, alone: DDP's forward is that of the module within, so no buffers are broadcast and its reducer waits
   for no gradients; a step that talks to other processes by itself (`SyncBatchNorm`, say) is refused, since the others may not answer.
   A rank whose own loss or gradients come out bad has failed first; the others have received theirs.
4. They tell each other which it was, in a process group of their own with a timeout. Where a rank does not answer in time, because
   it has ended or sees no fault, the others name what they know. Nobody waits forever, and the training's own group stays usable.

Faults of the update are not exchanged: equal gradients and equal state make them on all ranks alike.
"""

from __future__ import annotations

import datetime as dt
import enum
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_leaves
from torch.utils._python_dispatch import TorchDispatchMode  # torch 2.6 to 2.13

from bisect_nan.errors import NonFiniteStep, RecordingError
from bisect_nan.integrations.replaced import replaced
from bisect_nan.integrations.rerun import Rerun
from bisect_nan.loop.guard import Guard
from bisect_nan.loop.incident import Call
from bisect_nan.recording.capture import Step, scalar_loss

_PATIENCE = dt.timedelta(minutes=5)
"""How long a rank waits for the others to run their step again."""
_LONGEST_PATH = 4096
"""Bytes of a path."""
_COLLECTIVES = "c10d", "_c10d_functional", "c10d_functional"
"""Namespaces of the operators that talk to other processes; torch 2.6 to 2.13."""


def guard_for(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Guard:
    """Return a guard: a `RankGuard` where processes train together, else a plain one.

    Args:
        model: The module that is trained, within `DistributedDataParallel` or not.
        optimizer: Its optimizer.
        options: Further arguments of `Guard`.
    """
    together = dist.is_available() and dist.is_initialized()
    return (RankGuard if together else Guard)(model, optimizer, **options)


class RankGuard(Guard):
    """A `Guard` in one process of several that train together; it is used like one, on every rank.

        guard = RankGuard(model, optimizer)  # model is a DistributedDataParallel
        step = guard.watch(step)

    `NonFiniteStep` names the rank that failed first, and that rank's snapshot.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, directory: str | Path = "crashes", **options: Any
    ) -> None:
        """Hook into the optimizer, and make a process group: every rank has to make its guard.

        Args:
            model: The module that is trained, as the step gets it.
            optimizer: Its optimizer.
            directory: Where snapshots go, each rank's in a folder of its own: `crashes/rank1/step_812.safetensors`.
            options: Further arguments of `Guard`.
        """
        self._rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        super().__init__(_within(model), optimizer, directory=Path(directory) / f"rank{self._rank}", **options)

    def watch(self, step: Step) -> Step:
        """Return `step` under watch: same arguments, same result. A bad loss is told after its backward pass.

        Args:
            step: As for `Guard.watch`.
        """

        @functools.wraps(step)
        def watched(model: Any, batch: Any) -> Any:
            results: list[Any] = []

            def first(_: Any, batch: Any) -> Any:
                results.append(step(model, batch))
                return _kept_back(results[0])

            def again(_: Any, batch: Any) -> Any:
                with replaced(DistributedDataParallel, forward=_alone), _Silence():  # type: ignore[no-untyped-call]
                    return step(model, batch)

            super(RankGuard, self).watch(Rerun(first, again))(_within(model), batch)
            return results[0]

        return watched

    def _crash(self, kind: str, bad: Mapping[str, torch.Tensor], calls: Iterable[Call]) -> NoReturn:
        try:
            super()._crash(kind, bad, calls)
        except NonFiniteStep as fault:
            raise self._attributed(fault, spread=kind == "gradient") from None

    def _attributed(self, fault: NonFiniteStep, *, spread: bool) -> NonFiniteStep:
        """Return the fault with the ranks that it began on.

        Args:
            fault: As this rank's guard tells it.
            spread: Whether all ranks see it, so that they can tell each other what they found.
        """
        if not spread:
            return NonFiniteStep(fault.path, fault.symptom, _joined(fault.problem, f"on rank {self._rank}"))
        mine = _Found.FAULT if not fault.problem else _Found.NOTHING if fault.path is not None else _Found.UNKNOWN
        told = self._exchange(mine, "" if fault.path is None else str(fault.path))
        guilty = [rank for rank, (found, _) in enumerate(told) if found is _Found.FAULT]
        silent = [rank for rank, (found, _) in enumerate(told) if found is _Found.UNKNOWN]
        path, said = fault.path, fault.problem
        if guilty and mine is not _Found.FAULT:
            if path is not None:
                path.unlink()  # a finite step, of use to nobody
            path, said = Path(told[guilty[0]][1]), ""
        if guilty:
            said = _joined(said, f"{_ranks(guilty)} failed first")
        elif not silent:
            said = "the gradients of every rank come out finite when they are computed again, so it may be their sum that is not"
        if silent:
            said = _joined(said, f"{_ranks(silent)} cannot tell")
        return NonFiniteStep(path, fault.symptom, said)

    def _exchange(self, found: _Found, path: str) -> list[tuple[_Found, str]]:
        """Return what every rank has found, by rank, and its snapshot's path."""
        word = torch.tensor(list(bytes([found]) + path.encode().ljust(_LONGEST_PATH, b"\0")), dtype=torch.uint8)
        words = [torch.zeros_like(word) for _ in range(dist.get_world_size(self._group))]
        try:
            dist.all_gather(words, word, group=self._group)
        except RuntimeError:  # gloo's, when time is up or a process has ended
            words = [torch.zeros_like(word) for _ in words]
            words[self._rank] = word
        said = [bytes(word.tolist()) for word in words]
        return [(_Found(data[0]), data[1:].rstrip(b"\0").decode()) for data in said]


class _Found(enum.IntEnum):
    """What a rank finds when it runs its own step again."""

    UNKNOWN = 0
    NOTHING = 1
    FAULT = 2


class _Silence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets nothing talk to other processes, which would not answer."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call, if it stays within this process."""
        if func.namespace in _COLLECTIVES:
            got = f"the step talks to other processes ({func})"
            raise RecordingError(
                got, "a step that one process can run again alone", "run it on one process, with this rank's batch"
            )
        return func(*args, **(kwargs or {}))


def _alone(model: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """Stand in for DDP's forward."""
    return model.module(*inputs, **kwargs)


def _within(model: Any) -> Any:
    """Return the module within DDP, whose names are those that the user knows."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _kept_back(result: Any) -> Any:
    """Return what a step returned, for the guard to look at: a bad loss only as something that spoils the gradients."""
    with torch.no_grad():
        if math.isfinite(float(scalar_loss(result))):
            return result
    for part in pytree.tree_leaves(result):
        if isinstance(part, torch.Tensor) and part.requires_grad:
            part.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]
    return {"loss": torch.zeros(()), "result": result}


def _ranks(ranks: Sequence[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
