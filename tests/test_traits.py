"""What calls do besides returning values agrees with what kernels really do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import STEPS
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from bisect_nan.recording import traits
from bisect_nan.recording.program import Ref, tensors
from bisect_nan.recording.traits import Traits

aten = torch.ops.aten


class Witness(TorchDispatchMode):
    """Runs every call and notes what it did that its traits do not say."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()
        self.writes: set[str] = set()
        self.draws: set[str] = set()
        self.moves: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, known = func._schema.name.removeprefix("aten::"), Traits.of(func)
        given = [tensor for tensor in tensors([*args, *kwargs.values()]) if tensor is not None]
        numbered = {id(tensor): Ref(number) for number, tensor in enumerate(given)}
        swapped = _swap(args, numbered), {key: _swap(item, numbered) for key, item in kwargs.items()}
        declared = {given[number].untyped_storage()._cdata for number in known.writes(*swapped)}
        before = [(tensor, _memory(tensor).clone(), tuple(tensor.shape)) for tensor in given if _plain(tensor)]
        state = torch.get_rng_state()
        result = func(*args, **kwargs)
        self.called.add(name)
        for tensor, content, shape in before:
            if tuple(tensor.shape) != shape:
                self.moves |= set() if known.moves or known.overwrites else {name}
            elif not torch.equal(_memory(tensor), content) and tensor.untyped_storage()._cdata not in declared:
                self.writes.add(name)
        if not known.random and not torch.equal(state, torch.get_rng_state()):
            self.draws.add(name)
        return result


def _swap(item: Any, numbered: dict[int, Ref]) -> Any:
    """Replace tensors by references, as the recorder does."""
    if isinstance(item, torch.Tensor):
        return numbered[id(item)]
    return [_swap(part, numbered) for part in item] if isinstance(item, list | tuple) else item


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor._is_zerotensor()


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's whole storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def modules() -> list[tuple[nn.Module, torch.Tensor]]:
    """Return modules with state or randomness, with an input."""
    x, image = torch.randn(4, 6, 8), torch.randn(2, 4, 8, 8)
    return [
        (nn.BatchNorm1d(6), x),
        (nn.BatchNorm1d(6, momentum=None), x),
        (nn.BatchNorm1d(6).eval(), x),
        (nn.BatchNorm2d(4, track_running_stats=False), image),
        (nn.InstanceNorm2d(4, track_running_stats=True), image),
        (nn.LayerNorm(8), x),
        (nn.RMSNorm(8), x),
        (nn.GroupNorm(2, 6), x),
        (nn.LocalResponseNorm(2), x),
        (nn.Dropout(), x),
        (nn.AlphaDropout(), x),
        (nn.FeatureAlphaDropout(), x),
        (nn.RReLU(), x),
        (nn.PReLU(), x),
        (nn.FractionalMaxPool2d(2, output_size=3), image),
        (nn.MaxPool2d(2), image),
        (nn.RNN(8, 5, dropout=0.5, num_layers=2), x),
        (nn.LSTM(8, 5, dropout=0.5, num_layers=2), x),
        (nn.GRU(8, 5, bidirectional=True), x),
        (nn.LSTMCell(8, 5), x[0]),
        (nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), x),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)), x),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), x),
        (nn.Upsample(scale_factor=2), image),
        (nn.ConvTranspose2d(4, 3, 3), image),
    ]


@pytest.fixture(scope="module")
def witness() -> Witness:
    """A witness of the table of steps, of modules with state, and of a few functions of their own, forward and backward."""
    torch.manual_seed(0)
    seen = Witness()
    for name, build in STEPS.items():
        if name in {"compiled", "conditional_operator", "flex_attention_without_gradients", "higher_order_loops"}:
            continue  # nothing but calls of operators is looked at
        model, batch, step = build()
        with seen:
            loss = step(model, batch)
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.backward()
    for module, x in modules():
        with seen:
            inputs = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x.clone().requires_grad_(),)
            output = module(*inputs)
            output = output[0] if isinstance(output, tuple) else output
            output.sum().backward()
    with seen:
        mean, variance = torch.zeros(6), torch.ones(6)
        aten.batch_norm_update_stats(torch.randn(4, 6, 8), mean, variance, 0.1)
        aten._native_batch_norm_legit(torch.randn(4, 6, 8), None, None, mean, variance, True, 0.1, 1e-5)
        functional.embedding(torch.tensor([1, 2]), torch.randn(5, 6) * 9, max_norm=1.0)
        functional.ctc_loss(torch.randn(5, 2, 4).log_softmax(2), torch.ones(2, 2).long(), (5, 5), (2, 2))
        torch.multinomial(torch.ones(5), 2)
        torch.poisson(torch.ones(5))
        torch.normal(torch.zeros(3), torch.ones(3))
        torch.randperm(7)
        functional.gumbel_softmax(torch.randn(3, 4))
        torch._foreach_lerp_([torch.ones(3)], [torch.zeros(3)], 0.5)
        torch.unique(torch.randn(5))
        torch.sort(torch.randn(5), out=(torch.empty(0), torch.empty(0, dtype=torch.long)))
    return seen


def test_no_other_op_writes_undeclared(witness: Witness) -> None:
    """Every call writes to what its schema declares, or to what the table of omissions says."""
    assert {"native_batch_norm", "mkldnn_rnn_layer_backward", "rrelu_with_noise"} <= witness.called
    assert len(witness.called) > 150
    assert witness.writes == set()


def test_the_table_of_omissions_is_needed() -> None:
    """No schema declares what the table of omissions lists, and every argument in it exists."""
    for name in traits._UNDECLARED:
        target = getattr(aten, name).default
        assert [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write] == []
        assert Traits.of(target).written


def test_every_random_call_is_tagged(witness: Witness) -> None:
    """No call moves the default generator without the tag that the recorder looks for."""
    assert witness.draws == set()


def test_every_overload_that_takes_a_generator_is_tagged() -> None:
    """Among all of ATen only seeding takes a generator without drawing from it."""
    untagged = set()
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and any("Generator" in str(argument.type) for argument in schema.arguments):
            packet = getattr(aten, schema.name.removeprefix("aten::"), None)
            overload = getattr(packet, schema.overload_name or "default", None)
            if isinstance(overload, torch._ops.OpOverload) and not Traits.of(overload).random:
                untagged.add(schema.name.removeprefix("aten::"))
    assert untagged <= {"manual_seed", "initial_seed", "seed", "_no_grad_normal_", "_no_grad_uniform_"}


def test_only_tagged_calls_change_what_a_tensor_shows(witness: Witness) -> None:
    """Calls that give an argument other sizes are tagged so, apart from `out=` of another size."""
    assert witness.moves == set()
    for target in (aten.t_.default, aten.set_.source_Tensor, aten.resize_.default, aten.as_strided_.default):
        assert Traits.of(target).moves


def test_written_arguments_are_found_wherever_they_stand() -> None:
    """Positions, keyword-only arguments, lists, and the flag of batch normalisation."""
    refs = [Ref(number) for number in range(5)]
    assert Traits.of(aten.add_.Tensor).writes(refs[:2], {}) == (0,)
    assert Traits.of(aten.add.out).writes(refs[:2], {"out": refs[2]}) == (2,)
    assert Traits.of(aten._foreach_add_.List).writes([refs[:2], refs[2:4]], {}) == (0, 1)
    batch_norm = Traits.of(aten.native_batch_norm.default)
    assert batch_norm.writes([*refs, True, 0.1, 1e-5], {}) == (3, 4)
    assert batch_norm.writes([*refs, False, 0.1, 1e-5], {}) == ()
    assert batch_norm.writes([refs[0], None, None, None, None, True, 0.1, 1e-5], {}) == ()


def test_the_other_traits() -> None:
    """Views, uninitialised memory, and calls that overwrite it as a whole."""
    assert Traits.of(aten.view.default).view
    assert not Traits.of(aten.add_.Tensor).view
    assert Traits.of(aten.empty_like.default).uninitialized
    assert Traits.of(aten.copy_.default).overwrites
    assert Traits.of(aten.mul.out).overwrites
    assert not Traits.of(aten.mul_.Tensor).overwrites
