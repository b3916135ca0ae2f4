"""Means over nothing, deviations of one number, and losses that were given targets they cannot score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from bisect_nan import finite
from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import enough, numbers, ops, written_by

_SPREADS = frozenset({"std", "var", "std_mean", "var_mean"})
_MEANS = frozenset({"mean", "median", "nanmedian"})
_NLL = frozenset({"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d"})
_PAIRED = ops(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss"
)
_CTC = frozenset({"_ctc_loss", "_cudnn_ctc_loss", "_use_cudnn_ctc_loss", "ctc_loss"})
_MEAN_REDUCTION = 1


def _count(arguments: Mapping[str, Any]) -> int:
    """Return how many elements each result of a reduction over `dim` (all dimensions when absent) is made from."""
    values = arguments["self"]
    dims = arguments.get("dim")
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return int(values.numel())
    chosen = dims if isinstance(dims, list | tuple) else [dims]
    return math.prod(values.shape[dim] for dim in chosen) if values.ndim else 1


def _correction(arguments: Mapping[str, Any]) -> float:
    """Degrees of freedom that a deviation subtracts from the count; one by default."""
    if "correction" in arguments:
        return 1.0 if arguments["correction"] is None else float(arguments["correction"])
    return float(bool(arguments.get("unbiased", True)))


def _empty_reduction(evidence: Evidence) -> Match | None:
    arguments = evidence.call.arguments
    if evidence.op == "segment_reduce":
        return _empty_segment(evidence, arguments)
    values = arguments.get("self")
    if not isinstance(values, torch.Tensor) or not evidence.kinds():
        return None
    if evidence.op in _MEANS | _SPREADS and _count(arguments) == 0:
        return Match(0.98, (f"`{evidence.op}` runs over no element: its input has the shape {list(values.shape)}",))
    if evidence.op in _PAIRED and values.numel() == 0 and arguments.get("reduction") == _MEAN_REDUCTION:
        return Match(
            0.98, (f"the mean of `{evidence.op}` runs over no element: its input has the shape {list(values.shape)}",)
        )
    if evidence.op in _NLL and arguments.get("reduction") == _MEAN_REDUCTION:
        return _nothing_scored(evidence, arguments)
    return None


def _empty_segment(evidence: Evidence, arguments: Mapping[str, Any]) -> Match | None:
    """Segments of length 0 at the blamed elements: their mean is 0 / 0, their maximum -inf, their minimum inf."""
    lengths, offsets = arguments.get("lengths"), arguments.get("offsets")
    if lengths is None and isinstance(offsets, torch.Tensor):
        lengths = offsets.diff(dim=-1)
    if not isinstance(lengths, torch.Tensor):
        return None
    empty = (lengths == 0).reshape(*lengths.shape, *[1] * (evidence.mask.ndim - lengths.ndim))
    if not enough(empty.expand(evidence.mask.shape)[evidence.mask]):
        return None
    place = [int(i) for i in (lengths == 0).nonzero()[0]]
    note = f"{int((lengths == 0).sum())} of {lengths.numel()} segments hold no element, the first is {place}"
    return Match(0.98, (f"{note}; their `{arguments['reduce']}` is asked for",))


def _nothing_scored(evidence: Evidence, arguments: Mapping[str, Any]) -> Match | None:
    outputs, target = evidence.call.outputs, arguments.get("target")
    total = outputs[1] if len(outputs) > 1 else None
    if not isinstance(target, torch.Tensor) or (total is not None and bool((numbers(total) != 0).any())):
        return None
    ignored = int((target == arguments.get("ignore_index", -100)).sum())
    if ignored == target.numel():
        return Match(0.98, (f"all {ignored} labels are {arguments.get('ignore_index', -100)}, the label to ignore",))
    if total is None:
        return None
    return Match(
        0.9, (f"{ignored} of {target.numel()} labels are ignored and the classes of the others have weight 0",)
    )


def _degenerate_dof(evidence: Evidence) -> Match | None:
    if evidence.op not in _SPREADS or not evidence.kinds():
        return None
    arguments = evidence.call.arguments
    count, correction = _count(arguments), _correction(arguments)
    if count == 0 or count - correction > 0:
        return None
    shape = list(arguments["self"].shape)
    note = f"`{evidence.op}` of {count} value{'s' if count > 1 else ''} (input shape {shape}) divides by {count} - {correction:g}"
    return Match(0.98, (note,))


def _lengths(value: Any) -> list[int]:
    return [int(length) for length in (value.flatten().tolist() if isinstance(value, torch.Tensor) else value)]


def _labels(targets: torch.Tensor, lengths: list[int], sample: int) -> list[int]:
    """The labels of one sample, from a padded matrix or from one long vector."""
    if targets.ndim > 1:
        return [int(label) for label in targets[sample, : lengths[sample]].tolist()]
    start = sum(lengths[:sample])
    return [int(label) for label in targets[start : start + lengths[sample]].tolist()]


def _infeasible_alignment(evidence: Evidence) -> Match | None:
    arguments = evidence.call.arguments
    targets, scores = arguments.get("targets"), arguments.get("log_probs")
    if not isinstance(targets, torch.Tensor) or evidence.output != 0 or not evidence.kinds():
        return None
    frames, lengths = _lengths(arguments["input_lengths"]), _lengths(arguments["target_lengths"])
    blamed = sorted({place[0] for place in evidence.mask.nonzero().tolist() if place}) or [0]
    notes = []
    for sample in blamed:
        labels = _labels(targets, lengths, sample)
        repeats = sum(left == right for left, right in pairwise(labels))
        if frames[sample] < len(labels) + repeats:
            doubled = f" with {repeats} repeated" if repeats else ""
            needed = len(labels) + repeats
            notes.append(
                f"sample {sample}: {len(labels)} labels{doubled} need {needed} frames, and {frames[sample]} are there"
            )
    if notes:
        more = [f"and {len(notes) - 3} more samples"] if len(notes) > 3 else []  # noqa: PLR2004  (a note lists three)
        return Match(0.98, (*notes[:3], *more))
    if isinstance(scores, torch.Tensor) and finite.has([scores], finite.NonFinite.NEG_INF):
        return Match(0.7, ("the labels fit, but log-probabilities of -inf leave them no path",))
    return None


_RULED_OUT = (
    "the mask rules out the right answer: repair the label or the mask of these samples, or leave them out of the loss "
    "(`ignore_index`)"
)


def _masked_label(evidence: Evidence) -> Match | None:
    """Labels whose own class is ruled out: their log-probability is -inf before the loss picks it."""
    scores, target = evidence.call.arguments.get("self"), evidence.call.arguments.get("target")
    if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor) or not evidence.kinds():
        return None
    classes = min(1, scores.ndim - 1)
    scored = target != evidence.call.arguments.get("ignore_index", -100)
    picked = scores.gather(classes, target.where(scored, 0).unsqueeze(classes)).squeeze(classes)
    ruled_out = finite.mask(picked, finite.NonFinite.NEG_INF) & scored
    if not ruled_out.any():
        return None
    place = [int(i) for i in ruled_out.nonzero()[0]]
    label = int(target[ruled_out][0])
    several = int(ruled_out.sum()) > 1
    many = f"{int(ruled_out.sum())} labels name" if several else "1 label names"
    note = f"{many} a class whose log-probability is -inf, {'first ' if several else ''}label {label} at {place}"
    return Match(0.85, (note, *written_by(evidence)), _RULED_OUT)


def _loss_target_invalid(evidence: Evidence) -> Match | None:
    if evidence.op in _CTC:
        return _infeasible_alignment(evidence)
    if evidence.op in _NLL:
        return _masked_label(evidence)
    if evidence.op != "binary_cross_entropy" or not evidence.kinds():
        return None
    for name in ("self", "target"):
        values = evidence.call.arguments.get(name)
        if isinstance(values, torch.Tensor) and values.numel():
            outside = (numbers(values) < 0) | (numbers(values) > 1)
            if outside.any():
                worst = numbers(values)[outside][0].item()
                return Match(0.9, (f"`{name}` must lie in [0, 1] and holds {worst:.4g}",))
    return None


_EMPTY_EXAMPLE = """\
import torch

def fails():
    logits = torch.zeros(3, 5, requires_grad=True)
    labels = torch.full((3,), -100)  # every token is ignored
    return torch.nn.functional.cross_entropy(logits, labels)
"""

_EMPTY_REPAIRED = """\
import torch

def repaired():
    logits = torch.zeros(3, 5, requires_grad=True)
    labels = torch.full((3,), -100)
    total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)
"""

_EMPTY_NEAR_MISS = """\
import torch

def near_miss():
    logits = torch.zeros(3, 5, requires_grad=True)
    labels = torch.tensor([-100, -100, 2])
    return torch.nn.functional.cross_entropy(logits, labels)
"""

EMPTY_REDUCTION = Cause(
    name="empty_reduction",
    summary="`{op}` averages over nothing",
    matches=_empty_reduction,
    explanation="""\
The mean of no element is 0 / 0 = nan. A selection came out empty, or every label carries the label to ignore: the
prompt alone filled the context, the crop shows only unlabelled pixels. One such micro-batch is enough.""",
    example=_EMPTY_EXAMPLE,
    repaired=_EMPTY_REPAIRED,
    near_miss=_EMPTY_NEAR_MISS,
    practice="""\
Prompts so long that no answer token is left to score, crops that hold nothing but the label to ignore (255 in
segmentation), images without a positive proposal, and experts that no token was sent to.""",
    help="skip the term when nothing is selected, or sum and divide by the count clamped to at least 1",
    references=("meta-llama/llama-cookbook#133", "open-mmlab/mmsegmentation#1388", "pytorch/pytorch#70348"),
)

_SINGLE_EXAMPLE = """\
import torch

def fails():
    advantage = torch.tensor([0.7], requires_grad=True)  # the last minibatch holds one sample
    return ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).sum()
"""

_SINGLE_REPAIRED = """\
import torch

def repaired():
    advantage = torch.tensor([0.7], requires_grad=True)
    if len(advantage) > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return advantage.sum()
"""

_SINGLE_NEAR_MISS = """\
import torch

def near_miss():
    advantage = torch.tensor([0.7, 0.9], requires_grad=True)
    return ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).sum()
"""

DEGENERATE_DOF = Cause(
    name="degenerate_dof",
    summary="`{op}` estimates a spread from too few values",
    matches=_degenerate_dof,
    explanation="""\
The sample deviation divides by n - 1. For one value that is 0 / 0 = nan, and an eps that is added afterwards does not
help. It is the last minibatch of an epoch, or a dimension of size one.""",
    example=_SINGLE_EXAMPLE,
    repaired=_SINGLE_REPAIRED,
    near_miss=_SINGLE_NEAR_MISS,
    practice="""\
The last minibatch of an epoch with one sample, advantages of a single step, and spreads over a dimension that happens
to have the size one.""",
    help="skip the normalisation for a single value, drop the last incomplete batch, or use `correction=0`",
    references=("DLR-RM/stable-baselines3#325", "pytorch/pytorch#29372"),
)

_TARGET_EXAMPLE = """\
import torch

def fails():
    logits = torch.zeros(4, 1, 3, requires_grad=True)  # four frames
    labels = torch.tensor([[1, 1, 2, 2]])  # two repeats need a blank each: six frames
    return torch.nn.functional.ctc_loss(torch.log_softmax(logits, -1), labels, [4], [4])
"""

_TARGET_REPAIRED = """\
import torch

def repaired():
    logits = torch.zeros(4, 1, 3, requires_grad=True)
    labels = torch.tensor([[1, 1, 2, 2]])
    return torch.nn.functional.ctc_loss(torch.log_softmax(logits, -1), labels, [4], [4], zero_infinity=True)
"""

_TARGET_NEAR_MISS = """\
import torch

def near_miss():
    logits = torch.zeros(6, 1, 3, requires_grad=True)
    labels = torch.tensor([[1, 1, 2, 2]])
    return torch.nn.functional.ctc_loss(torch.log_softmax(logits, -1), labels, [6], [4])
"""

LOSS_TARGET_INVALID = Cause(
    name="loss_target_invalid",
    summary="`{op}` was given a target that it cannot score",
    matches=_loss_target_invalid,
    explanation="""\
Connectionist temporal classification needs a frame for each label and a blank between equal neighbours; where fewer
frames are left no alignment exists, its probability is 0 and the loss -log(0) = inf. A label whose class was masked
with -inf has probability 0 as well. A binary cross entropy needs probabilities and targets within [0, 1].""",
    example=_TARGET_EXAMPLE,
    repaired=_TARGET_REPAIRED,
    near_miss=_TARGET_NEAR_MISS,
    practice="""\
Speech and text recognition: transcripts longer than the frames that pooling leaves of a short recording, and words
with doubled letters. Classification: a label whose class a mask rules out.""",
    help="drop or shorten the named samples, keep more frames (less pooling), or pass `zero_infinity=True`",
    references=("ypwhs/captcha_break#29", "k2-fsa/icefall#135", "pytorch/pytorch#31557"),
)
