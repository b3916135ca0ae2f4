"""ATen calls as calls of torch's public functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from bisect_nan.causes.evidence import base_name
from bisect_nan.recording.program import Arguments, Node, named
from bisect_nan.reproduction.draft import Form

Spelled = tuple[Form, tuple[Any, ...], Mapping[str, Any]]
"""A way to call, positional arguments, keyword arguments."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REDUCTIONS = ("none", "mean", "sum")
_LIST = "_foreach_"

_HOMES = (
    ("", "torch"),
    ("", "torch.nn.functional"),
    ("special_", "torch.special"),
    ("linalg_", "torch.linalg"),
    ("fft_", "torch.fft"),
)
"""Prefix of an operator's name, and where the public function of that name is."""

_PUBLIC: Mapping[str, tuple[str, str]] = {
    "_softmax": ("torch.softmax", "self dim"),
    "_log_softmax": ("torch.log_softmax", "self dim"),
    "native_layer_norm": ("torch.nn.functional.layer_norm", "input normalized_shape weight bias eps"),
    "native_group_norm": ("torch.nn.functional.group_norm", "input group weight bias eps"),
    "native_batch_norm": (
        "torch.nn.functional.batch_norm",
        "input running_mean running_var weight bias training momentum eps",
    ),
    "embedding": ("torch.nn.functional.embedding", "indices weight"),
    "_unsafe_view": ("torch.reshape", "self size"),
    "view": ("torch.reshape", "self size"),
    "_linalg_svd": ("torch.linalg.svd", "A full_matrices"),
    "_linalg_eigh": ("torch.linalg.eigh", "A UPLO"),
    "_linalg_slogdet": ("torch.linalg.slogdet", "A"),
    "_linalg_det": ("torch.linalg.det", "A"),
    "_linalg_solve_ex": ("torch.linalg.solve", "A B"),
    "linalg_inv_ex": ("torch.linalg.inv", "A"),
    "linalg_cholesky_ex": ("torch.linalg.cholesky", "self"),
    "_cdist_forward": ("torch.cdist", "x1 x2 p"),
    "_ctc_loss": (
        "torch.nn.functional.ctc_loss",
        "log_probs targets input_lengths target_lengths blank reduction:reduction zero_infinity:zero_infinity",
    ),
    "nll_loss_forward": (
        "torch.nn.functional.nll_loss",
        "self target weight:weight ignore_index:ignore_index reduction:reduction",
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "torch.nn.functional.scaled_dot_product_attention",
        "query key value attn_mask is_causal:is_causal scale:scale",
    ),
    "_to_copy": (".to", "self dtype"),
    **{
        loss: (f"torch.nn.functional.{loss}", "self target reduction:reduction")
        for loss in ("mse_loss", "soft_margin_loss", "l1_loss")
    },
    **{
        loss: (f"torch.nn.functional.{loss}", "self target weight:weight reduction:reduction")
        for loss in ("binary_cross_entropy", "binary_cross_entropy_with_logits")
    },
    "smooth_l1_loss": ("torch.nn.functional.smooth_l1_loss", "self target reduction:reduction beta:beta"),
    "huber_loss": ("torch.nn.functional.huber_loss", "self target reduction:reduction delta:delta"),
}
"""Public functions that take other arguments than their operator: positional ones, then `keyword:argument`."""


def is_list(node: Node) -> bool:
    """Whether a call does the same to each member of lists (`_foreach_sqrt`)."""
    return base_name(str(node.target)).startswith(_LIST)


def member(
    node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of one member of a call on lists; those of any other call as they are."""
    if not is_list(node):
        return args, dict(kwargs)

    def own(item: Any) -> Any:
        return item[place] if isinstance(item, list | tuple) and place < len(item) else item

    return tuple(own(item) for item in args), {key: own(item) for key, item in kwargs.items()}


def spellings(node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Spelled]:
    """Yield ways to write a call without its writing to anything, the most readable first.

    Args:
        node: The call.
        args: Its positional arguments, variables in the place of tensors.
        kwargs: Its keyword arguments.
    """
    space, base, variant = str(node.target).split(".", 2)
    schema = node.target._schema.arguments
    if space != "aten" or not {*kwargs}.issubset(argument.name for argument in schema):
        return
    name = base.removesuffix("_").removeprefix(_LIST)
    outs = {argument.name for argument in schema if argument.is_out}
    kwargs = {key: item for key, item in kwargs.items() if key not in outs and item not in _USUAL.get(key, ())}
    known = named(node.target, args, kwargs)
    if name in _PUBLIC:
        spelled = _published(*_PUBLIC[name], known)
        if spelled is not None:
            yield spelled
    for prefix, home in _HOMES:
        short = name.removeprefix(prefix)
        if (prefix == "" or short != name) and not short.startswith("_") and callable(_found(f"{home}.{short}")):
            yield Form(f"{home}.{short}"), args, kwargs
    if args and not name.startswith("_") and hasattr(torch.Tensor, name):
        yield Form(name, method=True), args, kwargs
    for path in (f"torch.ops.aten.{name}.{variant}", f"torch.ops.aten.{name}"):
        if all(_NAME.fullmatch(part) for part in path.split(".")) and _found(path) is not None:
            yield Form(path), args, kwargs


def in_place(node: Node) -> Form | None:
    """Return how a call is written that writes to its first argument; None for a call that does not."""
    name = base_name(str(node.target)).removeprefix(_LIST) + "_"
    return Form(name, method=True) if node.written and hasattr(torch.Tensor, name) else None


def called(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a call.

    Raises:
        Exception: The operator does not take such arguments; which kind of error says nothing.
    """
    if form.method:
        return getattr(args[0], form.callee)(*args[1:], **kwargs)
    function: Callable[..., Any] = _found(form.callee)
    return function(*args, **kwargs)


def _published(callee: str, parameters: str, known: Arguments) -> Spelled | None:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in parameters.split():
        key, _, own = parameter.partition(":")
        value = known.get(key)
        if own == "reduction":
            value = _REDUCTIONS[value] if isinstance(value, int) else "none"
        if own and (value is None or value == _DEFAULTS.get(own)):
            continue
        if own:
            kwargs[own] = value
        else:
            args.append(value)
    while args and args[-1] is None:
        args.pop()
    return Form(callee.removeprefix("."), method=callee.startswith(".")), tuple(args), kwargs


_USUAL: Mapping[str, tuple[Any, ...]] = {
    "pin_memory": (None, False),
    "layout": (None, torch.strided),
    "device": (None, torch.device("cpu")),
    "memory_format": (None, torch.preserve_format),
}
"""Keyword arguments that need not be said."""

_DEFAULTS = {"reduction": "mean", "ignore_index": -100, "is_causal": False}
"""What public functions take for an argument that is not given."""


def _found(path: str) -> Any:
    """Return what a dotted name stands for, or None."""
    try:
        return reduce(getattr, path.split(".")[1:], torch)
    except (AttributeError, RuntimeError):
        return None
