"""What is set up around a step while it is recorded, and taken down again."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from bisect_nan.recording.setting import eager, module_paths, old_objects_left_alone


class Failing(nn.Module):
    """A module that asks for the stack and raises."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack, self.seen = stack, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = "/".join(self.stack)
        raise KeyError(x.shape)


def test_the_stack_holds_the_paths_of_running_modules() -> None:
    """Paths of the model's modules; others have that of the one that called them; nothing is left after an error."""
    stack: list[str] = []
    inner = Failing(stack)
    model, other = nn.Sequential(nn.Sequential(inner)), Failing(stack)
    with module_paths(model, stack):
        with pytest.raises(KeyError):
            model(torch.ones(1))
        assert (inner.seen, stack) == ("/0/0.0", [])
        with pytest.raises(KeyError):
            other(torch.ones(1))
        assert other.seen == ""
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_modules_keep_their_fast_paths() -> None:
    """No hook is registered: some modules compute something else when they have any."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with module_paths(layer, []), torch.no_grad():
        assert not torch.nn.modules.module._has_any_global_hook()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


def test_compiling_does_nothing_meanwhile() -> None:
    """`torch.compile` gives back what it gets, as a function and as a decorator, and is itself again afterwards."""
    compiler = torch.compile
    with eager():
        assert torch.compile(len) is len
        assert torch.compile(dynamic=True)(len) is len
    assert torch.compile is compiler


def test_branches_of_cond_are_differentiated_eagerly() -> None:
    """The autograd kernel of `cond` can be replaced under its dispatch key, and is put back (torch 2.13)."""
    cond, key = torch.ops.higher_order.cond, torch._C.DispatchKey.Autograd
    kernel, x = cond.py_kernels[key], torch.tensor(2.0, requires_grad=True)
    with eager():
        assert cond.py_kernels[key] is not kernel
        (gradient,) = torch.autograd.grad(torch.cond(x > 0, lambda x: x * x, lambda x: x, (x,)), x)
    assert cond.py_kernels[key] is kernel
    assert float(gradient) == 4.0


def test_the_garbage_collector_is_left_as_it_was() -> None:
    """Objects are put aside and taken back; those that somebody else put aside stay there."""
    assert gc.get_freeze_count() == 0
    with old_objects_left_alone():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        with old_objects_left_alone():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
