"""From confirmed births to culprits: live evidence, cause, element, samples, chain."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from bisect_nan import causes, finite
from bisect_nan.answer.story import Story
from bisect_nan.answer.witness import Witness, recompute, results
from bisect_nan.blaming.samples import Rows, Samples
from bisect_nan.blaming.scaling import loss_scale
from bisect_nan.blaming.trace import Birth, Origin, site
from bisect_nan.blaming.trend import within
from bisect_nan.causes.evidence import Evidence, base_name
from bisect_nan.causes.operands import refused_determinant
from bisect_nan.errors import ReplayError
from bisect_nan.finding import Culprit, Link, Phase, SourceLine
from bisect_nan.recording.program import Node
from bisect_nan.remedies import Site
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Edit, Executed
from bisect_nan.replaying.reproduce import Pass
from bisect_nan.replaying.stretch import Stretch
from bisect_nan.snapshots.snapshot import Snapshot

OVERFLOWS = {"fp16_overflow", "overflow", "exp_overflow", "grad_overflow_fp16", "grad_overflow"}
"""Causes that grow over several calls."""

_TURNS = 16
"""Turns of a loop whose rows are looked for."""


class Examination:
    """Explains births, each with the values of one more execution of its call.

    Attributes:
        sites: Where each explained culprit could be repaired, in the same order.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        stretch: Stretch,
        dependence: Dependence,
        done: Pass,
        targets: Sequence[int],
        *,
        changes: bool,
    ) -> None:
        """Prepare.

        Args:
            snapshot: The step.
            stretch: The calls that the symptom needs.
            dependence: Of the whole program.
            done: A pass with checkpoints that reach up to the births.
            targets: The symptom's values.
            changes: Whether to run the step with other rows of the batch, to confirm which of them carry a fault.
        """
        self._changes = changes
        assert snapshot.observed is not None
        self._past = snapshot.history
        self._program, self._symptom = snapshot.program, snapshot.observed.symptom
        self._stretch, self._dependence, self._done, self._targets = stretch, dependence, done, targets
        self._turned: set[int] = set()
        self._tensors = snapshot.tensors()
        self.sites: list[Site] = []
        self._witness = Witness(self._program, stretch, dependence, done.checkpoints)
        self._samples = Samples(self._program, stretch, done.checkpoints, targets, confirm=changes)

    def culprits(
        self, births: Sequence[Birth], innocents: Sequence[Birth], edits: Mapping[int, Edit] | None = None
    ) -> tuple[Culprit, ...]:
        """Return one culprit for each place in the code where births lie, the earliest first.

        All turns of a loop are one place, and its first one is shown.

        Args:
            births: The guilty births.
            innocents: Births that were acquitted.
            edits: What neutralises the guilty ones: a birth is shown with the values that it has without those before it.
        """
        checkpoints = self._done.checkpoints
        self._witness = Witness(self._program, self._stretch, self._dependence, checkpoints, edits)
        targets = self._targets
        self._samples = Samples(self._program, self._stretch, checkpoints, targets, edits, confirm=self._changes)
        self._turned = {birth.node for birth in innocents if birth.origin is Origin.TURNED}
        places: dict[tuple[object, ...], list[Birth]] = {}
        for birth in sorted(births, key=lambda b: b.node):
            places.setdefault(site(self._program, birth), []).append(birth)
        return tuple(
            self._state(group[0]) if group[0].placeholder else self._call(group, innocents) for group in places.values()
        )

    def _state(self, birth: Birth) -> Culprit:
        placeholder = birth.placeholder
        assert placeholder is not None
        tensor = self._done.checkpoints[0].env[birth.value]
        phase = placeholder.phase
        entry, match = causes.of_state(phase, placeholder.name, self._symptom, birth.mask)
        users = [node for node in self._stretch.nodes if birth.value in node.inputs()]
        source = self._program.source(users[0]) if users else None
        carried = self._samples.of_input(birth.mask) if phase is Phase.INPUT and not placeholder.constant else Rows()
        culprit = Culprit(
            phase=phase,
            cause=entry.name,
            summary=entry.summary.format(op=placeholder.name, name=placeholder.name),
            confidence=1.0,
            op="",
            kernel="",
            autograd=None,
            node=-1,
            name=placeholder.name,
            source=source,
            module=placeholder.name.rpartition(".")[0] if phase in (Phase.PARAMETER, Phase.BUFFER) else "",
            inputs=(),
            outputs=(finite.summarise(tensor, placeholder.name),),
            element=_first(birth.mask),
            samples=carried.rows,
            samples_confirmed=carried.confirmed,
            chain=self._chain(users[0].index) if users else (),
            notes=match.notes,
            help=match.help or entry.help,
        )
        self.sites.append(Site(self._program, self._dependence, self._tensors, culprit, None, None, None, birth.value))
        return culprit

    def _call(self, births: Sequence[Birth], innocents: Sequence[Birth]) -> Culprit:
        node = self._program.nodes[births[0].node]
        executed = self._witness.execute(node)
        value, mask = _blamed(executed, [birth for birth in births if birth.node == node.index])
        origin = self._program.origin(node)
        evidence = Evidence(
            call=self._witness.call(executed),
            output=results(executed).index(value),
            mask=mask,
            symptom=self._symptom,
            forward=self._witness.forward(node),
            intended=self._written(innocents),
            recompute=lambda dtype: recompute(executed, dtype),
            ancestors=lambda name: tuple(self._witness.ancestors(node, name)),
            loss_scale=loss_scale(self._program, self._done.checkpoints[0].env),
            selected_by=lambda: self._witness.selected_by(node, value),
            history=self._history(node),
        )
        entry, match = causes.diagnose(evidence)
        carried = self._rows(births) if node.phase is not Phase.OPTIMIZER else Rows()
        op = str(origin.target) if node.source is None and node.forward is not None else str(node.target)
        op = "aten.logdet.default" if refused_determinant(evidence) else op  # torch writes it out
        culprit = Culprit(
            phase=node.phase,
            cause=entry.name,
            summary=entry.summary.format(op=base_name(op).lstrip("_")),
            confidence=match.confidence,
            op=op,
            kernel=str(node.target),
            autograd=node.autograd,
            node=node.index,
            name="",
            source=origin.source,
            module=node.module,
            inputs=tuple(finite.summarise(t, n) for n, t in evidence.call.tensors().items()),
            outputs=tuple(finite.summarise(t, "out") for t in executed.content.values()),
            element=_first(mask),
            samples=carried.rows,
            samples_confirmed=carried.confirmed,
            chain=self._chain(node.index),
            notes=(*match.notes, *self._around(node, entry.name)),
            help=match.help or entry.help,
        )
        self.sites.append(self._site(culprit, origin, evidence))
        return culprit

    def _around(self, node: Node, cause: str) -> tuple[str, ...]:
        """Tell what led up to an overflow, and which term of the loss a fault spoils; what cannot be run again is left out."""
        story = Story(self._program, self._dependence, self._witness)
        notes: tuple[str, ...] = ()
        with contextlib.suppress(ReplayError, RuntimeError):
            if cause in OVERFLOWS:
                notes += story.growth(self._program.origin(node))
            if self._symptom.kind == "loss":
                notes += story.terms()
        return notes

    def _site(self, culprit: Culprit, origin: Node, evidence: Evidence) -> Site:
        own = origin.index == culprit.node
        call = evidence.call if own else evidence.forward if evidence.forward is not None else None
        if call is None and self._stretch.has(origin.index):  # a derivative of a derivative
            call = self._witness.call(self._witness.execute(origin))
        return Site(
            program=self._program,
            dependence=self._dependence,
            tensors=self._tensors,
            culprit=culprit,
            node=origin,
            call=call,
            evidence=evidence,
        )

    def _rows(self, births: Sequence[Birth]) -> Rows:
        """Return the rows of the batch that births at one place come from, those of its first turns when it is a loop.

        A call that cannot be followed back costs the rows, not the answer.
        """
        found: list[Rows] = []
        with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
            found += [self._samples.of_result(birth.node, birth.value, birth.mask) for birth in births[:_TURNS]]
        rows = tuple(sorted({row for own in found for row in own.rows}))
        return Rows(rows, confirmed=bool(rows) and all(own.confirmed for own in found if own.rows))

    def _written(self, innocents: Sequence[Birth]) -> tuple[SourceLine, ...]:
        """The lines that wrote infinities on purpose, each once."""
        nodes = [
            self._program.nodes[birth.node] for birth in innocents if birth.origin is Origin.WRITTEN and birth.node >= 0
        ]
        return tuple(dict.fromkeys(source for node in nodes if (source := self._program.source(node))))

    def _history(self, node: Node) -> tuple[Mapping[str, float], ...]:
        """Return the numbers of the training up to a call; an update may have changed the parameters before it."""
        if node.phase is not Phase.OPTIMIZER:
            return self._past
        run = self._witness.before(node)
        return within(self._past, self._program, self._done.checkpoints[0].env, run.env)

    def _chain(self, start: int) -> tuple[Link, ...]:
        path = self._dependence.chain(start, self._targets, [node.index for node in self._stretch.nodes])
        nodes = [self._program.nodes[index] for index in path]
        return tuple(
            Link(node.index, base_name(str(node.target)), self._program.source(node), node.index in self._turned)
            for node in nodes
        )


def _blamed(executed: Executed, births: Sequence[Birth]) -> tuple[int, torch.Tensor]:
    """Return the first value that holds blamed elements, and all of its blamed elements."""
    value = min((birth.value for birth in births), key=results(executed).index)
    mask = torch.zeros(executed.content[value].shape, dtype=torch.bool)
    for birth in births:
        if birth.value == value:
            mask |= birth.mask.cpu()
    return value, mask.to(executed.content[value].device)


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    where = mask.nonzero()
    return tuple(where[0].tolist()) if len(where) else ()
