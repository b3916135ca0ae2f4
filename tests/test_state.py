"""What a step changes besides the elements of tensors can be put back, any number of times."""

from __future__ import annotations

import torch
from torch import nn

from bisect_nan.recording.state import Surroundings, optimizer_tensors


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Take one training step."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_a_whole_training_step_can_be_taken_back_twice() -> None:
    """With contents, a step can be repeated from the same parameters, buffers, optimizer state and random numbers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout())
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(5, 6)
    train(model, optimizer, x)
    contents = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in optimizer_tensors(optimizer))]
    before = Surroundings(model, optimizer, contents=contents)
    ends = []
    for _ in range(3):
        train(model, optimizer, x)
        moments = [tensor.clone() for _, tensor in optimizer_tensors(optimizer)]
        ends.append([*(tensor.clone() for tensor in model.state_dict().values()), *moments])
        before.restore()
    assert all(torch.equal(one, other) for end in ends for one, other in zip(ends[0], end, strict=True))


def test_the_first_optimizer_step_can_be_taken_back() -> None:
    """State that the optimizer made after the state was remembered is gone again."""
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = Surroundings(model, optimizer, contents=model.parameters())
    weight = model.weight.detach().clone()
    train(model, optimizer, torch.randn(5, 6))
    before.restore()
    assert dict(optimizer.state) == {}
    assert torch.equal(model.weight, weight)
    assert model.weight.grad is None


def test_only_what_is_asked_for_is_copied() -> None:
    """With the buffers as contents, a forward pass leaves no trace, while parameters keep what was written to them."""
    model = nn.BatchNorm1d(6)
    before = Surroundings(model, contents=model.buffers())
    model(torch.randn(5, 6))
    with torch.no_grad():
        model.weight.fill_(3.0)
    before.restore()
    assert model.num_batches_tracked == 0
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [0.0] * 6
    assert model.weight.tolist() == [3.0] * 6


def test_a_learning_rate_schedule_is_taken_back() -> None:
    """Groups of the optimizer get their values and their lists back."""
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = Surroundings(model, optimizer)
    optimizer.param_groups[0]["lr"] = 5.0
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    before.restore()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]


def test_models_that_are_no_modules_have_nothing_to_cover() -> None:
    """Any object may stand in for the model."""
    Surroundings(lambda x: x, batch=[1, "two", None]).restore()


def test_optimizer_tensors_have_readable_paths() -> None:
    """State per parameter, tensors in groups, and those in lists."""
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    train(model, adam, torch.randn(3, 2))
    names = [name for name, _ in optimizer_tensors(adam)]
    assert {"state[0].step", "state[1].exp_avg_sq", "param_groups[0].lr"} <= set(names)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = model(torch.ones(1, 2)).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)
    assert "state[0].old_dirs[0]" in dict(optimizer_tensors(lbfgs))


def test_the_hooks_of_a_tensor_are_where_they_are_known() -> None:
    """Hooks live in `_backward_hooks` and `_post_accumulate_grad_hooks` and can be set there (torch 2.6 to 2.13)."""
    weight = nn.Parameter(torch.ones(2))
    assert weight._backward_hooks is None
    assert weight._post_accumulate_grad_hooks is None
    called: list[str] = []
    weight.register_hook(lambda _: called.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda _: called.append("post"))
    weight.sum().backward()
    assert called == ["hook", "post"]
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        getattr(weight, name).clear()  # setting the second to None alone would leave it registered
        setattr(weight, name, None)
    weight.sum().backward()
    assert called == ["hook", "post"]


def test_hooks_of_the_step_are_called_no_more() -> None:
    """Hooks that a step put on a parameter, with and without others before, are gone."""
    model, called = nn.Linear(2, 2), []
    model.weight.register_hook(lambda _: called.append("before"))
    before = Surroundings(model)
    for parameter in model.parameters():
        parameter.register_hook(lambda _: called.append("hook"))
        parameter.register_post_accumulate_grad_hook(lambda _: called.append("post"))
    before.restore()
    model(torch.ones(1, 2)).sum().backward()
    assert called == ["before"]
