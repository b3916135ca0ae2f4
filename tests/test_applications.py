"""Uses of Python autograd Functions: where gradients enter and leave their backward code, and which calls that is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bisect_nan.finding import Phase
from bisect_nan.recording.capture import record


class Split(torch.autograd.Function):
    """Returns two results, and takes a tensor that needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shifted halves of x."""
        del ctx
        half = x.shape[1] // 2
        return x[:, :half] + shift, x[:, half:] * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of x."""
        del ctx
        return torch.cat([gradients[0], gradients[1] * 2], 1), None


def test_a_chain_of_functions_is_known_from_end_to_end() -> None:
    """What one returns and another takes; the gradients between them; the calls of each."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        left, right = Split.apply(model(x), torch.ones(1))
        inner, rest = Split.apply(torch.cat([left, right], 1), torch.ones(1))
        return (inner * rest).sum()

    program = record(nn.Linear(3, 4), torch.ones(2, 3), step).program
    first, second = program.applications
    assert {first.name, second.name} == {"SplitBackward"}
    for use in (first, second):
        assert use.inputs[1] is None
        assert use.returned[1] is None
        assert all(number is not None for number in (*use.outputs, *use.given, use.inputs[0], use.returned[0]))
        nodes = program.nodes[use.first : use.last]
        assert [str(node.target) for node in nodes] == ["aten.mul.Tensor", "aten.cat.default"]
        assert all(node.phase is Phase.BACKWARD for node in nodes)
    assert second.last <= first.first


def test_functions_that_follow_each_other_are_connected() -> None:
    """The result of one is taken by another without any call between them that autograd sees."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        left, right = Split.apply(model(x), torch.ones(1))
        return Split.apply(right, torch.ones(1))[0].sum() + left.sum()

    program = record(nn.Linear(3, 4), torch.ones(2, 3), step).program
    first, second = program.applications
    assert first.outputs[1] == second.inputs[0]
    assert first.given[1] == second.returned[0]


def test_checkpoints_are_none_of_them() -> None:
    """Their backward pass is autograd's own."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True)
        return y.sum()

    assert record(nn.Linear(3, 2), torch.ones(4, 3), step).program.applications == ()


def test_the_backward_pass_of_a_bad_loss_is_recorded_only_for_functions() -> None:
    """A bad loss has no gradients that anybody asks for, but the code in between is needed to execute remedies."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        left, right = Split.apply(model(x), torch.ones(1))
        return (left * 0).log().sum() + right.sum()

    recording = record(nn.Linear(3, 4), torch.ones(2, 3), step)
    assert len(recording.program.applications) == 1
    assert recording.program.targets.gradients == {}
    plain = record(nn.Linear(3, 4), torch.ones(2, 3), lambda m, x: (m(x) * 0).log().sum())
    assert all(node.phase is Phase.FORWARD for node in plain.program.nodes)
