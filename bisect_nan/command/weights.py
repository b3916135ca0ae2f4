"""Loads weights into a model that calls them a little differently: wrapped when they were saved, tied, or with others beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bisect_nan.command.roles import STATE_KEYS, key_of
from bisect_nan.errors import TargetError

_COMPILED = "_orig_mod."
"""What torch.compile puts before the names of a module, which may lie in the middle of a model."""


def state_of(content: Any) -> Mapping[str, Any] | None:
    """Return the state dict that a file's content is, or holds under a usual name; None without one."""
    if not isinstance(content, Mapping):
        return None
    key = key_of(content, STATE_KEYS)
    if key and isinstance(content[key], Mapping):
        inner: Mapping[str, Any] = content[key]
        return inner
    return content if is_state(content) else None


def is_state(content: Mapping[Any, Any]) -> bool:
    """Whether a mapping looks like the weights of a model: tensors under dotted names, and nothing else but empty values."""
    tensors = [key for key, value in content.items() if isinstance(value, torch.Tensor)]
    return any(str(key).endswith((".weight", ".bias")) or key in ("weight", "bias") for key in tensors)


def load_weights(model: nn.Module, state: Mapping[str, Any], origin: str) -> str:
    """Load weights into a model.

    A prefix that all of the model's names have in the file (`module.`, `model.`), or all of the file's in the model, is taken
    off; what the file holds beside the model is left out. A tied weight may be missing where its twin is there.

    Returns:
        A sentence: where the weights are from, and what was done to their names.

    Raises:
        TargetError: They are weights of another model.
    """
    plain = {str(key).replace(_COMPILED, ""): value for key, value in state.items()}
    bare = {key.replace(_COMPILED, ""): key for key in model.state_dict()}
    done = [f"`{_COMPILED}` left out of the names"] if set(plain) != set(map(str, state)) else []
    prefix, inner = _prefix(set(bare), set(plain)), ""
    if prefix:
        others = len([key for key in plain if not key.startswith(prefix)])
        plain = {key.removeprefix(prefix): value for key, value in plain.items() if key.startswith(prefix)}
        done.append(f"`{prefix}` taken off every name" + (f", {others} without it left out" if others else ""))
    else:
        inner = _prefix(set(plain), set(bare))
    if inner and all(key.startswith(inner) for key in bare):
        plain = {inner + key: value for key, value in plain.items()}
        done.append(f"`{inner}` put before every name")
    fitting = {bare.get(key, key): value for key, value in plain.items()}
    try:
        missing, unexpected = model.load_state_dict(fitting, strict=False)
    except (RuntimeError, TypeError, AttributeError) as error:  # shapes that differ, or values that are no tensors
        problem = " ".join(line.strip() for line in str(error).splitlines()[1:4]) or str(error)
        raise _misfit(origin, problem) from error
    missing = sorted(set(missing) - _tied(model, set(fitting)))
    if missing or unexpected:
        problems = [f"Missing key(s): {_cut(missing)}."] if missing else []
        problems += [f"Unexpected key(s): {_cut(unexpected)}."] if unexpected else []
        raise _misfit(origin, " ".join(problems))
    return f"Weights from {origin}" + (f" ({'; '.join(done)})." if done else ".")


def _prefix(inner: set[str], outer: set[str]) -> str:
    """Return what stands before some names in other names; "" where that is nothing.

    Most of either have to agree: a layer of another model, whose names are as short, is no wrapped model.
    """
    if not inner or inner <= outer:
        return ""
    longest = max(inner, key=lambda name: (name.count("."), len(name)))
    for prefix in sorted((key.removesuffix(longest) for key in outer if key.endswith(f".{longest}")), key=len):
        common = sum(prefix + key in outer for key in inner)
        if common > len(inner) / 2 and common > len(outer) / 2:
            return prefix
    return ""


def _tied(model: nn.Module, loaded: set[str]) -> set[str]:
    """Return the names of parameters that are one with a loaded one."""
    state = model.state_dict(keep_vars=True)
    known = {id(tensor) for key, tensor in state.items() if key in loaded}
    return {key for key, tensor in state.items() if id(tensor) in known}


def _cut(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown  # noqa: PLR2004  (as many as a line holds)


def _misfit(origin: str, problem: str) -> TargetError:
    do = "name the weights of this model, or the model that these weights belong to"
    return TargetError(f"got weights in {origin} that do not fit the model: {problem}", "its own names", do)
