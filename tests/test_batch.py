"""Bad data is named, replaced, dropped or refused, never passed on in silence, and so by the workers of a DataLoader."""

from __future__ import annotations

import logging
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from bisect_nan import FiniteCollate, NonFiniteValues, check_batch

Sample = dict[str, Any]


class Data(Dataset[Sample]):
    """Eight samples; those whose number is among `bad` hold a NaN."""

    def __init__(self, *bad: int) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Sample:
        x = torch.full((3,), float(index))
        if index in self._bad:
            x[1] = math.nan
        return {"x": x, "nested": [{"y": float(index)}], "number": index}


@given(st.lists(st.sampled_from([0.0, 1.5, math.nan, math.inf, -math.inf]), min_size=1, max_size=6))
def test_a_batch_agrees_with_numpy(values: list[float]) -> None:
    """An array in a batch is bad exactly when NumPy says so, as tensor, as array and as numbers."""
    bad = int((~np.isfinite(values)).sum())
    for item in (torch.tensor(values), np.array(values)):
        check = check_batch({"x": [item]})
        assert check.names == (["batch['x'][0]"] if bad else [])
        assert sum(spoiled.values.nonfinite for spoiled in check.bad) == bad
    assert len(check_batch(values).bad) == bad


def test_masks_are_meant() -> None:
    """An additive mask passes, and is left as it is where bad values are replaced."""
    mask = torch.zeros(2, 2).masked_fill(torch.eye(2).bool(), -math.inf)
    batch = {"mask": mask, "x": torch.tensor([math.inf, 1.0])}
    assert check_batch(batch).names == ["batch['x']"]
    made = FiniteCollate(lambda _: batch, on_bad="replace", value=-1.0)([])
    assert made["mask"] is mask
    assert made["x"].tolist() == [-1.0, 1.0]
    assert batch["x"][0] == math.inf


@pytest.mark.parametrize("workers", [0, 2])
def test_raise(workers: int) -> None:
    """The error out of the loader names key and place, with workers and without."""
    loader = DataLoader(Data(5), batch_size=4, num_workers=workers, collate_fn=FiniteCollate())
    with pytest.raises(NonFiniteValues, match=r"batch\['x'\].*nan 1"):
        list(loader)


@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (1, "spawn")])
def test_replace_counts_over_all_processes(workers: int, context: str | None) -> None:
    """What workers replace is counted where the user reads it, and all else comes out as it was."""
    collate = FiniteCollate(on_bad="replace", value=7.0)
    loader = DataLoader(
        Data(1, 2, 6), batch_size=2, num_workers=workers, collate_fn=collate, multiprocessing_context=context
    )
    batches = list(loader)
    assert (collate.batches, collate.values, collate.samples) == (3, 3, 0)
    assert [batch["x"][:, 1].tolist() for batch in batches] == [[0.0, 7.0], [7.0, 3.0], [4.0, 5.0], [7.0, 7.0]]
    assert all(check_batch(batch).ok for batch in batches)


def test_replace_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Each replacement is a warning with the path."""
    collate = FiniteCollate(on_bad="replace")
    with caplog.at_level(logging.WARNING):
        collate([Data(1)[1], Data()[2]])
        collate([Data()[3]])
    (record,) = caplog.records
    assert "batch['x']" in record.getMessage()
    assert record.name == "bisect_nan.prevention.batch"


def test_drop() -> None:
    """Samples with bad values are left out before they are put together, and counted."""
    collate = FiniteCollate(on_bad="drop")
    batches = list(DataLoader(Data(1, 2, 6), batch_size=4, num_workers=2, collate_fn=collate))
    assert [batch["number"].tolist() for batch in batches] == [[0, 3], [4, 5, 7]]
    assert (collate.batches, collate.values, collate.samples) == (2, 0, 3)


def test_masks_of_samples_are_meant() -> None:
    """A sample's mask has one dimension less than that of the batch, and drops no sample."""
    collate = FiniteCollate(on_bad="drop")
    collate([{"mask": torch.tensor([0.0, -math.inf])}, {"mask": torch.tensor([0.0, 0.0])}])
    assert collate.samples == 0


def test_drop_refuses_an_empty_batch() -> None:
    """A batch without any good sample is an error, not an empty batch."""
    with pytest.raises(NonFiniteValues, match=r"sample 0\['x'\]"):
        FiniteCollate(on_bad="drop")([Data(1)[1]])


def test_drop_refuses_what_the_collate_function_spoils() -> None:
    """A value that is bad only in the batch is nobody's sample, and refused."""
    with pytest.raises(NonFiniteValues, match="batch"):
        FiniteCollate(lambda samples: torch.stack(samples) / 0, on_bad="drop")([torch.ones(2)])


def test_odd_layouts_are_replaced() -> None:
    """Values of sparse tensors and of arrays are replaced in their own kind."""
    batch = {"s": torch.tensor([[0.0, math.nan]]).to_sparse(), "a": np.array([math.inf, 2.0])}
    made = FiniteCollate(lambda _: batch, on_bad="replace", value=4.0)([])
    assert made["s"].to_dense().tolist() == [[0.0, 4.0]]
    np.testing.assert_array_equal(made["a"], [4.0, 2.0])


def test_it_can_be_pickled_and_refuses_other_words() -> None:
    """A pickled wrapper works, and a misspelt choice is told at once."""
    assert pickle.loads(pickle.dumps(FiniteCollate()))([Data()[0]])["x"].shape == (1, 3)  # noqa: S301  (our own)
    with pytest.raises(ValueError, match="expected: 'raise', 'replace' or 'drop'"):
        FiniteCollate(on_bad="skip")  # type: ignore[arg-type]
