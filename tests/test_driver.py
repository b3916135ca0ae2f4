"""The driver: right culprits on random programs, behind every node of real models, and no blame without a reproduced fault."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from fake_faults import KERNEL, places, planted
from hypothesis import HealthCheck, assume, given, settings
from random_programs import Plan, RandomProgram, programs
from torch import nn
from torch.nn import functional

from bisect_nan import Finding, Phase, Snapshot, Verdict, locate
from bisect_nan.errors import SnapshotError
from bisect_nan.finding import SearchCost
from bisect_nan.replaying.reproduce import Pass, walk

FEW = settings(
    max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


def capture(program: RandomProgram) -> Snapshot:
    """Record a random program."""
    model, batch = program.build()
    torch.manual_seed(program.seed)
    return Snapshot.capture(model, batch, program.step())


def named(finding: Finding) -> set[int | str]:
    """Return what the culprits of a finding are called in a random program."""
    return {c.name if c.node < 0 else c.source.line for c in finding.culprits if c.source}


def within_budget(finding: Finding) -> bool:
    """Whether the search kept to one pass and its probes for each culprit or innocent that it had to find."""
    cost: SearchCost = finding.search
    rounds = max(1, len(finding.culprits) + len(finding.innocents))
    probes = 3 * math.ceil(math.log2(cost.nodes)) + 4
    return cost.executed <= cost.nodes * rounds and cost.probes <= probes * rounds


def check(program: RandomProgram, repairs: tuple[float, ...] = oracle.REPAIRS) -> None:
    """Compare a finding with the oracle's answer."""
    verdict = oracle.judge(program, repairs)
    assume(verdict is not None)
    assert verdict is not None
    finding = locate(capture(program), remedies=False)
    if not verdict.symptom:
        assert finding.verdict is Verdict.CLEAN
        return
    assert finding.verdict is Verdict.LOCATED
    culprits = {fault.number: fault.culprit for fault in program.faults}
    assert named(finding) in [{culprits[number] for number in answer} for answer in verdict.answers]
    assert within_budget(finding)
    if len(verdict.answers) == 1:
        numbers = {fault.culprit: fault.number for fault in program.faults}
        for culprit in finding.culprits:
            number = numbers[culprit.name if culprit.node < 0 else culprit.source.line]  # type: ignore[union-attr]
            assert not culprit.samples or culprit.samples == oracle.rows(program, number, verdict)


@FEW
@given(programs(Plan(most=4, length=12, least=1)))
def test_forward_faults(program: RandomProgram) -> None:
    """One or several culprits among innocent faults are found as the oracle finds them, with their rows, within the budget."""
    check(program)


@FEW
@given(programs(Plan(most=3, length=12, least=1, backward=True)))
def test_backward_faults(program: RandomProgram) -> None:
    """The same with faults that only the gradient shows."""
    check(program)


@FEW
@given(programs(Plan(most=3, length=10, least=1, state=True)))
def test_bad_state_and_inputs(program: RandomProgram) -> None:
    """The same with NaN and infinities in the batch and in parameters, which reach the loss or are masked."""
    check(program)


@FEW
@given(programs(Plan(most=3, length=10, least=1, hiding=True, backward=True)))
def test_badness_that_hides_in_finite_values(program: RandomProgram) -> None:
    """The same where an infinity leaves a zero that does the harm."""
    check(program)


@settings(FEW, max_examples=20)
@given(programs(Plan(most=3, length=10, least=1, running=True, backward=True)))
def test_code_that_runs_in_backward_or_again(program: RandomProgram) -> None:
    """The same with faults in hooks, recomputed calls and loops, and with hooks that keep a gradient from spreading."""
    check(program)


@settings(FEW, max_examples=3)
@given(programs(Plan(most=8, length=24, least=8)))
def test_many_masked_faults(program: RandomProgram) -> None:
    """Eight faults in one program, most of them innocent."""
    check(program, oracle.REPAIRS[:1])


@settings(FEW, max_examples=20)
@given(programs(Plan(most=3, length=10, least=1, backward=True)))
def test_scan_and_bisection_agree(program: RandomProgram) -> None:
    """Probing after every call leads to the same culprits as bisection."""
    assume(oracle.judge(program) is not None)
    snapshot = capture(program)
    bisected, scanned = locate(snapshot, remedies=False), locate(snapshot, search="scan", remedies=False)
    assert named(bisected) == named(scanned)
    assert bisected.verdict is scanned.verdict


# --- a fault behind every node of real models -----------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Two convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        first = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.layers = nn.Sequential(*first, *second, nn.Dropout(0.2), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


class Transformer(nn.Module):
    """Two layers with a causal mask of intended infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(ids), nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        result: torch.Tensor = self.head(x)
        return result


class Recurrent(nn.Module):
    """An LSTM of the library, and cells in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell, self.head = nn.LSTM(4, 6, batch_first=True), nn.GRUCell(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, h = self.lstm(x)[0], x.new_zeros(len(x), 5)
        for step in range(states.shape[1]):
            h = self.cell(states[:, step], h)
        result: torch.Tensor = self.head(h)
        return result


def supervised(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A step of classification."""
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def models() -> Iterator[tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the models, each with a batch."""
    torch.manual_seed(0)
    yield Convolutions(), (torch.randn(4, 2, 8, 8), torch.tensor([0, 1, 2, 1]))
    yield Transformer(), (torch.randint(0, 11, (3, 5)), torch.randint(0, 11, (3, 5)))
    yield Recurrent(), (torch.randn(3, 3, 4), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("which", range(3), ids=["convolutions", "transformer", "recurrent"])
@pytest.mark.parametrize("every", [pytest.param(15, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_a_fault_behind_every_node(which: int, every: int) -> None:
    """Wherever a call is added that makes one NaN, forward or backward, exactly that call is named."""
    model, batch = list(models())[which]
    snapshot = Snapshot.capture(model, batch, supervised)
    assert snapshot.observed is None
    shown = 0
    for place, number in places(snapshot)[::every]:
        changed = planted(snapshot, place, number)
        if changed.observed is None:  # what was planted there is selected away
            continue
        shown += 1
        finding = locate(changed, remedies=False)
        assert [culprit.node for culprit in finding.culprits] == [place + 1]
        assert finding.culprits[0].kernel == str(KERNEL)
        assert within_budget(finding)
    assert shown > len(places(snapshot)) / every * 0.8


# --- what must not be blamed ------------------------------------------------------------------------------------------------------


def division(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A step with a division by zero in row 2; that of row 1 is clamped."""
    ratio = (1 + model.weight.square()) / batch["x"]
    return ratio[:2].clamp(max=3).mean() + ratio[2:].mean()


def failing() -> Snapshot:
    """Capture a step that fails."""
    model = nn.Linear(3, 3)
    x = torch.ones(3, 3)
    x[1, 0] = x[2, 1] = 0
    return Snapshot.capture(model, {"x": x}, division)


def test_the_blamed_element_reaches_the_symptom() -> None:
    """One call makes a harmless infinity and the fatal one: element and samples are those of the fatal one."""
    (culprit,) = locate(failing()).culprits
    assert culprit.element == (2, 1)
    assert culprit.samples == (2,)


@pytest.mark.parametrize("turns", [3, 40])
def test_a_loop_is_one_place(turns: int) -> None:
    """A fault that every turn of a loop makes anew is one culprit with the rows of all turns, however many there are."""

    def step(_: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = torch.ones(4)
        for turn in range(turns):
            columns = 1 / (batch["kernel"].T @ rows)
            rows = 1 / (batch["kernel"] @ columns)  # row 3 is empty
            rows = rows / batch["scale"][:, turn % 2]  # row 1 is divided by 0 in the second turn
        return rows.sum()

    batch = {"kernel": torch.rand(4, 4) + 0.1, "scale": torch.ones(4, 2)}
    batch["kernel"][3], batch["scale"][1, 1] = 0, 0
    finding = locate(Snapshot.capture(nn.Identity(), batch, step))
    assert [(c.op, c.samples) for c in finding.culprits] == [
        ("aten.reciprocal.default", (3,)),
        ("aten.div.Tensor", (1,)),
    ]
    assert finding.search.replays < 400


def test_a_fault_behind_another_is_shown_with_healthy_values() -> None:
    """What shows only when an earlier fault is repaired is explained by the values that it has then."""

    def step(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ratio = x / x
        return (ratio * 0 + x).log().sum()

    first, second = locate(Snapshot.capture(nn.Identity(), torch.tensor([0.0, 2.0]), step)).culprits
    assert (first.cause, second.cause) == ("zero_over_zero", "log_of_zero")
    assert second.inputs[0].nan == 0


def test_a_clean_step_blames_nothing() -> None:
    """Nothing non-finite, nothing to find."""
    finding = locate(Snapshot.capture(nn.Linear(2, 2), torch.ones(3, 2), lambda m, x: m(x).mean()))
    assert (finding.verdict, finding.culprits, finding.symptom) == (Verdict.CLEAN, (), None)


def test_another_symptom_is_not_reproduced() -> None:
    """Where the replay shows another value than the recording, nothing is blamed."""
    snapshot = failing()
    assert snapshot.observed is not None
    other = dataclasses.replace(snapshot.observed, tensor=torch.tensor(math.nan))
    finding = locate(dataclasses.replace(snapshot, observed=other))
    assert finding.verdict is Verdict.NOT_REPRODUCED
    assert finding.culprits == ()
    assert finding.search.replays == 3


def test_elsewhere_the_same_elements_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded on another machine, finite values may differ in their last bits; which elements are bad may not."""
    snapshot = Snapshot.capture(nn.Linear(3, 3), torch.ones(2, 3), _bad_gradient)
    observed = snapshot.observed
    assert observed is not None
    assert observed.symptom.kind == "gradient"
    rounded = dataclasses.replace(snapshot, observed=dataclasses.replace(observed, tensor=observed.tensor * 1.0001))
    moved = dataclasses.replace(snapshot, observed=dataclasses.replace(observed, tensor=observed.tensor.roll(1, 0)))
    assert locate(rounded).verdict is Verdict.NOT_REPRODUCED
    monkeypatch.setattr(Snapshot, "differences", lambda _: ("the CPU is another one",))
    assert locate(rounded).verdict is Verdict.LOCATED
    assert locate(moved).verdict is Verdict.NOT_REPRODUCED
    assert locate(rounded).environment == ("the CPU is another one",)


def _bad_gradient(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A root at zero for one row of the weight."""
    scale = torch.tensor([[1.0], [0.0], [1.0]])
    root = (model.weight * scale).square().sum(1).sqrt()
    return root.mean() + model(batch).mean()


@pytest.mark.parametrize(("shows", "verdict"), [((0, 1, 1), Verdict.FLAKY), ((0, 0, 0), Verdict.NOT_REPRODUCED)])
def test_a_replay_that_differs_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, shows: tuple[int, ...], verdict: Verdict
) -> None:
    """A fault that shows only in some replays is called flaky, and nothing is blamed."""
    turns = iter(shows)

    def sometimes(*args: Any, **kwargs: Any) -> Pass:
        done = walk(*args, **kwargs)
        if not next(turns):
            for number in done.run.env:
                done.run.env[number] = torch.zeros_like(done.run.env[number])
        return done

    driver = importlib.import_module("bisect_nan.answer.driver")  # the package's attribute of this name is the function
    monkeypatch.setattr(driver, "walk", sometimes)
    finding = locate(failing())
    assert finding.verdict is verdict
    assert finding.culprits == ()


def test_a_bad_loss_needs_no_backward_pass() -> None:
    """When the loss is non-finite already, the backward pass is not even recorded."""
    snapshot = failing()
    assert all(node.phase is Phase.FORWARD and node.autograd is None for node in snapshot.program.nodes)


def test_the_generator_is_left_alone() -> None:
    """Locating draws random numbers of its own only in private."""
    snapshot = failing()
    before = torch.get_rng_state()
    locate(snapshot)
    assert torch.equal(before, torch.get_rng_state())


def test_progress_is_told() -> None:
    """Long work is announced: stage, how far, how far at most; 0 where nobody knows."""
    told: list[tuple[str, int, int]] = []
    locate(failing(), progress=lambda *stage: told.append(stage))
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == ["replay", "search", "confirm", "explain", "remedy"]
    assert all(0 < at <= most for stage, at, most in told if stage == "replay")
    assert [at for stage, at, _ in told if stage == "remedy"][:1] == [1]


@pytest.mark.parametrize("given", ["crash.safetensors", None, {}])
def test_only_snapshots_are_located(given: Any) -> None:
    """A path, say, is refused with what to do."""
    with pytest.raises(SnapshotError, match=r"expected: a Snapshot\ndo this: .*Snapshot\.load\(path\)"):
        locate(given)
