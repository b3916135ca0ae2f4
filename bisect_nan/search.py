"""Search of an ordered range of nodes for the one that turns a clean frontier dirty. Knows no torch.

Words: cut k is the position where the first k nodes have run, node i sits between cut i and cut i + 1, and C(a, b) is
the cost of the nodes between cut a and cut b. N is the number of nodes of the bracket and C its cost.

**Invariant.** The frontier is clean at `lo`, where the runner holds a checkpoint, and dirty at `hi`. Running from the
checkpoint to a cut between them and probing there keeps it: a clean answer moves `lo` and the checkpoint up, a dirty
one moves `hi` down. Both ends of the result were probed (or given), so a bracket of one node is a true birth, whether
or not the answers between are monotone.

**Cost rule.** Cut at the largest cut with C(lo, cut) <= x C(lo, hi), or at lo + 1 where the first node alone is
dearer.

**Executed cost.** With x <= 1/2 it stays below one pass: E(T) < T for a bracket of cost T, by induction. Let
a = C(lo, cut). For a <= T/2 a dirty answer costs a + E(a) < 2a <= T and a clean one a + E(T - a) < T. Otherwise the cut
is lo + 1: a dirty answer ends the search at a < T, a clean one is as before. Equal costs and x = 1/2 are plain halving:
ceil(log2 N) probes.

**Pivot.** For equal costs and every culprit as likely, cut x expects the cost C / (2(1 - x)) + p log2(N) / h(x), p the
cost of a probe and h the binary entropy; `best_pivot` minimises it. (Solve E(T) = xT + xE(xT) + (1 - x)E((1 - x)T) with
E = eT, and Q(n) = 1 + xQ(xn) + (1 - x)Q((1 - x)n) for the probes.) x -> 0 is the scan.

**Probes.** At most 3 ceil(log2 N) + 4 answers are asked for, whatever the costs and the pivot. A cut is moved, as
little as possible, to where both sides are at most 2^(left - 1) nodes, which halving can settle with the `left` probes.
For equal costs it never moves beyond the middle. It is rare, for a chosen pivot is at least 1 - n^(-1/left), with which
even a row of clean answers does not use up the probes on n equal nodes. Only where costs span orders of magnitude can a
move make the executed cost exceed one pass; with x = 1/2 by less than C log2(N) / 4N, since 2 ceil(log2 N) + 4 cuts by
cost came before, and every two of those halve what is left.

**No answer.** A cut that answers UNKNOWN is never asked again, others of the bracket are: at distance 1, 2, 4 ... and
then all, the nearest first. These answers, and their execution, come on top of the bounds above. Where the whole inside
of a bracket is UNKNOWN the search ends there; telling that takes an execution up to each of its cuts.

Sources: bisection over a program's lifetime by checkpoint and replay is FReD's (arXiv 1212.5204), there by count;
stepping around what cannot be tested is `git bisect skip`'s.
"""

import enum
import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol


class Answer(enum.Enum):
    """What a probe says about the frontier at a cut; the value is the sentence."""

    FINITE = "Every value alive at this cut that counts is finite."
    NONFINITE = "A value alive at this cut that counts is non-finite."
    UNKNOWN = "This cut cannot be tested."


@dataclass(frozen=True, slots=True)
class Bracket:
    """Two cuts with the birth between them.

    Attributes:
        lo: A cut with a clean frontier.
        hi: A later cut with a dirty frontier.

    Raises:
        ValueError: `hi` is not behind `lo`, or `lo` is negative.
    """

    lo: int
    hi: int

    def __post_init__(self) -> None:
        """Refuse a bracket without a node in it."""
        if not 0 <= self.lo < self.hi:
            message = f"got a bracket of the cuts {self.lo} and {self.hi}; expected 0 <= lo < hi; probe both ends first"
            raise ValueError(message)

    @property
    def node(self) -> int | None:
        """The index of the birth, or None while more than one node is left."""
        return self.lo if self.hi - self.lo == 1 else None


class Runner(Protocol):
    """Executes nodes for the search. It holds one checkpoint, at first at the bracket's `lo`."""

    def run_to(self, cut: int) -> Answer:
        """Execute from the checkpoint to `cut` and probe the frontier there."""
        ...

    def keep(self, cut: int) -> None:
        """Make the state at `cut` the checkpoint; the last `run_to` went there and answered FINITE."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found and what it took.

    Attributes:
        bracket: One node, or more where every cut inside answered UNKNOWN.
        probes: How many cuts were probed.
        executed: How many nodes were executed, repetitions counted.
        cost: What they cost, in the unit of `costs`, plus `probes` times the cost of a probe.
        cuts: The probed cuts and their answers, in order.
    """

    bracket: Bracket
    probes: int
    executed: int
    cost: float
    cuts: tuple[tuple[int, Answer], ...]


def best_pivot(nodes: int, cost: float, probe_cost: float) -> float:
    """Return the fraction of a bracket's cost at which to cut it for the least expected cost.

    Args:
        nodes: Number of nodes in the bracket, taken as equally dear and equally likely to be the culprit.
        cost: Cost of the whole bracket.
        probe_cost: Cost of one probe, in the same unit.

    Returns:
        The x in (0, 1/2] that minimises cost / (2(1 - x)) + probe_cost log2(nodes) / h(x); at least one node's share.
    """
    if nodes <= 2 or cost <= 0:  # noqa: PLR2004  (the only cut of two nodes lies in the middle)
        return 0.5
    weight = max(probe_cost, 0.0) * math.log2(nodes)

    def slope(x: float) -> float:
        entropy = -x * math.log2(x) - (1 - x) * math.log2(1 - x)
        return cost / (2 * (1 - x) ** 2) - weight * math.log2((1 - x) / x) / entropy**2

    low, high = 1 / nodes, 0.5
    if slope(low) >= 0:
        return low
    # Both terms are convex, so the slope has one zero; at 1/2 it is positive.
    while high - low > 1e-4:  # noqa: PLR2004  (finer than any real cost is known)
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return high


def bisect(
    runner: Runner, costs: Sequence[float], bracket: Bracket, *, probe_cost: float = 0.0, pivot: float | None = None
) -> Outcome:
    """Find a birth in a bracket by cutting it by cost; see the module's docstring for the rule and its bounds.

    Args:
        runner: Executes and probes; its checkpoint is at `bracket.lo`.
        costs: Cost of each node of the program, in any unit; one that is not positive and finite counts as the smallest
            one that is.
        bracket: Where to search: clean at `lo`, dirty at `hi`.
        probe_cost: Cost of one probe, in the unit of `costs`.
        pivot: Fraction of the remaining cost at which to cut, in (0, 1/2]; None takes `best_pivot` of the remaining
            bracket at each step.

    Raises:
        ValueError: The bracket reaches beyond `costs`, or the pivot is outside (0, 1/2].
    """
    if pivot is not None and not 0 < pivot <= 0.5:  # noqa: PLR2004
        message = f"got pivot {pivot}; expected a fraction in (0, 1/2]; leave it out to have it chosen"
        raise ValueError(message)
    search = _Search(runner, _prefix_sums(costs, bracket), probe_cost, bracket.lo, bracket.hi)
    budget = 3 * _halvings(bracket.hi - bracket.lo) + 4
    while search.hi - search.lo > 1:
        left = max(budget - search.answered, 1)
        if not search.ask(_around(_wanted(search, left, pivot), search.lo, search.hi)):
            break
    return search.outcome()


def scan(
    runner: Runner,
    costs: Sequence[float],
    bracket: Bracket,
    *,
    probe_cost: float = 0.0,
    pivot: float | None = None,  # noqa: ARG001  (one signature for both searches)
) -> Outcome:
    """Find the first birth in a bracket by probing after every node; arguments and errors as in `bisect`.

    The oracle of the tests, and the search to use where `bisect`'s invariant cannot be kept.
    """
    search = _Search(runner, _prefix_sums(costs, bracket), probe_cost, bracket.lo, bracket.hi)
    while search.hi - search.lo > 1 and search.ask(range(search.lo + 1, search.hi)):
        pass
    return search.outcome()


def sections(costs: Sequence[float], count: int) -> list[int]:
    """Return the cuts that divide a program into parts of nearly equal cost, for a pass that leaves checkpoints.

    Args:
        costs: Cost of each node, treated as in `bisect`.
        count: The number of parts wanted.

    Returns:
        At most `count` - 1 cuts, increasing, between 1 and len(costs) - 1; fewer where one node is dearer than a part.
    """
    if len(costs) <= 1:
        return []
    prefix = _prefix_sums(costs, Bracket(0, len(costs)))
    cuts = []
    for part in range(1, count):
        goal = prefix[-1] * (part / count)
        above = bisect_left(prefix, goal)
        cuts.append(above - (goal - prefix[above - 1] < prefix[above] - goal))
    return sorted(set(cuts) & set(range(1, len(costs))))


@dataclass(slots=True)
class _Search:
    """The state of a running search: the ends, what was asked, and what it took."""

    runner: Runner
    prefix: list[float]
    probe_cost: float
    lo: int
    hi: int
    executed: int = 0
    cost: float = 0.0
    cuts: list[tuple[int, Answer]] = field(default_factory=list)
    unknown: set[int] = field(default_factory=set)

    @property
    def answered(self) -> int:
        return len(self.cuts) - len(self.unknown)

    def ask(self, wanted: Iterable[int]) -> bool:
        """Move an end to the first of the wanted cuts that has an answer; False if none has."""
        for cut in wanted:
            if cut in self.unknown:
                continue
            answer = self.runner.run_to(cut)
            self.cuts.append((cut, answer))
            self.executed += cut - self.lo
            self.cost += self.prefix[cut] - self.prefix[self.lo] + self.probe_cost
            if answer is Answer.FINITE:
                self.runner.keep(cut)
                self.lo = cut
                return True
            if answer is Answer.NONFINITE:
                self.hi = cut
                return True
            self.unknown.add(cut)
        return False

    def outcome(self) -> Outcome:
        return Outcome(Bracket(self.lo, self.hi), len(self.cuts), self.executed, self.cost, tuple(self.cuts))


def _wanted(search: _Search, left: int, pivot: float | None) -> int:
    """Return the cut that the cost rule names, moved as far as the `left` probes demand."""
    lo, hi, prefix = search.lo, search.hi, search.prefix
    nodes, cost = hi - lo, prefix[hi] - prefix[lo]
    if pivot is None:
        pivot = min(max(best_pivot(nodes, cost, search.probe_cost), 1 - nodes ** (-1 / left)), 0.5)
    # The sums are rounded: without a little slack the exact middle of equal costs is missed.
    cut = bisect_right(prefix, prefix[lo] + (pivot + 1e-9) * cost, lo, hi) - 1
    room = 1 << (left - 1)
    return min(max(cut, lo + 1, hi - room), lo + room, hi - 1)


def _around(wanted: int, lo: int, hi: int) -> Iterator[int]:
    """Yield `wanted`, cuts at doubling distances from it, then all between the ends, the nearest and cheaper first."""
    yield wanted
    for power in range((hi - lo).bit_length()):
        yield from (cut for cut in (wanted - (1 << power), wanted + (1 << power)) if lo < cut < hi)
    yield from sorted(range(lo + 1, hi), key=lambda cut: abs(cut - wanted))


def _halvings(nodes: int) -> int:
    """Return ceil(log2(nodes))."""
    return (nodes - 1).bit_length()


def _prefix_sums(costs: Sequence[float], bracket: Bracket) -> list[float]:
    """Return C(0, k) for every cut k, strictly increasing up to rounding, and finite."""
    if bracket.hi > len(costs):
        message = f"got a bracket up to cut {bracket.hi} and {len(costs)} costs; expected one cost for each node"
        raise ValueError(message)
    largest = sys.float_info.max / (2 * len(costs))
    usable = [min(cost, largest) for cost in costs if 0 < cost < math.inf]
    smallest = min(usable, default=1.0)
    return [0.0, *accumulate(min(cost, largest) if 0 < cost < math.inf else smallest for cost in costs)]
