"""The text of a script."""

from __future__ import annotations

import textwrap

import torch

from bisect_nan.causes import find
from bisect_nan.finding import Culprit, Phase
from bisect_nan.reproduction.draft import Draft, Literal, Mode
from bisect_nan.reproduction.literals import options_text, tensor_text
from bisect_nan.reproduction.oracle import lines_of
from bisect_nan.reproduction.recapture import Lines, bad_leaf, op_of

_WIDTH = 118
"""Columns of a line; longer lists of numbers go on in the next one."""


def script_lines(draft: Draft) -> Lines:
    """Return all lines that a script runs.

    Raises:
        ReproductionError: A tensor is too large to be written down.
    """
    calls = lines_of(draft)
    literals = [line for literal in draft.literals for line in _literal(literal)]
    return Lines(tuple(literals), calls.calls, calls.mode, calls.result, calls.element)


def script_text(lines: Lines, culprit: Culprit, cause: str) -> str:
    """Return the script: a comment that says what it shows, its lines, and what must not be finite at the end.

    Args:
        lines: What it runs.
        culprit: What was found in the step.
        cause: What is named in the script.
    """
    shown = _shown(lines)
    summary = find(cause).summary.format(op=op_of(culprit).lstrip("_"), name="")
    head = [f"torch {torch.__version__}: {cause}", f"{summary[0].upper()}{summary[1:]}."]
    if culprit.phase is Phase.BACKWARD and lines.mode is Mode.FORWARD:
        head.append("The call stands in a backward pass, and is run here by itself.")
    if any(line.startswith("slope = ") for line in lines.calls):
        head.append("It shows in the derivative of a derivative.")
    if culprit.source is not None and culprit.source.text:
        head.append(f"Reduced from: {_harmless(culprit.source.text)}")
    names = [name for name in ("inf", "nan") if any(name in line for line in (*lines.literals, *lines.calls))]
    body = [*lines.literals, *lines.calls, *(["loss.backward()"] if lines.mode is Mode.BACKWARD else [])]
    text = [
        *(f"# {part}" for part in head),
        *([f"from math import {', '.join(names)}", ""] if names else []),
        "import torch",
        "",
        *body,
        f"print({shown})",
        f"assert not {shown}.isfinite().all()",
    ]
    return "\n".join(text) + "\n"


def _literal(literal: Literal) -> list[str]:
    """Return the lines that make a tensor."""
    if literal.recipe:
        kind = options_text(literal.tensor, grad=False).removeprefix(", ")
        made = f"({literal.recipe}).to({kind})" if kind else f"({literal.recipe})"
        text = f"{literal.name} = {made}{'.requires_grad_()' if literal.grad else ''}"
    else:
        text = f"{literal.name} = {tensor_text(literal.tensor, grad=literal.grad)}"
    return textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _shown(lines: Lines) -> str:
    """Return what is printed and asserted not to be finite."""
    if lines.mode is not Mode.BACKWARD:
        return lines.result
    return f"{bad_leaf(lines)}.grad"


def _harmless(text: str) -> str:
    """Return a line of the user's code as the inside of a comment: one line of printable characters."""
    shown = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return shown if len(shown) <= _WIDTH else f"{shown[: _WIDTH - 3]}..."
