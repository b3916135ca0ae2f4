"""What non-finite means: its kinds, the probe that looks for them, and summaries of tensors.

Nothing else tests finiteness.

A tensor's *values* are what is looked at: real and imaginary parts of complex tensors, stored values of sparse and
nested ones, float8 as float32. Integers, bools, float4 (which has no NaN and no infinity), empty and meta tensors hold
nothing non-finite.

No check here does arithmetic on values, so none can overflow into a false alarm. `torch.aminmax` propagates NaN to both
of its results and reads memory at its bandwidth (64 MiB of float32 in 2.4 ms on two cores, where `isfinite().all()`
takes 137 ms), but only over contiguous memory; see `extremes`.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor


class NonFinite(enum.Flag):
    """Kinds of non-finite value; `NonFinite(0)` is none."""

    NAN = enum.auto()
    POS_INF = enum.auto()
    NEG_INF = enum.auto()
    INF = POS_INF | NEG_INF
    ANY = NAN | INF


_NONE = NonFinite(0)
_LABELS = {NonFinite.NAN: "nan", NonFinite.POS_INF: "+inf", NonFinite.NEG_INF: "-inf"}
_SHORTER = (("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"))


def labels(flags: NonFinite) -> list[str]:
    """Return the kinds as the words of reports: `nan`, `+inf`, `-inf`, in this order."""
    return [label for kind, label in _LABELS.items() if kind in flags]


def probe(tensors: Iterable[Tensor]) -> NonFinite:
    """Return the kinds of non-finite value in any of the tensors, with one synchronisation per device.

    Exact about NaN, and exact about infinities in tensors without NaN: a NaN hides the infinities of its own tensor.
    Use `has` or `kinds` where those matter.

    Args:
        tensors: Any shapes, dtypes, layouts and devices.
    """
    found = _NONE
    for flags in _flags(tensors):
        found |= flags
    return found


def has(tensors: Iterable[Tensor], which: NonFinite) -> bool:
    """Tell exactly whether any of the tensors holds a value of one of the kinds.

    As fast as `probe`, except for tensors with a NaN when only infinities are asked for.
    """
    tensors = list(tensors)
    found = _flags(tensors)
    if any(flags & which for flags in found):
        return True
    return any(kinds(tensor) & which for tensor, flags in zip(tensors, found, strict=True) if NonFinite.NAN in flags)


def kinds(tensor: Tensor) -> NonFinite:
    """Return exactly the kinds of non-finite value in one tensor."""
    (found,) = _flags([tensor])
    values = _values(tensor)
    if NonFinite.NAN not in found or values is None:
        return found
    for kind in (NonFinite.POS_INF, NonFinite.NEG_INF):
        if _where(values, kind).any():
            found |= kind
    return found


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value in a tensor of real numbers: NaN where it holds one, 0 where it is empty."""
    values = _values(tensor)
    if values is None:
        return 0.0
    low, high = (float(end) for end in extremes(values))
    return high if high != high else max(-low, high)  # noqa: PLR0124  (only NaN differs from itself)


def mask(tensor: Tensor, which: NonFinite = NonFinite.ANY) -> Tensor:
    """Return where the tensor's elements are of one of the kinds.

    Args:
        tensor: Any dtype. A sparse tensor is made dense, a nested one is replaced by its packed values.
        which: The kinds to look for.

    Returns:
        Bool tensor of the same shape and device; a complex element is marked when either of its parts is of the kind.
    """
    tensor = _dense(tensor)
    values = _values(tensor)
    if values is None or not _flags([tensor])[0] & (which | NonFinite.NAN):  # to look first takes a tenth of the time
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    bad = _where(values, which)
    return bad.any(-1) if tensor.is_complex() else bad


def with_kernels(tensor: Tensor) -> Tensor:
    """Return a floating tensor in a type that torch can compare and clip: float8 as float32, any other as it is."""
    return tensor.float() if tensor.itemsize == 1 else tensor


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors agree in shape, dtype, layout and every bit, NaN payloads and signed zeros included.

    Strides and devices may differ. Meta tensors have no bits to differ in.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout == torch.sparse_coo:
        # The public accessors refuse uncoalesced tensors, as sparse gradients are.
        return same(a._indices(), b._indices()) and same(a._values(), b._values())
    if a.is_meta or b.is_meta or a.numel() == 0:
        return a.is_meta == b.is_meta
    return torch.equal(_bits(_dense(a)), _bits(_dense(b)).to(a.device))


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """What a report says about a tensor. The parts of complex values are counted and compared one by one.

    Attributes:
        name: What the tensor is called where it was seen; may be empty.
        dtype: Short form: `f32`, `bf16`, `i64`, `bool`, `c64` ...
        shape: Its sizes.
        nan: How many values are NaN.
        pos_inf: How many are +Inf.
        neg_inf: How many are -Inf.
        low: The smallest finite value, or None if there is none.
        high: The largest finite value, or None if there is none.
        first: Index of the first non-finite element in row-major order, or None if there is none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    low: float | None = None
    high: float | None = None
    first: tuple[int, ...] | None = None

    @property
    def nonfinite(self) -> int:
        """How many values are not finite."""
        return self.nan + self.pos_inf + self.neg_inf

    @property
    def numel(self) -> int:
        """How many elements the tensor has."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def describe(self) -> str:
        """Return one line without the name: `f32[2, 5, 5]  -inf 25  finite [-1.9, 2.3]`."""
        parts = [f"{self.dtype}{list(self.shape)}"]
        counts = {"nan": self.nan, "+inf": self.pos_inf, "-inf": self.neg_inf}
        parts += [f"{label} {count}" for label, count in counts.items() if count]
        if self.low is not None and self.high is not None:
            word = "finite" if self.dtype.startswith(("f", "bf", "c")) else "range"
            parts.append(f"{word} [{self.low:.5g}, {self.high:.5g}]")
        return "  ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: numbers, strings and lists, all finite."""
        data = asdict(self)
        return {**data, "shape": list(self.shape), "first": None if self.first is None else list(self.first)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the JSON form back."""
        first = data["first"]
        return cls(**{**data, "shape": tuple(data["shape"]), "first": None if first is None else tuple(first)})


@torch.no_grad()
def summarise(tensor: Tensor, name: str = "") -> TensorSummary:
    """Count a tensor's non-finite values and find the range of the finite ones; sparse and nested as in `mask`."""
    tensor = _dense(tensor)
    dtype, shape = _short_name(tensor.dtype), tuple(tensor.shape)
    values = _values(tensor)
    if values is None:
        low, high = _integer_range(tensor)
        return TensorSummary(name, dtype, shape, low=low, high=high)
    found = kinds(tensor)
    if not found:
        low, high = (end.item() for end in extremes(values))
        return TensorSummary(name, dtype, shape, low=low, high=high)
    nan, pos_inf, neg_inf = (int(_where(values, kind).sum()) if kind in found else 0 for kind in _LABELS)
    bad = _where(values, NonFinite.ANY)
    low, high = (
        values.masked_fill(bad, float("inf")).amin().item(),
        values.masked_fill(bad, float("-inf")).amax().item(),
    )
    if low > high:
        low = high = None
    marked = bad.any(-1) if tensor.is_complex() else bad
    # argmax returns the first of equal maxima, and has no bool kernel; torch.unravel_index would import half of torch.
    flat, first = int(marked.flatten().to(torch.uint8).argmax()), tuple[int, ...]()
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        first = (index, *first)
    return TensorSummary(name, dtype, shape, nan, pos_inf, neg_inf, low, high, first)


def _flags(tensors: Iterable[Tensor]) -> list[NonFinite]:
    """Return the kinds in each tensor, exact but for infinities beside a NaN."""
    ends, count = dict[torch.device, list[tuple[int, Tensor, Tensor]]](), 0
    with torch.no_grad():
        for tensor in tensors:
            values = _values(tensor)
            if values is not None:
                ends.setdefault(values.device, []).append((count, *extremes(values)))
            count += 1
    found = [_NONE] * count
    for device, group in ends.items():
        flat = [end for _, *both in group for end in both]
        # The CPU needs no synchronisation, and gathering there takes longer than reading one by one.
        read = [end.item() for end in flat] if device.type == "cpu" else torch.stack(flat).tolist()
        for (index, *_), low, high in zip(group, read[::2], read[1::2], strict=True):
            found[index] = _kinds_between(low, high)
    return found


def _kinds_between(low: float, high: float) -> NonFinite:
    if low != low:  # noqa: PLR0124  (only NaN differs from itself)
        return NonFinite.NAN
    flags = NonFinite.POS_INF if high == float("inf") else _NONE
    return flags | NonFinite.NEG_INF if low == float("-inf") else flags


def _values(tensor: Tensor) -> Tensor | None:
    """Return the values to look at as a non-empty real strided tensor of a dtype with kernels, or None for none."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return None
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()  # as in `same`
    elif tensor.layout != torch.strided or tensor.is_nested:
        tensor = tensor.to_dense() if tensor.is_mkldnn else tensor.values()
    if tensor.numel() == 0 or tensor.dtype == torch.float4_e2m1fn_x2:
        return None
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return with_kernels(tensor)


def _dense(tensor: Tensor) -> Tensor:
    if tensor.is_nested:
        return tensor.values()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum, both NaN where a value is; the fastest way for the memory layout.

    Measured on two cores over 64 MiB of float32: a transposed matrix takes 62 ms as it is and 2.7 ms with its
    dimensions in the order of memory; rows with gaps (`x[:, :-1]`) 45 ms by aminmax and 5 ms by amin and amax, which
    win only on rows.
    """
    if values.numel() > 4096 and not values.is_contiguous():  # noqa: PLR2004  (below it is the calls that cost)
        for dim in reversed(range(values.dim())):
            if values.stride(dim) == 0:  # an expanded dimension repeats itself
                values = values.select(dim, 0)
        values = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))
        rows = values.is_cpu and values.dim() > 0 and values.stride(-1) == 1 and values.size(-1) >= 64  # noqa: PLR2004
        if rows and not values.is_contiguous():
            return values.amin(), values.amax()
    low, high = torch.aminmax(values)
    return low, high


def _where(values: Tensor, which: NonFinite) -> Tensor:
    """Return where real values are of one of the kinds."""
    if which == NonFinite.ANY:
        return (values.abs() < float("inf")).logical_not_()
    bad = values.isnan() if NonFinite.NAN in which else torch.zeros_like(values, dtype=torch.bool)
    if NonFinite.POS_INF in which:
        bad |= values == float("inf")
    if NonFinite.NEG_INF in which:
        bad |= values == float("-inf")
    return bad


def _short_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    for long, short in _SHORTER:
        name = name.replace(long, short)
    return name


def _integer_range(tensor: Tensor) -> tuple[float | None, float | None]:
    real = tensor.is_floating_point() or tensor.is_complex()
    if real or tensor.is_meta or tensor.is_quantized or tensor.numel() == 0:
        return None, None
    # Unsigned types have no aminmax; float64 holds every uint64, rounded.
    low, high = torch.aminmax(tensor.to(torch.float64 if tensor.dtype == torch.uint64 else torch.int64))
    return float(low), float(high)


def _bits(tensor: Tensor) -> Tensor:
    """Return a non-empty strided tensor's memory as integers."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).flatten()
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
