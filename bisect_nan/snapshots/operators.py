"""Which operators a snapshot may name, and what their arguments may be.

A file names operators by text (`aten.mm.default`). A name is looked up in `torch.ops` only, never imported, and only overloads
that follow these rules are called:

- From torch itself the namespaces `aten` and `prims` (forward-mode derivatives decompose into these), without the operators in
  `_REFUSED`. The other ones hold collectives (`c10d`), prepacked kernels (`quantized`, `mkldnn`), tracing and test helpers.
- From other libraries what the running process has registered already: nothing is loaded for a file.
- Arguments are tensors, numbers, booleans, generators, devices, dtypes, layouts and memory formats, and lists of those. This
  rules out whatever takes a storage, a stream, a script object or a process group.
- Text is the only way to name a file or a process, so texts are allowed only for `aten` arguments that are known to select a
  variant (`rounding_mode`, `reduce` ...), and never for other libraries.

What is left computes tensors from tensors. It is no sandbox for faults of torch's kernels, some of which crash on hostile values:
run files of strangers in a process of their own, as the command line does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any

import torch

from bisect_nan.errors import SnapshotError
from bisect_nan.recording.program import GeneratorRef, Ref
from bisect_nan.strict_json import shown

_NAME = re.compile(r"([A-Za-z][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")

_ALLOWED = ("aten", "prims")

_TORCH = re.compile(
    r"prim|debugprims|rngprims|higher_order|inductor(_prims)?|static_runtime|export|profiler|debug_mode_ops|_test|_native"
    r"|_?quantized|quantization|sparse|mkl|mkldnn(_prepacked)?|onednn|xnnpack|prepacked|fbgemm|onnx(_symbolic)?"
    r"|_?c10d.*|symm_mem|_dtensor|rpc|dist_autograd|fsdp|streams|bucketing|cuda|cudnn|mps|metal|vulkan|image"
)
"""Further namespaces of torch (2.6 to 2.13), and `image` of torchvision, whose operators read and write files."""

_REFUSED = re.compile(
    r"from_file|set|set_|set_data|_?pin_memory|record_stream"  # files, foreign storages, page-locked memory, streams
    r"|resize.*|_resize_.*|_copy_from.*|_reshape_alias(_copy)?|_nested_view_from_buffer(_copy)?"  # geometry that nobody checks
    r"|_sparse_.*_tensor_unsafe|_lazy_clone|_propagate_xla_data|_has_compatible_shallow_copy_type"
    r"|_backward|retain_grad|requires_grad_|_make_dual.*|_fw_primal.*|_unpack_dual|_(add|remove)_batch_dim"  # autograd's
    r"|_cufft_.*|_print|_make_token|_sink_tokens|_foobar|_test_.*|get_gradients"  # state of the process
)

_TEXTS = re.compile(
    "approximate|rounding_mode|reduce|mode|pad_mode|padding|padding_side|interpolation|indexing|ord|p|norm|driver|UPLO|side|equation"
    "|activation|algorithm|assert_msg|api_name"
)
"""Text arguments of `aten` that select a variant, or are shown in an error."""

_KINDS: Mapping[str, tuple[type, ...]] = {
    # torch passes Python numbers, and None for an undefined tensor
    "Tensor": (Ref, bool, int, float, complex, NoneType),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "number": (bool, int, float, complex),
    "str": (str,),
    "Device": (torch.device,),
    "ScalarType": (torch.dtype,),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
    "Generator": (GeneratorRef,),
}
"""What a recorded argument of each schema type can be."""

_DO = "call locate(snapshot) in the process that recorded the step; a file cannot carry this call"


@dataclass(frozen=True, slots=True)
class Signature:
    """What an operator takes and returns, read once from its schema.

    Attributes:
        names: Its arguments, in order.
        types: Their types, as text.
        plain: Python types that need no second look, by argument.
        positional: How many arguments can be passed by position.
        required: Which arguments have no default.
        results: How many tensors it returns; None when that depends on the arguments.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]
    plain: tuple[frozenset[type], ...]
    positional: int
    required: tuple[bool, ...]
    results: int | None

    def misfit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, object, str] | None:
        """Return what is wrong with recorded arguments: the place, what was got, what was expected; None when they fit.

        Only types and counts are looked at; integers have to fit into 64 bits.
        """
        if len(args) > self.positional:
            return "arguments", len(args), f"at most {self.positional} by position"
        for position, item in enumerate(args):
            if type(item) not in self.plain[position] and not _fits(item, self.types[position]):
                return f"argument {position}", item, f"a {self.types[position]} for {self.names[position]}"
        for name, item in kwargs.items():
            position = self.names.index(name) if name in self.names else -1
            if position < len(args):
                return f"argument {shown(name)}", item, "an argument of the operator, once"
            if not _fits(item, self.types[position]):
                return f"argument {name}", item, f"a {self.types[position]}"
        for position in range(len(args), len(self.names)):
            if self.required[position] and self.names[position] not in kwargs:
                return f"argument {self.names[position]}", "nothing", f"a {self.types[position]}"
        return None


@cache
def signature(target: torch._ops.OpOverload) -> Signature:
    """Return what an operator takes and returns."""
    schema = target._schema  # torch 2.6 to 2.13; OpOverload has no public schema
    types = tuple([str(argument.real_type) for argument in schema.arguments])
    bases = [_KINDS.get(kind.removeprefix("Optional[").removesuffix("]"), ()) for kind in types]
    returned = [str(item.type) for item in schema.returns]
    return Signature(
        names=tuple([argument.name for argument in schema.arguments]),
        types=types,
        plain=tuple([frozenset(base) - {int, NoneType} for base in bases]),
        positional=sum(not argument.kwarg_only for argument in schema.arguments),
        required=tuple([not argument.has_default_value() for argument in schema.arguments]),
        results=None if any("[" in kind for kind in returned) else returned.count("Tensor"),
    )


def _fits(item: Any, kind: str) -> bool:
    if kind.startswith("Optional["):
        return item is None or _fits(item, kind[len("Optional[") : -1])
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return isinstance(item, list | tuple) and all(_fits(part, inner) for part in item)
    if type(item) is int:
        return int in _KINDS[kind] and -(2**63) <= item < 2**63
    return type(item) in _KINDS[kind]


@cache
def resolve(name: str) -> torch._ops.OpOverload:
    """Return the operator that a file names.

    Args:
        name: `namespace.operator.overload`, as `str` of an overload gives it.

    Raises:
        SnapshotError: The name has another form, does not exist here, or is not allowed.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise SnapshotError(f"got the operator {shown(name)}", "namespace.operator.overload", _DO)
    namespace, operator, overload = match.groups()
    if _TORCH.fullmatch(namespace):
        raise SnapshotError(f"got the operator {name}", f"an operator of aten, not of {namespace}", _DO)
    if namespace in _ALLOWED and _REFUSED.fullmatch(operator):
        raise SnapshotError(f"got the operator {name}", "one that computes tensors from tensors and nothing else", _DO)
    packet = getattr(getattr(torch.ops, namespace, None), operator, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or overload not in packet.overloads():  # type: ignore[no-untyped-call]
        do = "open it with the release of torch that recorded it"
        do = (
            do
            if namespace in _ALLOWED
            else f"import the library that has the operators {namespace}.*, then load the file"
        )
        raise SnapshotError(f"got the operator {name}, which this process does not have", "a registered operator", do)
    target: torch._ops.OpOverload = getattr(packet, overload)
    kinds = signature(target)
    for argument, kind in zip(kinds.names, kinds.types, strict=True):
        base = re.sub(r"Optional\[|List\[|\]", "", kind)
        if base not in _KINDS or (base == "str" and (namespace != "aten" or not _TEXTS.fullmatch(argument))):
            got = f"got the operator {name}, whose argument {argument} is a {kind}"
            raise SnapshotError(got, "tensors, numbers and names of variants", _DO)
    return target
