"""Which tensor has which number, and what its memory held before the step."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase
from bisect_nan.recording.program import NO_STORAGE
from bisect_nan.recording.values import Values


def test_a_tensor_is_what_it_shows() -> None:
    """Aliases are the same tensor; other views, dtypes and lazy flags of the memory are others."""
    shown, x = Values().shown, torch.randn(4, 4, dtype=torch.complex64)
    same = [x.detach(), x.data, x.view(4, 4), x.t().t(), x.conj().conj()]
    others = [
        x.t(),
        x[:2],
        x[2:],
        x.conj(),
        x.view(torch.float64),
        torch.view_as_real(x),
        x.conj().imag,
        x.imag,
        x.clone(),
    ]
    assert all(shown(item) == shown(x) for item in same)
    keys = [shown(item) for item in [x, *others]]
    assert len(set(keys)) == len(keys)


def test_tensors_without_memory_are_known_by_identity() -> None:
    """Sparse tensors own no storage."""
    sparse, values = torch.eye(3).to_sparse(), Values()
    assert values.shown(sparse) != values.shown(sparse.detach())
    number = values.placeholder(sparse, None).value
    assert values.value(number).storage == NO_STORAGE


def test_the_python_object_of_a_storage_lives_as_long_as_its_memory() -> None:
    """All views of a memory have one storage object, which dies with the last of them, also when autograd held it."""
    w = torch.ones(3, requires_grad=True)
    x = w * 2
    reference = weakref.ref(x.untyped_storage())
    gc.collect()
    assert reference() is x.untyped_storage()
    assert reference() is x.detach().view(3, 1).untyped_storage()
    loss = (x * x).sum()
    del x
    gc.collect()
    assert reference() is not None
    loss.backward()
    assert reference() is None


def test_dead_memory_is_not_mistaken_for_living() -> None:
    """Tensors that come and go in the same place get numbers and storages of their own."""
    values = Values()
    numbers = [values.result(torch.zeros(8), 0) for _ in range(50)]
    assert len(set(numbers)) == 50
    assert len({values.storages[number] for number in numbers}) == 50


def test_names_hold_for_the_exact_tensor_then_for_its_memory() -> None:
    """Two named views of one memory are placeholders each; an unnamed alias has the name of the memory; the first name wins."""
    whole = torch.arange(6.0)
    values = Values()
    values.name(whole[:3], Phase.INPUT, "first")
    values.name(whole[3:], Phase.INPUT, "second")
    values.name(whole[:3], Phase.PARAMETER, "again")
    values.placeholder(whole[:3], None)
    assert values.hidden(whole[3:]) is None
    values.placeholder(whole[3:], None)
    assert [item.name for item in values.placeholders] == ["first", "second"]
    assert values.hidden(whole[1:2]) is not None
    other = Values()
    other.name(whole, Phase.BUFFER, "whole")
    other.placeholder(whole[2:4], None)
    assert (other.placeholders[0].name, other.placeholders[0].phase) == ("whole", Phase.BUFFER)


def test_the_name_of_a_tensor_that_died_is_not_inherited() -> None:
    """A batch that the step drops does not name what is allocated in its place."""
    values = Values()
    for size in range(1, 9):
        values.name(torch.zeros(size), Phase.INPUT, "dropped")
    gc.collect()
    for size in range(1, 9):
        values.placeholder(torch.zeros(size), None)
    assert {item.name for item in values.placeholders} == {"constant"}


def test_memory_from_outside_is_kept_before_its_first_write() -> None:
    """What a placeholder held can be seen and put back; memory of the step itself is not copied."""
    x, own = torch.arange(4.0), torch.zeros(4)
    values = Values()
    number = values.placeholder(x, None).value
    made = values.result(own, 0)
    assert not values.wrote(x)
    for target, tensor in ((number, x), (made, own)):
        values.before_write(target)
        tensor.fill_(9.0)
    assert values.wrote(x)
    assert not values.wrote(own)
    assert values.before(x[1:3]).tolist() == [1.0, 2.0]
    values.restore()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert own.tolist() == [9.0] * 4


def test_memory_that_a_sparse_tensor_shows_may_not_be_written() -> None:
    """The dense values of a sparse tensor cannot change without its knowing."""
    values = Values()
    dense, index = torch.ones(2), torch.tensor([[0, 1]])
    numbers = [values.placeholder(tensor, None).value for tensor in (index, dense)]
    sparse = torch.sparse_coo_tensor(index, dense, (3,), check_invariants=True)
    values.result(sparse, 0)
    values.watch_sparse([index, dense], sparse, view=False)
    for number in numbers:
        with pytest.raises(RecordingError, match="sparse"):
            values.before_write(number)


def test_zero_sized_tensors_have_storages_of_their_own() -> None:
    """Two empty tensors are two values, though neither has an address in memory."""
    values = Values()
    numbers = [values.result(torch.empty(0), 0) for _ in range(3)]
    assert len({values.storages[number] for number in numbers}) == 3
