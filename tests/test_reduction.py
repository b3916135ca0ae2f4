"""Delta debugging keeps what fails, and nothing that can be left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bisect_nan.reproduction.reduction import ddmin


@given(size=st.integers(1, 60), data=st.data())
def test_what_is_needed_is_found(size: int, data: st.DataObject) -> None:
    """Where a set of items fails whenever it is complete, that set is left, in its order."""
    needed = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    assert ddmin(range(size), lambda part: needed <= {*part}) == sorted(needed)


@given(st.integers(2, 40), st.integers(1, 5))
def test_no_single_item_can_be_left_out(size: int, least: int) -> None:
    """Where many parts fail, one is left that fails and that fails no more without any of its items."""

    def fails(part: list[int]) -> bool:
        return sum(item % 2 == 0 for item in part) >= min(least, (size + 1) // 2)

    kept = ddmin(range(size), fails)
    assert fails(kept)
    assert len(kept) == 1 or not any(fails([other for other in kept if other != item]) for item in kept)


def test_the_number_of_runs_is_bounded() -> None:
    """One item of a thousand takes about two runs for each halving."""
    asked = []

    def fails(part: list[int]) -> bool:
        asked.append(part)
        return 617 in part

    assert ddmin(range(1000), fails) == [617]
    assert len(asked) <= 2 * 10
