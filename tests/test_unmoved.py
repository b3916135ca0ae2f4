"""The state of a global generator is what its library says, whether it was read again or not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bisect_nan.recording.unmoved import numpy_memory_is_known, numpy_state, python_memory_is_known, python_state

DRAWS = {
    "nothing": lambda: None,
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),
    "python seed": lambda: random.seed(1),
    "numpy": np.random.rand,
    "numpy normal": np.random.standard_normal,
    "numpy seed": lambda: np.random.seed(1),  # noqa: NPY002
    "numpy binomial": lambda: np.random.binomial(5, 0.3),  # noqa: NPY002
    "numpy store": lambda: np.random.set_state((*np.random.get_state()[:3], 1, 0.5)),  # noqa: NPY002
    "numpy no store": lambda: np.random.set_state((*np.random.get_state()[:3], 0, 0.0)),  # noqa: NPY002
}


def test_the_memory_of_the_generators_is_as_known() -> None:
    """Python and NumPy keep their states where `unmoved` compares them; else every state would have to be read again."""
    assert python_memory_is_known()
    assert numpy_memory_is_known()


def shown(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return everything that a state of NumPy's holds."""
    words = state["state"]["key"].tobytes(), state["state"]["pos"]
    return state["bit_generator"], *words, state["has_gauss"], state["gauss"]


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=8))
def test_states_are_what_the_libraries_say(draws: list[str]) -> None:
    """After any draws, seeds and states that were set, numbers in store included."""
    for draw in draws:
        DRAWS[draw]()
        assert python_state() == random.getstate()
        assert shown(numpy_state()) == shown(np.random.get_state(legacy=False))  # noqa: NPY002


def test_a_state_is_not_read_again() -> None:
    """As long as nothing was drawn it is the same object."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    assert python_state() is python_state()
    assert numpy_state() is numpy_state()


def test_other_kinds_of_bits() -> None:
    """NumPy's global generator may draw from something else than a Mersenne Twister."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        first = numpy_state()
        np.random.rand()  # noqa: NPY002
        assert numpy_state() != first
    finally:
        np.random.set_bit_generator(before)
