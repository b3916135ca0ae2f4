"""Executes remedies: the changed step has to come out finite, forward and backward, and healthy values have to stay as they were."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bisect_nan import finite
from bisect_nan.answer.decisions import Decisions
from bisect_nan.errors import ReplayError
from bisect_nan.finding import Phase, Remedy
from bisect_nan.norms import norms
from bisect_nan.recording.program import named, substitute, tensors
from bisect_nan.remedies import Proposal, Site, proposals
from bisect_nan.remedies.alone import helps
from bisect_nan.remedies.wording import in_words, line_to_write
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.differentiable import Change, Rerun, Several, Types
from bisect_nan.replaying.replay import Edit, Executed, Run
from bisect_nan.replaying.stretch import Env, Stretch
from bisect_nan.replaying.tracking import saved
from bisect_nan.snapshots.snapshot import Snapshot

EXECUTIONS = 2
"""Executions of the step that each culprit may cost."""

_CANDIDATES = 20
"""Proposals that are looked at for one culprit."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a changed step.

    Attributes:
        finite: Whether the loss and every gradient (for an update: every parameter and the optimizer's state) are finite.
        loss: The loss; None where there is none.
        text: What was seen.
    """

    finite: bool
    loss: float | None
    text: str


class Trial:
    """Finds for each culprit a change that, together with those of the others, makes the step finite.

    Attributes:
        executions: Executions of the step so far.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        dependence: Dependence,
        sites: Sequence[Site],
        told: Callable[[int], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            snapshot: The step.
            dependence: Of its program.
            sites: The culprits.
            told: Told the number of each execution before it.
        """
        self._told = told or (lambda _: None)
        self._snapshot, self._program, self._dependence, self._sites = snapshot, snapshot.program, dependence, sites
        self._tensors = snapshot.tensors()
        self._decisions = Decisions(self._program, dependence, self._tensors)
        self._lines: dict[object, list[Site]] = {}  # by the line that a user would change: one change serves all
        for site in sites:
            self._lines.setdefault(_line(site), []).append(site)
        self.executions = 0

    def remedies(self) -> list[Remedy | None]:
        """Return one remedy for each culprit: the first that was seen to help, else the first that fits, else None."""
        choices = [self._shared(sites) for sites in self._lines.values()]
        if not any(choices):
            return [None] * len(self._sites)
        first: Outcome | None = None
        for picked in _rounds(choices, EXECUTIONS * len(choices)):
            outcome = self._execute([proposal for proposal in picked if proposal is not None])
            first = first or outcome
            if outcome.finite:
                break
        else:
            picked, outcome = tuple(options[0] if options else None for options in choices), first or outcome
        chosen = dict(zip(self._lines, picked, strict=True))
        return [self._remedy(site, chosen[_line(site)], outcome) for site in self._sites]

    def _shared(self, sites: Sequence[Site]) -> list[Proposal]:
        """Return the changes of a line that are promising at all of its culprits, else those that are at the first one."""
        options = [list(self._promising(site)) for site in sites]
        known = [{(proposal.name, proposal.wrap) for proposal in own} for own in options[1:]]
        shared = [p for p in options[0] if all((p.name, p.wrap) in others for others in known)]
        return shared or options[0]

    def _remedy(self, site: Site, proposal: Proposal | None, outcome: Outcome) -> Remedy | None:
        if proposal is None:
            return None
        text, code, source = line_to_write(site, proposal)
        lines = {_line(other) for other in self._sites if other.culprit.source == site.culprit.source}
        if code and len(lines) > 1:  # another change is one to the same line
            text, code, source = in_words(site, proposal), "", None
        several = len({other.culprit.source for other in self._sites}) > 1
        together = f"with {'the changes to all lines' if several else 'all changes'}: " if len(self._lines) > 1 else ""
        return Remedy(proposal.name, text, outcome.finite, outcome.loss, code, f"{together}{outcome.text}", source)

    # --- what is worth an execution -----------------------------------------------------------------------------------------

    def _promising(self, site: Site) -> Iterator[Proposal]:
        """Yield those proposals that help the call itself and leave its healthy results as they were, one of each kind first."""
        further: list[Proposal] = []
        kinds: set[str] = set()
        for proposal in itertools.islice(proposals(site), _CANDIDATES):
            if proposal.local and site.call is not None and site.node is not None and not helps(site, proposal):
                continue
            if proposal.name in kinds:
                further.append(proposal)
            else:
                kinds.add(proposal.name)
                yield proposal
        yield from further

    # --- execution ----------------------------------------------------------------------------------------------------------

    def _execute(self, picked: Sequence[Proposal]) -> Outcome:
        self.executions += 1
        self._told(self.executions)
        changes = {node: change for proposal in picked for node, change in proposal.changes.items()}
        careful = {node for proposal in picked if proposal.local and not proposal.moves for node in proposal.changes}
        placeholders = {**self._tensors, **{n: t for proposal in picked for n, t in proposal.placeholders.items()}}
        types = Several([proposal.types for proposal in picked if proposal.types is not None])
        scale = min([proposal.scale for proposal in picked], default=1.0)
        try:
            if self._program.targets.loss is None:
                return self._update(changes, placeholders, types)
            if any(site.node is not None and site.node.phase is Phase.BACKWARD for site in self._sites):
                return self._recorded(changes, placeholders)
            return self._step(changes, placeholders, types, scale, careful)
        except ReplayError as problem:
            return Outcome(finite=False, loss=None, text=problem.got)
        except torch.OutOfMemoryError:
            return Outcome(
                finite=False, loss=None, text="there is not enough memory to execute the step under autograd"
            )
        except RuntimeError as problem:
            return Outcome(
                finite=False, loss=None, text=f"autograd cannot derive the changed step: {problem}".splitlines()[0]
            )

    def _step(
        self, changes: Mapping[int, Change], placeholders: Env, types: Types, scale: float, careful: Collection[int]
    ) -> Outcome:
        """Execute the forward pass under autograd, then the backward pass that follows from it."""
        targets = self._program.targets
        assert targets.loss is not None
        answers = self._decisions.answers(changes)
        wanted = [targets.loss, *targets.buffers.values(), *saved(self._program), *answers]
        stretch = Stretch(self._program, self._forward(wanted), wanted)
        rerun = Rerun(stretch, placeholders, changes, types, careful)
        rerun.forward()
        loss = rerun.env[targets.loss]
        value = float(loss.detach().to(self._program.values[targets.loss].dtype)) + 0.0  # 0 rather than -0
        if not math.isfinite(value):
            return Outcome(finite=False, loss=value, text=f"the loss is still {value:g}")
        gradients = self._named(rerun.gradients(loss, scale))
        if scale != 1:  # they are scaled back before the update
            gradients = {name: (gradient / scale) for name, gradient in gradients.items()}
        problem = self._problem(gradients, rerun)
        if problem:
            return Outcome(finite=False, loss=value, text=f"the loss is {value:.6g}, but {problem}")
        seen = f"loss {value:.6g}, {_all(len(gradients), 'gradient')} finite"
        if gradients:
            seen += f" (norm {norms(gradients.values())[0]:.3g})"
        doubt = self._doubt(rerun)
        return Outcome(finite=not doubt, loss=value, text=f"{seen}, {doubt}" if doubt else seen)

    def _problem(self, gradients: Mapping[str, torch.Tensor], rerun: Rerun) -> str:
        """Say what is wrong with a step whose loss is finite; nothing when nothing is."""
        targets = self._program.targets
        bad = [name for name, gradient in gradients.items() if finite.probe([gradient])]
        if bad:
            return f"the gradient of {bad[0]} is non-finite"
        if rerun.moved:
            return "the change moves healthy results of other calls of the line"
        spoiled = [name for name, number in targets.buffers.items() if self._spoiled(rerun.env[number], number)]
        if spoiled:
            return f"the buffer {spoiled[0]} is non-finite"
        missing = set(targets.gradients) - set(gradients)
        return f"the gradient of {min(missing)} cannot be derived" if missing else ""

    def _doubt(self, rerun: Rerun) -> str:
        """Say what a run under autograd leaves open; nothing when it is the whole step."""
        if rerun.derived:
            return f"if the backward code of {' and '.join(rerun.derived)} does what autograd derives from its forward"
        if self._hooks():
            return "before hooks and Functions of the step that this run leaves out"
        if not self._decisions.stand(rerun.changed, rerun.env):
            return "if the program takes the same way: it decides on a number that the change has changed"
        return ""

    def _hooks(self) -> bool:
        """Whether Python code that this run leaves out can change gradients: noticed while recording, or among the backward calls."""
        program = self._program
        if program.targets.hooked:
            return True
        again = {(node.source, node.target) for node in program.nodes if node.phase is Phase.FORWARD}
        functions = {value.function for value in program.values}
        return any(
            node.phase is Phase.BACKWARD
            and node.source is not None
            and node.autograd not in functions
            and (node.source, node.target) not in again
            for node in program.nodes
        )

    def _recorded(self, changes: Mapping[int, Change], placeholders: Env) -> Outcome:
        """Execute the recorded calls, forward and backward, where the change is one to code that runs in the backward pass."""
        targets = self._program.targets
        assert targets.loss is not None
        wanted = [targets.loss, *targets.gradients.values(), *targets.buffers.values()]
        stretch = Stretch(self._program, self._dependence.slice(wanted), wanted)
        edits = {node: _edit(change) for node, change in changes.items() if stretch.has(node)}
        run = Run(stretch, stretch.start(placeholders), edits)
        run.advance(len(stretch))
        value = float(run.env[targets.loss])
        bad = [name for name, number in targets.gradients.items() if finite.probe([run.env[number]])]
        spoiled = [name for name, number in targets.buffers.items() if self._spoiled(run.env[number], number)]
        if spoiled:
            return Outcome(finite=False, loss=value, text=f"the buffer {spoiled[0]} is still non-finite")
        if bad or not math.isfinite(value):
            what = f"the gradient of {bad[0]} is still non-finite" if bad else f"the loss is {value:g}"
            return Outcome(finite=False, loss=value, text=what)
        return Outcome(
            finite=True, loss=value, text=f"loss {value:.6g}, {_all(len(targets.gradients), 'gradient')} finite"
        )

    def _update(self, changes: Mapping[int, Change], placeholders: Env, types: Types) -> Outcome:
        """Execute the optimizer's step, or one that raised up to what it had looked at."""
        targets = self._program.targets
        results = {**targets.parameters, **targets.optimizer, **targets.buffers}
        wanted = [*results.values(), *targets.values.values()]
        stretch = Stretch(self._program, self._dependence.slice(wanted), wanted)
        rerun = Rerun(stretch, placeholders, changes, types)
        rerun.forward()
        bad = [name for name, number in results.items() if self._spoiled(rerun.env[number], number)]
        if targets.values:
            bad, name = [n for n, v in targets.values.items() if finite.probe([rerun.env[v]])], min(targets.values)
            seen = "still non-finite" if bad else "finite, and the step has not been followed beyond it"
            return Outcome(finite=not bad, loss=None, text=f"the value {name} is {seen}")
        if bad:
            return Outcome(finite=False, loss=None, text=f"{bad[0]} is still non-finite after the update")
        text = f"{_all(len(targets.parameters), 'parameter')} finite after the update"
        return Outcome(finite=True, loss=self._snapshot.loss, text=text)

    def _forward(self, wanted: Sequence[int]) -> list[int]:
        """The calls behind some values, without those of the backward pass."""
        return [i for i in self._dependence.slice(wanted) if self._program.nodes[i].phase is Phase.FORWARD]

    def _named(self, gradients: Env) -> dict[str, torch.Tensor]:
        names = {p.value: p.name for p in self._program.placeholders}
        return {names.get(number, f"value {number}"): gradient for number, gradient in gradients.items()}

    def _spoiled(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether a tensor holds bad values that it did not hold before the step."""
        before = self._tensors.get(number)
        return bool(finite.probe([tensor.detach()])) and not (before is not None and finite.probe([before]))


def _line(site: Site) -> object:
    if site.node is None:
        return site.value
    return (site.node.target, site.node.source) if site.node.source is not None else (site.node.target, site.node.index)


def _rounds(choices: Sequence[Sequence[Proposal]], most: int) -> Iterator[tuple[Proposal | None, ...]]:
    """Yield what to try: each culprit's first choice, then each culprit's second, then mixtures."""
    width = max(map(len, choices))
    ranks = [range(max(1, len(options))) for options in choices]
    straight = [tuple(min(k, len(r) - 1) for r in ranks) for k in range(min(width, EXECUTIONS))]
    mixed = (mix for mix in itertools.product(*[r[:EXECUTIONS] for r in ranks]) if mix not in straight)
    for mix in itertools.islice(itertools.chain(straight, mixed), most):
        yield tuple(options[k] if options else None for options, k in zip(choices, mix, strict=True))


def _edit(change: Change) -> Edit:
    """Return an edit that puts the results of a changed call in the place of the recorded ones."""

    def edit(executed: Executed) -> None:
        node = executed.node
        own = {n: tensor.clone() for n, tensor in executed.inputs.items()}
        take: Callable[[int], torch.Tensor] = own.__getitem__
        result = tensors(
            change(node.target, named(node.target, substitute(node.args, take), substitute(node.kwargs, take)))
        )
        for number, tensor in zip(node.outputs, result, strict=False):
            if number is not None and tensor is not None:
                executed.content[number].copy_(tensor)

    return edit


def _all(count: int, kind: str) -> str:
    return f"the one {kind}" if count == 1 else f"all {count} {kind}s"
