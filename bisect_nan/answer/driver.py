"""The driver: a snapshot goes in, a finding comes out.

1. Reproduce: run to the symptom; it must be the recorded one, else nothing is blamed.
2. State first: if a parameter, a buffer or the batch holds bad values, neutralise those and see.
3. Search: between the last clean checkpoint and the symptom, bisect for the call that made the frontier dirty; NaN before Inf.
4. Confirm: follow its bad elements back to their births (an infinity that no literal explains is the root of a NaN); neutralise
   the births; the symptom must go.
5. Where it stays, follow all bad elements of the symptom back, collect every birth on the way, and let interventions decide.
6. Explain what is left.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from bisect_nan import finite, search
from bisect_nan.answer.explain import Examination
from bisect_nan.answer.trial import Trial
from bisect_nan.blaming.inquest import Inquest, without
from bisect_nan.blaming.trace import Birth, Origin, Trail, execute, of
from bisect_nan.causes.optimizer import LEARNING_RATE_EXPLOSION
from bisect_nan.errors import ReplayError, SnapshotError
from bisect_nan.finding import Culprit, Finding, Innocent, Phase, SearchCost, Verdict
from bisect_nan.finite import NonFinite
from bisect_nan.recording.program import Program
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.intent import Intent
from bisect_nan.replaying.replay import Edit, Run, own_generator
from bisect_nan.replaying.reproduce import Pass, walk
from bisect_nan.replaying.runner import Runner
from bisect_nan.replaying.stability import doubts
from bisect_nan.replaying.stretch import Checkpoint, Stretch
from bisect_nan.search import Answer, Bracket, Outcome
from bisect_nan.snapshots.snapshot import Snapshot

Progress = Callable[[str, int, int], None]
"""Told the stage (`replay`, `search`, `confirm`, `explain`, `remedy`), how far it is, and how far it goes: 0 where nobody knows."""

_ATTEMPTS = 3
"""Replays before a symptom that does not show again is called not reproduced."""


def locate(
    snapshot: Snapshot,
    *,
    search: str = "bisect",
    progress: Progress | None = None,
    careful: bool = False,
    remedies: bool = True,
) -> Finding:
    """Find the operation that made a recorded step non-finite.

    Args:
        snapshot: The step.
        search: `bisect`, or `scan` to probe after every call.
        progress: Told about long work.
        careful: Announce every call through `progress` before it runs, for steps that end the process.
        remedies: Whether to execute changes until one makes the step finite, at most two executions of the step for a line, and
            to confirm which samples carry the fault by a run without them.

    Raises:
        ReplayError: A call of the program cannot be executed here.
        SnapshotError: It is no snapshot, or the captured tensors have been written to since.
    """
    if not isinstance(snapshot, Snapshot):
        do = "open a crash file with Snapshot.load(path), or record a step with Snapshot.capture"  # type: ignore[unreachable]
        raise SnapshotError(f"locate() got {snapshot!r:.80} ({type(snapshot).__name__})", "a Snapshot", do)
    if snapshot.observed is None:
        return Finding(Verdict.CLEAN, search=SearchCost(nodes=len(snapshot.program.nodes)), loss=snapshot.loss)
    with own_generator(), snapshot.environment.applied():
        return _Case(snapshot, search, progress, careful, remedies).finding()


class _Case:
    """One snapshot under investigation."""

    def __init__(
        self, snapshot: Snapshot, method: str, progress: Progress | None, careful: bool, remedies: bool
    ) -> None:
        self.remedies = remedies
        assert snapshot.observed is not None
        self.seconds: dict[str, float] = {}
        self._clock = time.perf_counter()
        self.snapshot, self.program, self.observed = snapshot, snapshot.program, snapshot.observed
        self.method = {"bisect": search.bisect, "scan": search.scan}[method]
        self.progress = progress or (lambda *_: None)
        self.dependence = Dependence(self.program)
        self.intent = Intent(self.program, self.dependence)
        numbers = self.program.targets.of(self.observed.symptom.kind)
        self.targets = [numbers[name] for name in self.observed.names if name in numbers]
        announce = (lambda node: self.progress("replay", node, len(self.program.nodes))) if careful else None
        self.stretch = Stretch(self.program, self.dependence.slice(self.targets), self.targets, announce)
        self.start = self.stretch.start(snapshot.tensors())
        self.first = self.stretch.cut_after(self.dependence.finished(self.targets[:1]) - 1) if self.stretch.nodes else 0
        self.probes = self.executed = self.replays = 0
        self.cuts: list[tuple[int, str]] = []
        self.suspects: list[Birth] = []
        self.notes: list[str] = []

    def finding(self) -> Finding:
        if not self.targets:  # the recording came out clean, unlike the step that it repeats
            self.notes = doubts(self.stretch, self.start, 0, 1, compiled=self.snapshot.environment.compiled)
            return self._answer(Verdict.NOT_REPRODUCED, [], [], None)
        reproduced, verdict = self._reproduce()
        if reproduced is None:
            return self._answer(verdict, [], [], None)
        told = self._counting("confirm")
        inquest = Inquest(self.stretch, reproduced, self.targets, self.intent, self.dependence, told)
        births, innocents = self._culprits(reproduced, inquest)
        births = inquest.one_each(inquest.roots(births))
        self.replays += inquest.runs + inquest.court.runs
        self._stop("confirm")
        if not births:
            return self._answer(Verdict.INCONCLUSIVE, [], innocents, None)
        return self._answer(Verdict.LOCATED, births, innocents, reproduced, inquest.court.edits(births))

    # --- 1. reproduce -----------------------------------------------------------------------------------------------------

    def _reproduce(self) -> tuple[Pass | None, Verdict]:
        shown = 0
        for attempt in range(1, _ATTEMPTS + 1):
            done = (self._resumed() if attempt == 1 else None) or self._walk()
            if self._same(done.run):
                shown += 1
                if attempt == 1:
                    break
        if attempt > 1:
            self.notes = doubts(self.stretch, self.start, shown, attempt, compiled=self.snapshot.environment.compiled)
        self._stop("replay")
        if shown == 0:
            return None, Verdict.NOT_REPRODUCED
        if attempt > 1:
            return None, Verdict.FLAKY
        self.probes += done.probes
        self.cuts += [(cut, "dirty" if dirty else "clean") for cut, dirty in done.frontier.items()]
        return done, Verdict.LOCATED

    def _resumed(self) -> Pass | None:
        """Run from the latest frontier that the recording kept; None when that does not show the symptom."""
        kept = self.stretch.resume(self.snapshot.frontiers(), self.start)
        kept = [checkpoint for checkpoint in kept if 0 < checkpoint.cut < self.first]
        with contextlib.suppress(ReplayError):
            done = self._walk(kept) if kept else None
            return done if done is not None and self._same(done.run) else None
        return None

    def _walk(self, kept: Sequence[Checkpoint] = ()) -> Pass:
        self.replays += 1
        told = self.progress
        return walk(self.stretch, self.start, self.first, progress=lambda *far: told("replay", *far), resumed=kept)

    def _same(self, run: Run) -> bool:
        """Whether a run shows the recorded symptom: bit for bit where it was recorded, in the same elements elsewhere."""
        replayed, recorded = run.env[self.targets[0]].cpu(), self.observed.tensor.cpu()
        if finite.same(replayed, recorded):
            return True
        kinds = (NonFinite.NAN, NonFinite.INF)
        if replayed.shape != recorded.shape or any(
            bool((finite.mask(replayed, kind) != finite.mask(recorded, kind)).any()) for kind in kinds
        ):
            return False
        if self.snapshot.differences() or replayed.layout is not torch.strided:
            return bool(self.snapshot.differences())
        nan = finite.mask(recorded, NonFinite.NAN)  # its sign is lost where Python held the number, as `.item()` does
        return finite.same(replayed.masked_fill(nan, 0), recorded.masked_fill(nan, 0))

    # --- 2. to 5. ---------------------------------------------------------------------------------------------------------

    def _culprits(self, done: Pass, inquest: Inquest) -> tuple[list[Birth], list[Birth]]:
        """Return the births that make the symptom and those that were acquitted."""
        state = self._bad_state() if done.frontier[0] else []
        if state and inquest.court.heals(state):
            guilty = inquest.narrowed(inquest.court.reduce(state))
            borne = [birth for birth in guilty if self._bears(birth, inquest)]
            if not borne:
                return guilty, without(state, guilty)
            for birth in borne:
                self.intent.accept(birth.value)
            found = inquest.collect()
            marks = finite.has([self.start.env[birth.value] for birth in borne], NonFinite.NAN)  # of missing values
            failing = found[0] and not (marks and any(birth.origin is not Origin.MADE for birth in found[0]))
            return found if failing else (guilty, without(state, guilty))
        searched = None if state else self._search(done, inquest)
        if searched is None and self._runaway(done):
            return self.suspects, []
        return inquest.collect() if searched is None else searched

    def _bad_state(self) -> list[Birth]:
        """Return the inputs, parameters and buffers with bad elements that are not meant."""
        births = []
        placeholders = {p.value: p for p in self.program.placeholders}
        for value, tensor in self.start.env.items():
            if finite.probe([tensor]) and not self.intent.means(placeholders[value], tensor):
                births.append(Birth(-1, value, finite.mask(tensor), Origin.MADE, placeholders[value]))
        return births

    def _bears(self, birth: Birth, inquest: Inquest) -> bool:
        """Whether the step takes in other bad elements of the same tensor: then they are meant, and some call cannot bear all."""
        bad = finite.mask(self.start.env[birth.value])
        outside = birth.placeholder is not None and birth.placeholder.phase is Phase.INPUT
        if not outside or not (bad & ~birth.mask).any():
            return False
        return inquest.court.differ([birth], [replace(birth, mask=bad)])

    def _search(self, done: Pass, inquest: Inquest) -> tuple[list[Birth], list[Birth]] | None:
        """Bisect for one birth and confirm it; None when it is not the whole answer."""
        nan = "nan" in self.observed.symptom.nonfinite
        kinds = NonFinite.NAN if nan else NonFinite.ANY
        clean = done.clean_before(self.first, kinds)
        if clean is None:
            return None
        self.progress("search", 0, 0)
        later = [c.cut for c in done.checkpoints if c.cut > clean.cut]
        outcome, kept = self._bisect(clean, min([*later, self.first]), kinds, done.probe_seconds / done.probes)
        self._stop("search")
        node = outcome.bracket.node
        if node is None:
            return None
        done.keep(kept)
        trail = Trail(self.stretch, done.checkpoints, self.intent)
        (executed,) = execute(self.stretch, kept[-1], node + 1)
        for number, tensor in executed.content.items():
            mask = finite.mask(tensor, kinds)
            if mask.any():
                trail.explain(executed, number, mask)
        trail.follow(node)
        self.suspects = sorted(of(trail.births, Origin.MADE), key=lambda birth: birth.node)[:1]
        guilty = inquest.judge(of(trail.births, Origin.MADE) or of(trail.births, Origin.TURNED), elsewhere=True)
        return None if guilty is None else (inquest.narrowed(guilty), without(trail.births, guilty))

    def _runaway(self, done: Pass) -> bool:
        """Whether the weights are so large that everything overflows: no change at one call heals that, and the trend confirms it."""
        examination = Examination(self.snapshot, self.stretch, self.dependence, done, self.targets, changes=False)
        causes = [culprit.cause for culprit in examination.culprits(self.suspects, [])]
        return causes == [LEARNING_RATE_EXPLOSION.name]

    def _bisect(
        self, start: Checkpoint, dirty: int, kinds: NonFinite, probe_cost: float
    ) -> tuple[Outcome, list[Checkpoint]]:
        """Search between two cuts; return also the checkpoints on the way, the last one in front of what was found."""
        runner = Runner(self.stretch, [start], kinds)
        before = self.stretch.executed
        outcome = self.method(runner, self.stretch.costs, Bracket(start.cut, dirty), probe_cost=probe_cost)
        self.executed += self.stretch.executed - before
        self.probes += outcome.probes
        words = {Answer.FINITE: "clean", Answer.NONFINITE: "dirty", Answer.UNKNOWN: "unknown"}
        self.cuts += [(cut, words[answer]) for cut, answer in outcome.cuts]
        return outcome, runner.checkpoints

    # --- the answer -------------------------------------------------------------------------------------------------------

    def _answer(
        self,
        verdict: Verdict,
        births: Sequence[Birth],
        innocents: Sequence[Birth],
        done: Pass | None,
        edits: Mapping[int, Edit] | None = None,
    ) -> Finding:
        culprits = tuple[Culprit, ...]()
        if done is not None and births:
            self.progress("explain", 0, 0)
            looked = self.snapshot, self.stretch, self.dependence, done, self.targets
            examination = Examination(*looked, changes=self.remedies)
            culprits = examination.culprits(births, innocents, edits)
            self._stop("explain")
            if self.remedies:
                trial = Trial(self.snapshot, self.dependence, examination.sites, self._counting("remedy"))
                found = zip(culprits, trial.remedies(), strict=True)
                culprits = tuple(replace(culprit, remedy=remedy) for culprit, remedy in found)
                self._stop("remedy")
        self.seconds["total"] = sum(self.seconds.values())
        cost = SearchCost(
            nodes=len(self.program.nodes),
            executed=self.executed,
            probes=self.probes,
            replays=self.replays,
            replayed=self.stretch.executed - self.executed,
            seconds=self.seconds,
            cuts=tuple([(self.stretch.nodes[cut - 1].index + 1 if cut else 0, answer) for cut, answer in self.cuts]),
        )
        return Finding(
            verdict=verdict,
            symptom=self.observed.symptom,
            culprits=culprits,
            innocents=tuple(_innocent(self.program, birth) for birth in self._acquitted(births, innocents)),
            search=cost,
            environment=self.snapshot.differences(),
            loss=None if self.program.targets.values else self.snapshot.loss,
            notes=tuple(self.notes),
        )

    def _acquitted(self, births: Sequence[Birth], innocents: Sequence[Birth]) -> list[Birth]:
        """Leave out what is a link of the chain: NaN that was made of a culprit's infinities."""
        if not of(innocents, Origin.TURNED):
            return list(innocents)
        reached = self.dependence.descendants(birth.node for birth in births if birth.node >= 0)
        return [birth for birth in innocents if birth.origin is not Origin.TURNED or birth.node not in reached]

    def _counting(self, stage: str) -> Callable[[int], None]:
        return lambda count: self.progress(stage, count, 0)

    def _stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._clock
        self._clock = now


def _innocent(program: Program, birth: Birth) -> Innocent:
    why = birth.origin.value if birth.origin is Origin.WRITTEN else "the symptom is the same without it"
    if birth.placeholder is not None:
        return Innocent(-1, "", birth.placeholder.name, None, why)
    node = program.nodes[birth.node]
    return Innocent(node.index, str(node.target), "", program.source(node), why)
