"""What a call of an ATen overload does besides returning new values: read from its schema and tags, with the known omissions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bisect_nan.recording.program import Ref

_UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

_OVERWRITES = {
    *("copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "log_normal_"),
    *("geometric_", "cauchy_", "_foreach_copy_", "_foreach_zero_"),
}
"""Calls that replace every element that they write to without reading it. `out=` overloads do so, too."""

_STATISTICS = ("running_mean", "running_var")
_UNDECLARED: dict[str, tuple[tuple[str, ...], str]] = {
    "native_batch_norm": (_STATISTICS, "training"),
    "cudnn_batch_norm": (_STATISTICS, "training"),
    "miopen_batch_norm": (_STATISTICS, "training"),
    "batch_norm_update_stats": (_STATISTICS, ""),
    "batch_norm_gather_stats": (_STATISTICS, ""),
    "batch_norm_gather_stats_with_counts": (_STATISTICS, ""),
    "mkldnn_rnn_layer_backward": (("workspace",), ""),
    "_cudnn_rnn": (("dropout_state",), "train"),
    "_cudnn_rnn_backward": (("reserve",), ""),
    "miopen_rnn": (("dropout_state",), "train"),
    "miopen_rnn_backward": (("reserve",), ""),
}
"""Arguments that a call writes to although its schema does not say so, and the flag that it does so under (torch 2.6 to 2.13).

They are the running statistics of batch normalisation, the random state of dropout in cuDNN, and the scratch memory of recurrent
layers. `tests/test_traits.py` looks for others among the CPU's kernels; those of GPUs were read in aten/src/ATen/native and in
tools/autograd/derivatives.yaml, which copies the scratch memory for a second backward pass.
"""

READS = frozenset(getattr(torch.ops.aten, name).default for name in ("_local_scalar_dense", "equal", "allclose"))
"""Calls that give Python a number or a boolean, on which it may decide what to do next: `item()`, `bool(tensor)`, `torch.equal`."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a call of an overload does besides returning new values.

    Attributes:
        written: Where the arguments that it writes to stand: positions, or names of keyword-only arguments.
        flag: Position of the argument that has to be true for it to write anything; None when it always writes.
        random: Whether it draws random numbers.
        uninitialized: Whether it returns memory that nobody has written to.
        overwrites: Whether it replaces every element that it writes to without reading it.
        view: Whether it returns a view of an argument.
        moves: Whether it changes which memory an argument shows, and how (`t_`, `resize_`, `set_`), rather than elements.
    """

    written: tuple[int | str, ...]
    flag: int | None
    random: bool
    uninitialized: bool
    overwrites: bool
    view: bool
    moves: bool

    @classmethod
    def of(cls, target: torch._ops.OpOverload) -> Traits:
        """Read the traits of an overload."""
        schema, tags = target._schema, target.tags  # torch 2.6 to 2.13; OpOverload has no public schema
        declared = [
            argument.name if argument.kwarg_only else place
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        name = schema.name.removeprefix("aten::")
        names = [argument.name for argument in schema.arguments]
        hidden, flag = _UNDECLARED.get(name, ((), ""))
        return cls(
            written=(*declared, *map(names.index, hidden)),
            flag=names.index(flag) if flag else None,
            random=torch.Tag.nondeterministic_seeded in tags,
            uninitialized=name in _UNINITIALIZED,
            overwrites=name in _OVERWRITES or any(isinstance(place, str) for place in declared),
            view=any(made.alias_info is not None and not made.alias_info.is_write for made in schema.returns),
            moves=torch.Tag.inplace_view in tags,
        )

    def writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the value numbers that a call writes to.

        Args:
            args: Its positional arguments as in `Node.args`.
            kwargs: Its keyword arguments likewise.
        """
        if self.flag is not None and not args[self.flag]:
            return ()
        found: list[int] = []
        for place in self.written:
            item = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            if type(item) is Ref:
                found.append(item.value)
            elif isinstance(item, list | tuple):
                found.extend(part.value for part in item if part is not None)
        return tuple(found)
