"""What is set up around a step while it is recorded: eager execution, the paths of modules, and a quiet garbage collector."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def module_paths(model: Any, stack: list[str]) -> Iterator[None]:
    """Keep the path of the running module on top of `stack`; modules outside of `model` have that of their caller."""
    paths = {module: name for name, module in model.named_modules()} if isinstance(model, nn.Module) else {}
    with modules_followed(paths, stack):
        yield


@contextlib.contextmanager
def modules_followed(
    paths: Mapping[nn.Module, str], stack: list[str], outermost: Callable[[nn.Module], None] | None = None
) -> Iterator[None]:
    """Keep the path of the running module on top of `stack`.

    A layer of torch without parts of its own that a module of the user's calls belongs to the calling line, and so to its module.

    `nn.Module.__call__` is replaced meanwhile, as `torch.fx.Tracer` does it: hooks would keep modules from their fast paths.

    Args:
        paths: The path of every known module; others have that of their caller.
        stack: The paths of the running modules, the innermost last.
        outermost: Told about every module that no other module has called, before it runs.
    """
    users: list[bool] = []  # whether each running module is the user's own class
    plain = nn.Module.__call__

    @functools.wraps(plain)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if outermost is not None and not users:
            outermost(module)
        caller, library = stack[-1] if stack else "", type(module).__module__.startswith("torch.")
        part_of_line = library and users[-1:] == [True] and next(module.children(), None) is None
        stack.append(caller if part_of_line else paths.get(module, caller))
        users.append(not library)
        try:
            return plain(module, *args, **kwargs)
        finally:
            stack.pop()
            users.pop()

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


@contextlib.contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Keep the garbage collector to objects that are made meanwhile.

    A recording makes them by the ten thousand, and a collection that looks at all of torch's takes a tenth of a second.
    """
    if gc.get_freeze_count():  # somebody else has put objects aside, who alone may take them back
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled models, and the branches of `torch.cond`, eagerly: every call can be seen then, in forward and backward."""
    cond, compiler, key = torch.ops.higher_order.cond, torch.compile, torch._C.DispatchKey.Autograd
    # torch 2.13: under "force_eager", cond's own autograd kernel takes branches that return one tensor for tuples, and fails.
    kernel = cond.py_kernels[key]
    cond.py_kernels[key] = _branch
    cond._dispatch_cache.clear()
    torch.compile = _uncompiled
    try:
        # Dynamo takes a second to import, and nothing can have been compiled without it.
        compiled = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            yield
    finally:
        torch.compile = compiler
        cond.py_kernels[key] = kernel
        cond._dispatch_cache.clear()


@contextlib.contextmanager
def hooks_noticed(model: Any, leaves: Iterable[torch.Tensor]) -> Iterator[list[object]]:
    """Collect what hooks can change gradients at: leaves and modules that have some, and whatever registers one meanwhile.

    Hooks on saved tensors count as well, those of torch's checkpoints left out.
    """
    hooked: list[object] = hooked_parts([*leaves, *(model.modules() if isinstance(model, nn.Module) else ())])
    register, saving = torch.Tensor.register_hook, torch.autograd.graph.saved_tensors_hooks
    enter = saving.__enter__

    def registered(tensor: torch.Tensor, hook: Any) -> Any:
        hooked.append(tensor)
        return register(tensor, hook)  # type: ignore[no-untyped-call]

    def entered(context: Any) -> Any:
        if not type(context).__module__.startswith("torch.utils.checkpoint"):
            hooked.append(context)
        return enter(context)

    torch.Tensor.register_hook = registered  # type: ignore[method-assign]
    saving.__enter__ = entered  # type: ignore[method-assign]
    try:
        yield hooked
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]
        saving.__enter__ = enter  # type: ignore[method-assign]


def hooked_parts(parts: Iterable[object]) -> list[object]:
    """Return those of some tensors and modules that have hooks which can change gradients."""
    marks = ("_backward_hooks", "_post_accumulate_grad_hooks", "_backward_pre_hooks")
    return [part for part in parts if any(getattr(part, mark, None) for mark in marks)]


def is_compiled(model: Any) -> bool:
    """Whether a part of a model is run by `torch.compile`."""
    if not isinstance(model, nn.Module):
        return False
    # torch 2.6 to 2.13: `torch.compile(module)` wraps it, `module.compile()` replaces its call
    marks = ("_orig_mod", "_compiled_call_impl")
    return any(getattr(part, mark, None) is not None for part in model.modules() for mark in marks)


def _branch(predicate: Any, if_true: Callable[..., Any], if_false: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Stand in for the autograd kernel of `torch.cond`: run the branch under autograd, as Python's `if` would."""
    return (if_true if bool(predicate) else if_false)(*operands)


def _uncompiled(model: Any = None, **options: Any) -> Any:
    """Stand in for `torch.compile`: return what was to be compiled."""
    return model if model is not None else functools.partial(_uncompiled, **options)
