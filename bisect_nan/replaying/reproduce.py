"""The pass that shows the recorded symptom again, and on its way leaves checkpoints and looks at the frontier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bisect_nan import finite
from bisect_nan.finite import NonFinite
from bisect_nan.recording.program import NO_STORAGE
from bisect_nan.replaying.replay import Edit, Run
from bisect_nan.replaying.stretch import Checkpoint, Env, Stretch
from bisect_nan.search import sections

_SECTIONS = 16
"""Checkpoints of a pass: a refinement then executes at most a sixteenth of it, and a frontier is mostly references."""


@dataclass(slots=True)
class Pass:
    """One run over a stretch.

    Attributes:
        run: The run, at its latest cut.
        checkpoints: Where later runs can start, ascending, the first at cut 0.
        frontier: The kinds of non-finite value in the frontier, by cut, at those checkpoints where the pass looked.
        probe_seconds: What the probes took.
        probes: How many there were.
    """

    run: Run
    checkpoints: list[Checkpoint]
    frontier: dict[int, NonFinite] = field(default_factory=dict)
    probe_seconds: float = 0.0
    probes: int = 0
    _bad: dict[int, NonFinite] = field(default_factory=dict)

    def look(self, stretch: Stretch, since: int) -> None:
        """Take a checkpoint and note what the frontier holds; only what changed since the last look is read again."""
        start, run = time.perf_counter(), self.run
        values = stretch.program.values

        def fresh(number: int) -> bool:
            storage = values[number].storage
            return not self.checkpoints or storage == NO_STORAGE or stretch.changed(storage, since, run.cut)

        changed = {number: tensor for number, tensor in run.env.items() if fresh(number)}
        self._bad = {n: kinds for n, kinds in self._bad.items() if n in run.env and n not in changed}
        if finite.probe(changed.values()):
            flags = {number: finite.kinds(tensor) for number, tensor in changed.items()}
            self._bad |= {number: kinds for number, kinds in flags.items() if kinds}
        found = NonFinite(0)
        for kinds in self._bad.values():
            found |= kinds
        self.probe_seconds += time.perf_counter() - start
        self.probes += 1
        self.checkpoints.append(run.checkpoint())
        self.frontier[run.cut] = found

    def clean_before(self, cut: int, kinds: NonFinite) -> Checkpoint | None:
        """Return the last checkpoint before `cut` whose frontier is free of `kinds`; all behind it are dirty."""
        looked = [(c, self.frontier[c.cut]) for c in self.checkpoints if c.cut < cut and c.cut in self.frontier]
        clean = [checkpoint for checkpoint, dirty in looked if not dirty & kinds]
        return clean[-1] if clean else None

    def keep(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Let later runs start from checkpoints that a search left, too: what is asked next lies near them."""
        known = {checkpoint.cut for checkpoint in self.checkpoints}
        self.checkpoints += [checkpoint for checkpoint in checkpoints if checkpoint.cut not in known]
        self.checkpoints.sort(key=lambda checkpoint: checkpoint.cut)


def walk(
    stretch: Stretch,
    start: Checkpoint,
    cut: int,
    *,
    edits: Mapping[int, Edit] | None = None,
    state: Env | None = None,
    progress: Callable[[int, int], None] | None = None,
    resumed: Sequence[Checkpoint] = (),
) -> Pass:
    """Run a stretch from cut 0 to `cut`, with a checkpoint and a probe at cuts of about equal cost.

    Args:
        stretch: The calls.
        start: The checkpoint at cut 0.
        cut: Where to stop.
        edits: Interventions.
        state: Tensors that replace values of `start`.
        progress: Told how far it is, and how far it goes.
        resumed: Checkpoints that the recording left, ascending: the run begins at the last one.
    """
    run = Run(stretch, start, edits, state)
    done = Pass(run, [])
    done.look(stretch, 0)
    if resumed:
        done.keep(resumed[:-1])
        run = done.run = Run(stretch, resumed[-1])
        done.look(stretch, 0)
    for stop in [*(stop for stop in _stops(stretch, cut) if stop > run.cut), cut]:
        since = run.cut
        run.advance(stop)
        if stop < cut:
            done.look(stretch, since)
        if progress is not None:
            progress(stop, len(stretch))
    return done


def _stops(stretch: Stretch, cut: int) -> Sequence[int]:
    count = min(_SECTIONS, max(2, cut // 4))
    return sections(stretch.costs[:cut], count) if cut > 1 else []
