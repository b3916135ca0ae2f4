"""Which of the saved tensors is the model's input, which the target, which the output: by the names that people give them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bisect_nan.errors import TargetError

INPUT_KEYS = (
    *(
        "input",
        "inputs",
        "x",
        "batch",
        "data",
        "images",
        "image",
        "img",
        "imgs",
        "features",
        "tokens",
        "samples",
        "src",
    ),
    *("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features"),
)
TARGET_KEYS = ("target", "targets", "y", "label", "labels", "y_true", "gt", "ground_truth", "tgt", "class_labels")
OUTPUT_KEYS = ("output", "outputs", "logits", "pred", "preds", "prediction", "predictions", "y_pred", "y_hat", "out")
STATE_KEYS = ("model_state_dict", "state_dict", "model_state", "model", "weights")
"""Under which keys people save these things, in any case; the first that is there is used."""


@dataclass(frozen=True, slots=True)
class Roles:
    """How a step takes the saved values.

    Attributes:
        values: The values that it takes, by name.
        positional: The name of the one that the model takes first, or "" where it takes all by keyword. A mapping in its place
            gives keyword arguments, a list or tuple positional ones.
        keywords: The names of those that the model takes by keyword.
        target: The name of the target, or "".
    """

    values: Mapping[str, Any]
    positional: str
    keywords: tuple[str, ...]
    target: str

    def call(self, model: nn.Module, values: Mapping[str, Any]) -> Any:
        """Call the model with the values in the place of `values`."""
        keywords = {key: values[key] for key in self.keywords}
        if not self.positional:
            return model(**keywords)
        first = values[self.positional]
        if isinstance(first, Mapping):
            return model(**first, **keywords)
        return model(*first, **keywords) if isinstance(first, list | tuple) else model(first, **keywords)


def key_of(saved: Mapping[Any, Any], keys: Sequence[str]) -> str:
    """Return the first of some keys that a mapping has, spelled as it spells it; "" if it has none."""
    spelled = {key.lower(): key for key in saved if isinstance(key, str)}
    return next((spelled[key] for key in keys if key in spelled), "")


def roles(saved: Any, model: nn.Module, path: Path, *, scored: bool) -> Roles:
    """Tell what of a saved batch the model takes, and what the loss.

    Args:
        saved: A tensor; a list or tuple, the target last; or a mapping, in which the batch may be nested once. Values that are
            called as the model calls its arguments are given to it by keyword.
        model: The model.
        path: The file, for messages.
        scored: Whether there is a loss apart from the model, which takes a target.

    Raises:
        TargetError: There is no input, or no target where one is needed.
    """
    arguments = _arguments(model)
    surplus = isinstance(saved, list | tuple) and len(saved) > max(
        1, len(arguments)
    )  # a target whose loss is not named yet
    values = flat(saved, scored=scored or surplus)
    target = key_of(values, TARGET_KEYS) if scored else ""
    others = {key: value for key, value in values.items() if key != target and _holds_tensors(value)}
    keywords = tuple(key for key in arguments if key in others)
    positional = ""
    if not keywords or any(needed and key not in others for key, needed in arguments.items()):
        free = {key: value for key, value in others.items() if key not in keywords and not key_of({key: 0}, _NOT_INPUT)}
        positional = key_of(free, INPUT_KEYS) or (next(iter(free)) if len(free) == 1 else "")
        if not positional:
            called = f" (the model calls its arguments {', '.join(arguments)})" if arguments else ""
            raise _missing(values, path, f"the input of the model, under one of {', '.join(INPUT_KEYS)}{called}")
    if scored and not target:
        raise _missing(values, path, f"the target of the loss, under one of {', '.join(TARGET_KEYS)}")
    used = [key for key in (positional, *keywords, target) if key]
    return Roles({key: values[key] for key in used}, positional, keywords, target)


def flat(saved: Any, *, scored: bool) -> dict[str, Any]:
    """Return saved values by name: what has no names gets those of its places, and a nested batch is opened.

    A nested batch stays closed where nothing in it is the loss's: the model takes it as it is.
    """
    if not isinstance(saved, Mapping):
        items = list(saved) if isinstance(saved, list | tuple) else [saved]
        if scored and len(items) > 1:
            *inputs, target = items
            return {"input": inputs[0] if len(inputs) == 1 else tuple(inputs), "target": target}
        return {"input": items[0] if len(items) == 1 else tuple(items)}
    values = {str(key): value for key, value in saved.items()}
    outer = key_of(values, INPUT_KEYS)
    if outer and scored and not key_of(values, TARGET_KEYS) and not isinstance(values[outer], torch.Tensor):
        inner = flat(values.pop(outer), scored=True)
        values |= inner
    return values


_NOT_INPUT = (*OUTPUT_KEYS, *STATE_KEYS, "loss", "step", "epoch", "global_step", "lr", "rng_state")


def _arguments(model: nn.Module) -> dict[str, bool]:
    """Return the names of a model's arguments, and whether each has to be given."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: p.default is p.empty for p in named}


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        items: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
        return any(map(_holds_tensors, items))
    return isinstance(value, torch.Tensor)


def _missing(values: Mapping[str, Any], path: Path, expected: str) -> TargetError:
    return TargetError(f"got {', '.join(values) or 'no keys'} in {path}", expected, "save it under such a name")
