"""The callback for `transformers.Trainer` finds the line, also where the loss is computed outside of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faults import blames, located, raised
from torch.nn import functional

pytestmark = pytest.mark.frameworks
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from bisect_nan.errors import TargetError  # noqa: E402  (after the check that they are there)
from bisect_nan.integrations.transformers import GuardCallback  # noqa: E402

IGNORED = -100
"""The label of what does not count."""


class OwnLoss(transformers.Trainer):
    """A trainer with a loss of its own, whose gradient a batch without labels makes bad."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:  # noqa: FBT002
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        counts = (labels != IGNORED).sum(-1, keepdim=True)[..., None]
        loss = (outputs.logits * counts).square().sum(-1).sqrt().mean()  # gradient
        return (loss, outputs) if return_outputs else loss


def own_function(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return a mean over the labels that count."""
    loss = functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / (labels != IGNORED).sum()  # function


def trainer(
    kind: Any, count: int, bad: int | None = None, *, guarded: bool = True, on_fault: str = "raise", **options: Any
) -> Any:
    """Return a trainer of a tiny language model, with rows of which one may have no labels."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    rows = [dict.fromkeys(("input_ids", "labels"), torch.randint(0, 30, (6,))) for _ in range(count)]
    if bad is not None:
        rows[bad] = {**rows[bad], "labels": torch.full((6,), IGNORED)}
    own = {name: options.pop(name) for name in ("compute_loss_func",) if name in options}
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    arguments = transformers.TrainingArguments(
        "out", num_train_epochs=1, per_device_train_batch_size=1, **settings, **options
    )
    made = kind(
        transformers.GPT2LMHeadModel(config),
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=[GuardCallback(on_fault=on_fault)] if guarded else [],
        **own,
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


WAYS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "model": (transformers.Trainer, {}, "loss = loss / num_items_in_batch"),
    "smoothing": (transformers.Trainer, {"label_smoothing_factor": 0.1}, "nll_loss = nll_loss.sum() / denominator"),
    "function": (transformers.Trainer, {"compute_loss_func": own_function}, "# function"),
    "subclass": (OwnLoss, {}, "# gradient"),
    "accumulated": (OwnLoss, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}, "# gradient"),
    "bfloat16": (OwnLoss, {"bf16": True}, "# gradient"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_line_is_found(way: str) -> None:
    """It is, wherever the loss is computed; the log ends with the healthy steps."""
    kind, options, text = WAYS[way]
    made = trainer(kind, 8, 3, **options)
    fault = raised(made.train)
    culprit = located(fault).culprit
    assert culprit is not None
    assert culprit.source is not None
    assert culprit.source.text.endswith(text)
    assert len(made.state.log_history) == made.state.global_step


@pytest.mark.parametrize("way", WAYS)
def test_a_healthy_training_is_the_same(way: str) -> None:
    """With the callback it gives the same numbers as without, bit by bit, an evaluation in each epoch included."""
    kind, options, _ = WAYS[way]
    states = []
    for guarded in (True, False):
        made = trainer(kind, 6, guarded=guarded, eval_strategy="epoch", **options)
        made.train()
        assert "compute_loss" not in vars(made)
        states.append((made.model.state_dict(), [entry.get("loss") for entry in made.state.log_history]))
    assert all(torch.equal(states[0][0][name], states[1][0][name]) for name in states[0][0])
    assert states[0][1] == states[1][1]


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_step_is_left_out(way: str) -> None:
    """Under `skip` the training goes to its end, and stays finite."""
    kind, options, _ = WAYS[way]
    made = trainer(kind, 8, 3, on_fault="skip", **options)
    made.train()
    assert made.state.global_step == made.state.max_steps
    assert all(value.isfinite().all() for value in made.model.state_dict().values())


def test_a_second_training() -> None:
    """A trainer can be trained again after a fault, and is armed anew."""
    made = trainer(OwnLoss, 4, 2)
    for _ in range(2):
        assert blames(raised(made.train), "gradient")


def test_it_belongs_to_a_trainer() -> None:
    """Without one there is nothing to watch, which is said."""
    with pytest.raises(TargetError, match="callbacks="):
        GuardCallback().on_train_begin()
