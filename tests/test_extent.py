"""What the place of bad elements points at."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from observed import LOSS, PARAMETER

from bisect_nan.causes import of_state
from bisect_nan.causes.extent import extent, isolated
from bisect_nan.finding import Phase


def bad(*shape: int, at: tuple[slice | int, ...] = ()) -> torch.Tensor:
    """Make a mask that is true in one place."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[at] = True
    return mask


def test_one_slice_is_named() -> None:
    """Bad elements that share an index are named by it."""
    (note,) = extent(bad(4, 3, 5, at=(slice(None), 2)))
    assert note.startswith("the bad elements all lie in [:, 2, :]")
    assert extent(bad(4, 3, 5, at=(1,)))[0].startswith("the bad elements all lie in [1, :, :]")


def test_everything_points_upstream() -> None:
    """Where every element is bad, no sample is."""
    assert extent(bad(4, 3))[0].startswith("every element is bad")


@given(st.integers(8, 400), st.data())
def test_single_elements_point_at_the_data(size: int, data: st.DataObject) -> None:
    """One element, or a few that share no index, are isolated; never is a large share of them."""
    places = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(places)] = True
    assert isolated(mask) == (len(places) <= 0.05 * size)
    if len(places) == 1:
        assert extent(mask)[0].startswith("one element alone")
    elif len(places) == size:
        assert extent(mask)[0].startswith("every element")
    else:
        assert bool(extent(mask)) == isolated(mask)


def test_only_isolated_inputs_may_be_replaced() -> None:
    """Replacing bad values is advised for single ones of the batch, and for nothing else, gradients least of all."""
    few, many = bad(100, at=(slice(3, 5),)), bad(100, at=(slice(0, 50),))
    assert "nan_to_num" in of_state(Phase.INPUT, "batch['x']", LOSS, few)[1].help
    assert of_state(Phase.INPUT, "batch['x']", LOSS, many)[1].help == ""
    assert of_state(Phase.PARAMETER, "weight", LOSS, few)[1].help == ""
    cause, match = of_state(Phase.INPUT, "gradient of weight", PARAMETER, few)
    assert (cause.name, match.help) == ("gradient_nonfinite_applied", "")


def test_small_tensors_say_nothing() -> None:
    """A share of a handful of elements means nothing."""
    assert extent(bad(3, at=(1,))) == ()
    assert extent(bad(20, at=(slice(0, 0),))) == ()
