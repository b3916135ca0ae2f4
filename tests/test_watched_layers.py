"""Layers under watch: every output and gradient with its counts, whatever modules do, and no hook left behind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bisect_nan import layers


def hooks(model: nn.Module) -> int:
    """Return how many hooks a model has."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_a_chain_of_layers() -> None:
    """Rows come in the order of events, with the range of what each layer gave and of its gradient, and change no number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.rand(4, 2)
    plain = model(x).sum()
    plain.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with layers(model) as seen:
        loss = model(x).sum()
        loss.backward()
    assert torch.equal(loss, plain)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)
    names = [(row.name, row.phase) for row in seen.rows]
    assert names[:4] == [("0", "forward"), ("1", "forward"), ("2", "forward"), ("(model)", "forward")]
    assert sorted(names[4:]) == [(name, "gradient") for name in ("(model)", "0", "1", "2")]
    first = model[0](x).detach()
    assert (seen.rows[0].values.low, seen.rows[0].values.high) == (float(first.min()), float(first.max()))
    assert seen.first_bad is None
    assert hooks(model) == 0
    assert "all of 8 outputs and gradients are finite" in str(seen)


class Bad(nn.Module):
    def __init__(self, value: float = math.nan) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1] * self.value, x[1:]])


def test_the_first_bad_layer() -> None:
    """The innermost first one is kept, later ones have bad inputs, and the table and the sentence name it with counts."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Tanh(), Bad()), nn.Linear(3, 1))
    with layers(model) as seen:
        model(torch.rand(4, 2))
    first = seen.first_bad
    assert first is not None
    assert (first.name, first.kind, first.values.nan, first.given) == ("1.1", "Bad", 3, False)
    assert [row.given for row in seen.rows if row.bad][-2] is True
    assert seen.describe() == "first bad: the output of 1.1 (Bad) in step 1"
    assert "25.0%" in str(seen)


def test_a_bad_gradient() -> None:
    """A gradient that went bad behind a layer's output is told as the derivative's doing."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with layers(model) as seen:
        (model(torch.rand(4, 2)) * 0).sqrt().sum().backward()
    assert seen.first_bad is not None
    assert seen.first_bad.phase == "gradient"
    assert "made by the derivative" in seen.describe()


def test_masks_are_not_bad() -> None:
    """An output of 0 and -Inf is a mask; the same with a NaN is not."""

    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x).masked_fill(x > 0.5, -math.inf)

    mask = Mask()
    with layers(mask) as seen:
        mask(torch.tensor([0.1, 0.9]))
    assert seen.rows[0].values.neg_inf == 1
    assert seen.first_bad is None


@dataclass
class Answer:
    logits: torch.Tensor
    parts: dict[str, Any]


class Odd(nn.Module):
    """Takes a mask of booleans, and returns empty tensors, integers and nothing, within a dataclass."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, keep: torch.Tensor | None = None) -> Answer:
        return Answer(x.masked_fill(mask, 0.0), {"empty": x[:0], "bool": mask, "int": mask.long(), "none": keep})


def test_odd_inputs_and_outputs() -> None:
    """Booleans, integers, empty tensors and keyword arguments are rows like others, with their place in the output."""
    model = Odd()
    with layers(model) as seen:
        answer = model(torch.ones(2, 2, requires_grad=True), torch.eye(2).bool(), keep=torch.zeros(0))
        answer.logits.sum().backward()
    places = [row.values.name for row in seen.rows if row.phase == "forward"]
    assert places == [".logits", ".parts['empty']", ".parts['bool']", ".parts['int']", ".parts['none']"]
    assert [row.values.name for row in seen.rows if row.phase == "gradient"] == [".logits"]
    assert str(seen)


def test_writing_to_outputs_in_place() -> None:
    """A layer's output may be written to, as inplace layers do; the row shows it as it was, and gradients are right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True))
    x = torch.rand(3, 2)
    before = model[0](x).detach()

    def loss() -> torch.Tensor:
        output = model(x)
        output += 1
        output[:, 0].mul_(2)
        return output.sum()

    (plain,) = torch.autograd.grad(loss(), [model[0].weight])
    with layers(model) as seen:
        (watched,) = torch.autograd.grad(loss(), [model[0].weight])
    assert torch.equal(plain, watched)
    assert seen.rows[0].values.low == float(before.min())


def test_calls_steps_and_shared_modules() -> None:
    """A module that is called twice, or held twice, has one name and a number for each call; steps are counted."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layers["b"](self.layers["a"](x))
            return y

    network = Twice()
    with layers(network) as seen:
        for _ in range(2):
            network(torch.rand(1, 2)).sum().backward()
    calls = [(row.name, row.step, row.call) for row in seen.rows if row.name == "layers.a" and row.phase == "forward"]
    assert calls == [("layers.a", 1, 1), ("layers.a", 1, 2), ("layers.a", 2, 1), ("layers.a", 2, 2)]
    assert "layers.a  call 2" in str(seen)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    """What a checkpoint computes anew is told as that, each gradient comes once, and the numbers are the same."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.block, x, use_reentrant=reentrant)
            return y

    model, x = Model(), torch.rand(3, 2, requires_grad=True)
    torch.manual_seed(1)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch.manual_seed(1)
    with layers(model) as seen:
        model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)
    rows = [(row.name, row.phase) for row in seen.rows if row.name == "block.0"]
    assert sorted(rows) == [("block.0", "forward"), ("block.0", "forward again"), ("block.0", "gradient")]
    assert all(row.step == 1 for row in seen.rows)


def test_an_exception_takes_the_hooks_away() -> None:
    """When the block raises, the rows so far stay, no hook does, and outputs that are still there have none."""
    model, outputs = nn.Linear(2, 2), list[torch.Tensor]()

    def run() -> None:
        outputs.append(model(torch.ones(1, 2)))
        raise KeyError

    with pytest.raises(KeyError), layers(model) as seen:
        run()
    assert hooks(model) == 0
    outputs[0].sum().backward()
    assert [row.phase for row in seen.rows] == ["forward"]


def test_function_transforms_are_let_through() -> None:
    """Values within vmap cannot be read one by one; they are counted, and the model runs as ever."""
    model = nn.Linear(2, 2)
    with layers(model) as seen:
        torch.func.vmap(model)(torch.ones(3, 2))
    assert seen.rows == ()
    assert "not readable, within a function transform: 1" in str(seen)


@pytest.mark.models
def test_a_transformer() -> None:
    """A model of the transformers library, whose outputs are ModelOutputs, is shown to the last layer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=10
    )
    model = transformers.BertForSequenceClassification(config)
    with layers(model) as seen:
        model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([1])).loss.backward()
    assert seen.first_bad is None
    assert {"(model)", "classifier", "bert.encoder.layer.1.attention.self"} <= {row.name for row in seen.rows}
    assert "['logits']" in {row.values.name for row in seen.rows}
