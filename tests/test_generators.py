"""Which generator a call draws from, and where its state has to be set again."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bisect_nan.recording.generators import Draws, GeneratorStates, ProcessGenerators, source_of, state_of
from bisect_nan.recording.program import GeneratorRef

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


def draw(draws: Draws, generator: torch.Generator | None) -> bool:
    """Draw a number as a recorded call does and return whether a state was kept for it."""
    kwargs = {} if generator is None else {"generator": generator}
    state = draws.before((), kwargs)
    torch.rand(1, **kwargs)
    draws.after((), kwargs)
    return state is not None


@given(st.lists(st.sampled_from(["draw", "rewind", "passed", "default"]), max_size=8))
def test_states_are_kept_where_draws_do_not_continue(actions: list[str]) -> None:
    """The first draw of each generator and every draw after an outside change keeps a state, no other does."""
    torch.manual_seed(1)
    draws, passed = Draws(), torch.Generator().manual_seed(2)
    fresh = {"default": True, "passed": True}
    for action in actions:
        if action == "rewind":
            torch.manual_seed(len(actions))
            fresh["default"] = True
        elif action == "passed":
            assert draw(draws, passed) == fresh["passed"]
            fresh["passed"] = False
        else:
            assert draw(draws, torch.default_generator if action == "default" else None) == fresh["default"]
            fresh["default"] = False


def test_the_generators_passed_to_calls_are_put_back() -> None:
    """A generator that the step holds is afterwards where it was when it was first used."""
    draws, passed = Draws(), torch.Generator().manual_seed(2)
    before = passed.get_state()
    draw(draws, passed)
    draw(draws, passed)
    draws.restore()
    assert torch.equal(passed.get_state(), before)


def test_sources_are_told_apart() -> None:
    """The generator that was passed, else the one of the first device that is not the CPU, else the CPU's."""
    assert source_of([1, GeneratorRef(3)], [CUDA]) == 3
    assert source_of([1], [CPU, CUDA]) == CUDA
    assert source_of([1], [torch.device("cuda")]) == torch.device("cuda", 0)
    assert source_of([1], [CPU]) == source_of([], []) == 0


def test_states_of_a_replay_can_be_taken_and_set() -> None:
    """Generators of the replay's own start from their states; the default one is the process's."""
    torch.manual_seed(4)
    state = torch.Generator().manual_seed(9).get_state()
    first = GeneratorStates({2: state})
    assert first.of(0) is torch.default_generator
    torch.rand(2, generator=first.of(2))
    saved = first.states()
    assert set(saved) == {0, 2}
    expected = torch.rand(2, generator=first.of(2)), torch.rand(2)
    again = GeneratorStates(saved)
    assert torch.equal(torch.rand(2, generator=again.of(2)), expected[0])
    assert torch.equal(torch.rand(2), expected[1])


def test_all_generators_of_the_process_are_put_back() -> None:
    """torch's, Python's and NumPy's."""

    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002, S311

    before = ProcessGenerators()
    expected = draws()
    before.restore()
    assert draws() == expected
    before.restore()
    assert draws() == expected


def test_generator_objects_are_put_back() -> None:
    """Generators that a module holds: of torch, of Python, and both kinds of NumPy's."""
    dice, legacy, modern = random.Random(1), np.random.RandomState(1), np.random.default_rng(1)  # noqa: S311
    passed = torch.Generator().manual_seed(1)
    cases = [
        (dice, dice.random),
        (legacy, legacy.rand),
        (modern, modern.random),
        (passed, lambda: float(torch.rand((), generator=passed))),
    ]
    for generator, next_number in cases:
        undo = state_of(generator)
        assert undo is not None
        expected = next_number()
        undo()
        assert next_number() == expected
    assert state_of(3) is None
