"""Guards for data parallel training: every process watches its own step, and together they name the rank that failed first.

The protocol, with `DistributedDataParallel` (DDP):

1. A healthy step exchanges nothing. A bad loss on one rank is not told there and then, because the others wait for this rank's
   gradients: its gradients are made NaN (a bad loss alone need not make them so), the backward pass runs, and the all-reduce carries
   the news: it leaves the same gradients on all ranks.
2. So all ranks find bad gradients in the same step, before the update, and do the same about them.
3. Each runs its own step again, alone: DDP's forward is that of the module within it, so that no buffers are broadcast and its reducer
   waits for nothing; a step that talks to other processes by itself (`SyncBatchNorm` does) is refused, as they might not answer.
   A rank whose own loss or gradients come out bad has failed first; the others have received theirs.
4. They tell each other which it was, in a process group of their own with a timeout (`ranks.py`). Where a rank does not answer, because
   it has ended or sees no fault, the others tell what they know. Nobody waits forever, and the training's own group stays usable.

A step that a `GradScaler` leaves out is left out on all ranks; whether it is bad without its scale as well, they find out in the same way.
Faults of the update need no exchange: equal gradients and equal state make them on all ranks alike. Buffers belong to one rank: nobody
else sees that they went bad, so such a step cannot be left out, and raises.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_leaves
from torch.utils._python_dispatch import TorchDispatchMode  # torch 2.6 to 2.13

from bisect_nan.errors import RecordingError
from bisect_nan.integrations.ranks import Found, Ranks, Word, named
from bisect_nan.integrations.replaced import replaced
from bisect_nan.loop.alarm import Alarm, capturing
from bisect_nan.loop.guard import Guard
from bisect_nan.loop.incident import Call, Incident, Update
from bisect_nan.loop.late import LateVigil
from bisect_nan.loop.recovery import OnFault
from bisect_nan.loop.vigil import Vigil
from bisect_nan.recording.capture import Step, require_step, scalar_loss
from bisect_nan.recording.outcome import Observed
from bisect_nan.snapshots.snapshot import Snapshot

_COLLECTIVES = "c10d", "_c10d_functional", "c10d_functional"
"""Namespaces of the operators that talk to other processes; torch 2.6 to 2.13."""

_FINITE = "it came out finite when it was run again on this rank alone"


def guard_for(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Guard:
    """Return a guard: a `RankGuard` where processes train together, else a plain one.

    Args:
        model: The module that is trained, within `DistributedDataParallel` or not.
        optimizer: Its optimizer.
        options: Further arguments of `Guard`.
    """
    together = dist.is_available() and dist.is_initialized()
    return (RankGuard if together else Guard)(model, optimizer, **options)


class _RankIncident(Incident):
    """Something came out non-finite on all ranks; only where it shows again is it worth a snapshot."""

    def capture(self, **known: Any) -> tuple[Snapshot, str]:
        snapshot, problem = Incident.capture(self, **known)
        if problem:
            raise RecordingError(_FINITE)
        return snapshot, problem


class RankAlarm(Alarm):
    """Answers faults as all ranks do, and says on which they began."""

    def __init__(self, *args: Any) -> None:
        """Make a process group for the purpose, on every rank."""
        super().__init__(*args)
        self.ranks = Ranks()

    def sound(
        self, kind: str, bad: Mapping[str, torch.Tensor], calls: Sequence[Call], update: Update | None, **known: Any
    ) -> None:
        """Answer a fault; one that no other rank can see is never left out, or the ranks' parameters would part ways."""
        on_fault = OnFault.RAISE if kind == "buffer" and self.leaves_out else self._on_fault
        with replaced(self, _on_fault=on_fault):
            super().sound(kind, bad, calls, update, **known)

    def _save(
        self, incident: Incident, step: int, history: Sequence[Mapping[str, float]]
    ) -> tuple[Path | None, str, Observed | None]:
        if incident.seen.symptom.kind != "gradient":
            path, problem, again = super()._save(incident, step, history)
            return path, _joined(problem, f"on rank {self.ranks.mine}"), again
        own = _RankIncident(incident.seen, incident.calls, incident.update, incident.scale, incident.base)
        path, problem, again = super()._save(own, step, history)
        found = Found.FAULT if again is not None else Found.NOTHING if problem == _FINITE else Found.UNKNOWN
        words = self.ranks.exchange(Word(found, path))
        guilty = [rank for rank, word in enumerate(words) if word.found is Found.FAULT]
        silent = [rank for rank, word in enumerate(words) if word.found is Found.UNKNOWN]
        if guilty and found is not Found.FAULT:
            path, problem = words[guilty[0]].path, ""
        if guilty:
            problem = _joined(problem, f"{named(guilty)} failed first")
        elif not silent:
            problem = (
                "the gradients of each rank come out finite when they are computed again; their sum may be what is not"
            )
        if silent:
            problem = _joined(problem, f"{named(silent)} cannot tell")
        return path, problem, again


class _RankVigil(Vigil):
    def _shows_unscaled(self) -> bool:
        """Whether it does on any rank: all of them leave the same steps out."""
        found = Found.FAULT if super()._shows_unscaled() else Found.NOTHING
        assert isinstance(self.alarm, RankAlarm)
        return any(word.found is Found.FAULT for word in self.alarm.ranks.exchange(Word(found)))


class _LateRankVigil(_RankVigil, LateVigil):
    pass


class RankGuard(Guard):
    """A `Guard` in one process of several that train together; every rank makes one, and uses it like any other.

        guard = RankGuard(model, optimizer)  # model is a DistributedDataParallel
        step = guard.watch(step)

    `NonFiniteStep` names the rank that failed first, and that rank's snapshot.
    """

    _kinds = RankAlarm, _RankVigil, _LateRankVigil

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        """Hook into the optimizer, and make a process group: every rank has to make its guard.

        Args:
            model: The module that is trained, as the step gets it.
            optimizer: Its optimizer.
            options: Further arguments of `Guard`.
        """
        if dist.get_rank() > 0:
            options.pop("healthy_file", None)  # the states of all ranks are alike but for buffers: one writes them
        super().__init__(_within(model), optimizer, **options)

    def watch(self, step: Step) -> Step:
        """Return `step` under watch: same arguments, same result. A bad loss is told after its backward pass.

        Args:
            step: As for `Guard.watch`.
        """
        require_step(step)

        @functools.wraps(step)
        def watched(model: Any, batch: Any) -> Any:
            results: list[Any] = []

            def own(_: Any, batch: Any) -> Any:
                if capturing.get():
                    with replaced(DistributedDataParallel, forward=_alone), _Silence():  # type: ignore[no-untyped-call]
                        return step(model, batch)
                results.append(step(model, batch))
                return _told_by_gradients(results[0])

            super(RankGuard, self).watch(own)(_within(model), batch)
            return results[0]

        return watched


class _Silence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets nothing talk to other processes, which would not answer."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call, if it stays within this process."""
        if func.namespace in _COLLECTIVES:
            got = f"the step talks to other processes ({func}), and cannot be run again on one of them"
            raise RecordingError(
                got, "a step that stays within its process", "run this rank's batch in a single process"
            )
        return func(*args, **(kwargs or {}))


def _alone(model: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """Stand in for DDP's forward."""
    return model.module(*inputs, **kwargs)


def _within(model: Any) -> Any:
    """Return the module within DDP, whose names are those that the user knows."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@torch.no_grad()
def _told_by_gradients(result: Any) -> dict[str, Any]:
    """Return what a step returned for the guard to look at: a bad loss shows only in the gradients, which it makes NaN."""
    loss = scalar_loss(result).detach()
    fine = loss.isfinite()

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return torch.where(fine, gradient, torch.nan)

    for part in pytree.tree_leaves(result):
        if isinstance(part, torch.Tensor) and part.requires_grad and part.numel() == 1:
            part.register_hook(spoil)  # type: ignore[no-untyped-call]
    return {"loss": torch.where(fine, loss, 0.0), "result": result}


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
