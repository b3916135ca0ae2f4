"""The search against an exhaustive oracle: what it ends on, and what it may cost."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_nan.search import Answer, Bracket, Outcome, best_pivot, bisect, scan, sections

CLEAN, DIRTY, UNKNOWN = Answer.FINITE, Answer.NONFINITE, Answer.UNKNOWN
SEARCHES = pytest.mark.parametrize("search", [bisect, scan])
Search = Callable[..., Outcome]

ANY_COST = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, math.inf, math.nan, 5e-324, 1.7e308]))
PIVOTS = st.one_of(st.none(), st.floats(1e-6, 0.5))


class Tape:
    """A runner over a list of answers, one a cut, that fails on any breach of the protocol."""

    def __init__(self, answers: Sequence[Answer], bracket: Bracket) -> None:
        self.answers, self.checkpoint, self.bracket = answers, bracket.lo, bracket
        self.asked: list[tuple[int, int]] = []
        self.seen: set[int] = set()

    def run_to(self, cut: int) -> Answer:
        assert max(self.checkpoint, self.bracket.lo) < cut < self.bracket.hi
        assert cut not in self.seen, "the same cut was executed twice"
        self.seen.add(cut)
        self.asked.append((self.checkpoint, cut))
        return self.answers[cut]

    def keep(self, cut: int) -> None:
        assert self.asked[-1][1] == cut
        assert self.answers[cut] is CLEAN
        self.checkpoint = cut


@st.composite
def tapes(draw: st.DrawFn, kinds: Sequence[Answer] = (CLEAN, DIRTY)) -> tuple[list[Answer], Bracket]:
    """Answers for each cut of a program, and a bracket of it that is clean at lo and dirty at hi."""
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    inside = draw(st.lists(st.sampled_from(kinds), max_size=150))
    answers = [CLEAN] * (before + 1) + inside + [DIRTY] * (after + 1)
    return answers, Bracket(before, before + len(inside) + 1)


def monotone(nodes: int, culprit: int) -> list[Answer]:
    """Answers of a program in which node `culprit` makes a value that stays bad."""
    return [CLEAN if cut <= culprit else DIRTY for cut in range(nodes + 1)]


def every_culprit(search: Search, costs: Sequence[float], **options: float | None) -> list[Outcome]:
    """The outcomes for each node as the culprit, all of them right."""
    whole = Bracket(0, len(costs))
    outcomes = []
    for culprit in range(len(costs)):
        outcomes.append(search(Tape(monotone(len(costs), culprit), whole), costs, whole, **options))
        assert outcomes[-1].bracket.node == culprit
    return outcomes


@SEARCHES
@given(tape=tapes(), data=st.data())
def test_ends_on_a_true_birth(search: Search, tape: tuple[list[Answer], Bracket], data: st.DataObject) -> None:
    """Any order of clean and dirty cuts, with any costs, ends on a clean cut next to a dirty one."""
    answers, bracket = tape
    costs = data.draw(st.lists(ANY_COST, min_size=len(answers) - 1, max_size=len(answers) - 1))
    probe_cost, pivot = data.draw(st.floats(0, 1e9)), data.draw(PIVOTS)
    outcome = search(Tape(answers, bracket), costs, bracket, probe_cost=probe_cost, pivot=pivot)
    assert outcome.bracket.node is not None
    assert answers[outcome.bracket.lo] is CLEAN
    assert answers[outcome.bracket.hi] is DIRTY


@SEARCHES
@given(tape=tapes(kinds=(CLEAN, DIRTY, UNKNOWN, UNKNOWN)), pivot=PIVOTS)
def test_unknown_cuts_are_stepped_around(
    search: Search, tape: tuple[list[Answer], Bracket], pivot: float | None
) -> None:
    """The ends stay a clean and a dirty cut, and a bracket stays wide only where nothing inside has an answer."""
    answers, bracket = tape
    outcome = search(Tape(answers, bracket), [1.0] * (len(answers) - 1), bracket, pivot=pivot)
    lo, hi = outcome.bracket.lo, outcome.bracket.hi
    assert answers[lo] is CLEAN
    assert answers[hi] is DIRTY
    assert set(answers[lo + 1 : hi]) <= {UNKNOWN}


def test_a_stretch_of_unknown_cuts_away_from_the_birth_is_left_quickly() -> None:
    """A block of 400 untestable cuts is got around with a few dozen questions, not 400."""
    whole = Bracket(0, 1000)
    answers = monotone(1000, 900)
    answers[300:700] = [UNKNOWN] * 400
    outcome = bisect(Tape(answers, whole), [1.0] * 1000, whole, pivot=0.5)
    assert outcome.bracket == Bracket(900, 901)
    assert sum(answer is UNKNOWN for _, answer in outcome.cuts) < 40


@SEARCHES
@given(tape=tapes(kinds=(CLEAN, DIRTY, UNKNOWN)), data=st.data())
def test_outcome_counts_what_the_runner_did(
    search: Search, tape: tuple[list[Answer], Bracket], data: st.DataObject
) -> None:
    """Probes, executed nodes, cost and cuts are those that the runner saw."""
    answers, bracket = tape
    costs = data.draw(st.lists(st.integers(1, 100), min_size=len(answers) - 1, max_size=len(answers) - 1))
    runner = Tape(answers, bracket)
    outcome = search(runner, costs, bracket, probe_cost=3.0)
    assert outcome.cuts == tuple((cut, answers[cut]) for _, cut in runner.asked)
    assert outcome.probes == len(runner.asked)
    assert outcome.executed == sum(cut - start for start, cut in runner.asked)
    assert outcome.cost == sum(sum(costs[start:cut]) + 3 for start, cut in runner.asked)


@given(tape=tapes(), scale=st.floats(1e-30, 1e30))
def test_halving_of_equal_costs(tape: tuple[list[Answer], Bracket], scale: float) -> None:
    """Equal costs and pivot 1/2 take ceil(log2 N) probes and less than one pass."""
    answers, bracket = tape
    nodes = bracket.hi - bracket.lo
    outcome = bisect(Tape(answers, bracket), [scale] * (len(answers) - 1), bracket, pivot=0.5)
    assert outcome.probes <= math.ceil(math.log2(nodes))
    assert outcome.executed <= nodes - 1


@given(tape=tapes(), data=st.data())
def test_any_pivot_executes_less_than_one_pass(tape: tuple[list[Answer], Bracket], data: st.DataObject) -> None:
    """Costs that differ by a factor of ten execute less than the bracket costs, in whatever order the answers come."""
    answers, bracket = tape
    costs = data.draw(st.lists(st.floats(1, 10), min_size=len(answers) - 1, max_size=len(answers) - 1))
    total = sum(costs[bracket.lo : bracket.hi])
    for pivot in (None, 0.5):
        outcome = bisect(Tape(answers, bracket), costs, bracket, pivot=pivot)
        assert outcome.cost < total


@given(tape=tapes(), data=st.data(), probe_cost=st.floats(0, 1e6), pivot=PIVOTS)
def test_probe_budget(
    tape: tuple[list[Answer], Bracket], data: st.DataObject, probe_cost: float, pivot: float | None
) -> None:
    """No costs and no pivot ask for more than 3 ceil(log2 N) + 4 answers."""
    answers, bracket = tape
    exponents = data.draw(st.lists(st.integers(-300, 300), min_size=len(answers) - 1, max_size=len(answers) - 1))
    costs = [10.0**exponent for exponent in exponents]
    outcome = bisect(Tape(answers, bracket), costs, bracket, probe_cost=probe_cost, pivot=pivot)
    assert outcome.probes <= 3 * math.ceil(math.log2(bracket.hi - bracket.lo)) + 4


@pytest.mark.parametrize("pivot", [None, 0.5, 0.01])
@pytest.mark.parametrize("base", [0.5, 0.9, 1.0, 1.1, 2.0])
def test_geometric_costs_keep_the_budget_and_nearly_one_pass(base: float, pivot: float | None) -> None:
    """Costs that shrink or grow at every node keep the probe budget, and all but tiny pivots stay near one pass."""
    costs = [base**node for node in range(300)]
    outcomes = every_culprit(bisect, costs, pivot=pivot)
    assert max(outcome.probes for outcome in outcomes) <= 3 * 9 + 4
    passes = max(outcome.cost for outcome in outcomes) / sum(costs)
    assert passes <= {0.5: 1 + 9 / 1200, None: 1.05, 0.01: 1.5}[pivot]


def test_one_heavy_node_is_executed_once() -> None:
    """A first node that costs as much as all others is not run again for every probe, as halving by count would."""
    costs = [500.0, *[1.0] * 499]
    outcomes = every_culprit(bisect, costs, pivot=0.5)
    assert max(outcome.cost for outcome in outcomes) < sum(costs)
    assert max(outcome.probes for outcome in outcomes) <= 11


@pytest.mark.parametrize(
    ("probe_cost", "halving", "chosen", "scanned"), [(1, 1.01, 0.62, 1.00), (10, 1.15, 0.82, 5.51)]
)
def test_chosen_pivot_beats_halving_and_scan(probe_cost: float, halving: float, chosen: float, scanned: float) -> None:
    """Over all culprits of 600 equal nodes the chosen pivot costs less than both, in passes of the program."""
    costs = [1.0] * 600
    by_half = fmean(outcome.cost for outcome in every_culprit(bisect, costs, probe_cost=probe_cost, pivot=0.5))
    by_pivot = fmean(outcome.cost for outcome in every_culprit(bisect, costs, probe_cost=probe_cost))
    by_scan = fmean(outcome.cost for outcome in every_culprit(scan, costs, probe_cost=probe_cost))
    assert by_pivot < min(by_half, by_scan)
    assert [by_half / 600, by_pivot / 600, by_scan / 600] == pytest.approx([halving, chosen, scanned], abs=0.006)


def test_free_probes_bring_the_chosen_pivot_to_three_fifths_of_a_pass() -> None:
    """With probes that cost nothing the probe budget alone keeps the search from being a scan."""
    outcomes = every_culprit(bisect, [1.0] * 600, probe_cost=0.0)
    assert fmean(outcome.cost for outcome in outcomes) < 0.61 * 600


@pytest.mark.parametrize(
    ("rho", "x"), [(0.001, 0.015), (0.01, 0.049), (0.1, 0.148), (0.3, 0.232), (1, 0.338), (3, 0.418)]
)
def test_best_pivot_by_the_price_of_probes(rho: float, x: float) -> None:
    """The pivot follows from rho, the cost of log2 N probes per pass, alone."""
    assert best_pivot(600, 600.0, rho * 600 / math.log2(600)) == pytest.approx(x, abs=0.002)


@given(nodes=st.integers(1, 10**6), cost=st.floats(0, 1e300), probe_cost=st.floats(0, 1e300))
def test_best_pivot_is_a_minimum(nodes: int, cost: float, probe_cost: float) -> None:
    """It lies in (0, 1/2] and no other fraction down to one node's share expects less."""

    def expected(x: float) -> float:
        entropy = -x * math.log2(x) - (1 - x) * math.log2(1 - x)
        return cost / (2 * (1 - x)) + probe_cost * math.log2(nodes) / entropy

    best = best_pivot(nodes, cost, probe_cost)
    assert 0 < best <= 0.5
    if nodes > 2:
        others = [max(1 / nodes, step / 100) for step in range(1, 51)]
        assert expected(best) <= min(map(expected, others)) * (1 + 1e-3)


@SEARCHES
def test_one_node_needs_no_probe(search: Search) -> None:
    """A bracket of one node is the answer already."""
    outcome = search(Tape([CLEAN, DIRTY], Bracket(0, 1)), [1.0], Bracket(0, 1))
    assert outcome == Outcome(Bracket(0, 1), 0, 0, 0.0, ())


@SEARCHES
def test_a_bracket_beyond_the_costs_is_refused(search: Search) -> None:
    """A bracket needs a cost for each of its nodes."""
    with pytest.raises(ValueError, match="up to cut 3 and 2 costs"):
        search(Tape([], Bracket(0, 3)), [1.0, 1.0], Bracket(0, 3))


@pytest.mark.parametrize("pivot", [0.0, -0.1, 0.6, math.nan])
def test_a_pivot_outside_its_range_is_refused(pivot: float) -> None:
    """A pivot above 1/2 would lose the bound of one pass."""
    with pytest.raises(ValueError, match=r"expected a fraction in \(0, 1/2\]"):
        bisect(Tape([], Bracket(0, 1)), [1.0], Bracket(0, 1), pivot=pivot)


@pytest.mark.parametrize(("lo", "hi"), [(1, 1), (2, 1), (-1, 1)])
def test_an_empty_bracket_is_refused(lo: int, hi: int) -> None:
    """A bracket holds at least one node."""
    with pytest.raises(ValueError, match="expected 0 <= lo < hi"):
        Bracket(lo, hi)


@given(costs=st.lists(ANY_COST, max_size=60), count=st.integers(0, 80))
def test_sections_are_increasing_interior_cuts(costs: list[float], count: int) -> None:
    """At most count - 1 cuts come back, each inside the program and behind the one before."""
    cuts = sections(costs, count)
    assert len(cuts) <= max(count - 1, 0)
    assert all(0 < cut < len(costs) for cut in cuts)
    assert all(first < second for first, second in pairwise(cuts))


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=60), count=st.integers(1, 20))
def test_sections_have_nearly_equal_costs(costs: list[int], count: int) -> None:
    """No part is dearer than an equal share and one node."""
    ends = [0, *sections(costs, count), len(costs)]
    parts = [sum(costs[start:end]) for start, end in pairwise(ends)]
    assert max(parts) <= sum(costs) / count + max(costs) + 1e-9


def test_sections_of_equal_costs_are_equal() -> None:
    """Twelve equal nodes in four parts are cut at 3, 6 and 9."""
    assert sections([1.0] * 12, 4) == [3, 6, 9]
