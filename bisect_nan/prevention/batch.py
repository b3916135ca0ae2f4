"""Bad numbers in the data, told before they reach the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import default_collate

from bisect_nan import finite
from bisect_nan.prevention import nested
from bisect_nan.prevention.check import Check, examine
from bisect_nan.prevention.meant import is_meant

_LOG = logging.getLogger(__name__)

_SLOTS = 1024
"""Counters that all processes share. Each process counts in one of its own, so that none needs a lock."""


def check_batch(batch: Any) -> Check:
    """Name the tensors of a batch that hold NaN or Inf, by their path: `batch['labels'][0]`.

    Additive masks (0 and -Inf, in two dimensions or more) are told apart, in `meant`.

    Args:
        batch: Mappings, lists, tuples and dataclasses of tensors, NumPy arrays and numbers, nested.
    """
    return _check("batch", batch, "input")


def _check(subject: str, tree: Any, kind: str) -> Check:
    return examine(subject, [(kind, path, tensor) for path, tensor in nested.tensors(tree, subject, numbers=True)])


class FiniteCollate:
    """A `collate_fn` that lets no NaN and no Inf pass in silence; to be used in `DataLoader`, with workers or without.

        collate = FiniteCollate(on_bad="replace")
        loader = DataLoader(dataset, batch_size=32, num_workers=4, collate_fn=collate)
        ...
        collate.values, collate.batches, collate.samples

    Whatever is replaced or dropped is logged as a warning of the logger `bisect_nan.prevention.batch`, by the process that does it, and
    counted for all of them together.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any] = default_collate,
        *,
        on_bad: Literal["raise", "replace", "drop"] = "raise",
        value: float = 0.0,
    ) -> None:
        """Wrap a collate function.

        Args:
            collate_fn: Makes a batch of a list of samples.
            on_bad: `raise` NonFiniteValues; `replace` the bad values of the batch by `value`; `drop` samples with bad values before
                they are put together.
            value: What bad values are replaced by.

        Raises:
            ValueError: `on_bad` is none of these.
        """
        if on_bad not in ("raise", "replace", "drop"):
            raise ValueError(f"got on_bad={on_bad!r}\nexpected: 'raise', 'replace' or 'drop'\ndo this: choose one")
        self._collate, self._on_bad, self._value = collate_fn, on_bad, value
        self._counts = torch.zeros(_SLOTS, 3, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def batches(self) -> int:
        """How many batches came out changed."""
        return int(self._counts[:, 0].sum())

    @property
    def values(self) -> int:
        """How many bad values were replaced."""
        return int(self._counts[:, 1].sum())

    @property
    def samples(self) -> int:
        """How many samples were dropped."""
        return int(self._counts[:, 2].sum())

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Make a batch.

        Raises:
            NonFiniteValues: A value is bad and `on_bad` is `raise`, or no sample of the batch is left.
        """
        if self._on_bad == "drop":
            samples = self._kept(samples)
        batch = self._collate(samples)
        check = check_batch(batch)
        if check.ok:
            return batch
        if self._on_bad != "replace":
            check.require("mend or leave out these samples; FiniteCollate(on_bad='replace' or 'drop') goes on without")
        self._count(1, sum(spoiled.values.nonfinite for spoiled in check.bad), 0)
        _LOG.warning("replaced by %g: %s", self._value, check.describe())
        return nested.replaced(batch, self._mended)

    def _kept(self, samples: Sequence[Any]) -> list[Any]:
        """Return the samples whose values are all good."""
        checks = [_check(f"sample {place}", sample, "sample") for place, sample in enumerate(samples)]
        kept = [sample for sample, check in zip(samples, checks, strict=True) if check.ok]
        bad = [check for check in checks if not check.ok]
        if bad and not kept:
            bad[0].require("mend these samples: a batch of which all samples are bad cannot go on without them")
        if bad:
            self._count(1, 0, len(bad))
            _LOG.warning(
                "dropped %d of %d samples: %s", len(bad), len(samples), "; ".join(c.describe() for c in bad[:3])
            )
        return kept

    def _mended(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not finite.probe([tensor]) or is_meant(tensor, "input", ""):
            return None
        bad = finite.mask(tensor)
        if tensor.layout is torch.strided:
            return tensor.masked_fill(bad, self._value)
        return tensor.to_dense().masked_fill(bad, self._value).to_sparse(layout=tensor.layout)

    def _count(self, batches: int, values: int, samples: int) -> None:
        self._counts[os.getpid() % _SLOTS] += torch.tensor([batches, values, samples])
