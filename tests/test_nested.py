"""Tensors in anything nested: found with their paths, and replaced without a trace in the original."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bisect_nan.prevention import nested

Pair = namedtuple("Pair", "left right")  # noqa: PYI024  (as default_collate makes them)


@dataclass(frozen=True)
class Output:
    logits: Any
    hidden: Any = None


LEAVES = st.sampled_from([torch.ones(2), 1.5, 3, "text", None, torch.zeros((), dtype=torch.int64)])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 3]), inner, max_size=3),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(OrderedDict),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(UserDict),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.tuples(inner, inner).map(lambda pair: Output(*pair)),
    ),
    max_leaves=8,
)


@given(TREES)
def test_a_path_leads_to_its_tensor(tree: Any) -> None:
    """Evaluated as Python, a path gives the tensor that was found with it, and none is missed."""
    found = list(nested.tensors(tree, "tree"))
    assert all(eval(path, {"tree": tree}) is tensor for path, tensor in found)  # noqa: S307  (a path of this test)
    assert len(list(nested.tensors(tree, numbers=True))) >= len(found)


@given(TREES)
def test_replacing_leaves_the_original_alone(tree: Any) -> None:
    """Every tensor of the new tree is a new one, at the same path and in the same containers, and the old tree is unchanged."""
    before = list(nested.tensors(tree, "tree"))
    made = nested.replaced(tree, lambda tensor: tensor + 1)
    after = list(nested.tensors(made, "tree"))
    assert [path for path, _ in after] == [path for path, _ in before]
    assert all(torch.equal(new, old + 1) for (_, new), (_, old) in zip(after, before, strict=True))
    assert type(made) is type(tree)
    assert all(old is still for (_, old), (_, still) in zip(before, nested.tensors(tree), strict=True))
    assert nested.replaced(tree, lambda _: None) is tree


def test_numbers_and_arrays() -> None:
    """Floats, complex numbers and NumPy arrays are tensors where they are asked for, and come back as what they were."""
    array = np.array([1.0, 2.0])
    array.flags.writeable = False
    tree = {"a": array, "b": 1.5, "c": 2j, "d": np.float32(3), "e": {4.0}, "f": 5}
    assert list(nested.tensors(tree)) == []
    assert [path for path, _ in nested.tensors(tree, numbers=True)] == ["['a']", "['b']", "['c']", "['d']", "['e']{}"]
    made = nested.replaced(tree, lambda tensor: tensor * 2)
    np.testing.assert_array_equal(made["a"], [2.0, 4.0])
    assert (made["b"], made["c"], made["d"], made["e"], made["f"]) == (3.0, 4j, 6.0, {8.0}, 5)
    assert type(made["d"]) is np.float32


def test_what_contains_itself_ends() -> None:
    """A container within itself is entered once."""
    tree: list[Any] = [torch.ones(1)]
    tree.append(tree)
    assert [path for path, _ in nested.tensors(tree)] == ["[0]"]


@pytest.mark.models
def test_outputs_of_transformers() -> None:
    """A ModelOutput is a mapping, and an absent item of it is none."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.SequenceClassifierOutput(loss=torch.tensor(1.0), logits=torch.ones(2, 2))
    assert [path for path, _ in nested.tensors(output)] == ["['loss']", "['logits']"]
