"""Compositions in one stable step: the logarithm of a softmax or of a determinant, softmax and logsumexp by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from bisect_nan.causes.evidence import base_name
from bisect_nan.recording.program import Arguments, Node
from bisect_nan.remedies.proposal import Proposal, Site, instead
from bisect_nan.replaying.differentiable import Change

_MANY = 32
"""Calls of a line that are looked at; each asks all calls of the step whether they use its result."""


def log_of_probability(site: Site) -> Iterator[Proposal]:
    """Take the logarithm of a softmax or sigmoid from its scores."""
    if site.op != "log" or site.node is None:
        return
    changes: dict[int, Change] = {}
    wrap = ""
    for index in site.alike():
        chain = list(site.made_by("self", site.program.nodes[index]))
        if not chain:
            return
        names = [base_name(str(node.target)) for node in chain]
        if names[0] == "_softmax":
            changes |= _handed_on(chain[0].index, index, lambda a: torch.log_softmax(a["self"], a["dim"]))
            wrap = "torch.log_softmax(scores, dim)"
        elif names[0] == "sigmoid":
            changes |= _handed_on(chain[0].index, index, lambda a: functional.logsigmoid(a["self"]))
            wrap = "F.logsigmoid(scores)"
        elif names[:2] == ["rsub", "sigmoid"] and chain[0].args[1:] == (1,):
            changes |= _handed_on(chain[1].index, index, lambda a: functional.logsigmoid(-a["self"]))
            wrap = "F.logsigmoid(-scores)"
        elif names[:2] == ["add", "exp"] and chain[0].args[1:] == (1,):
            changes |= _handed_on(chain[1].index, index, lambda a: functional.softplus(a["self"]))
            wrap = "F.softplus(scores)"
        else:
            return
    text = f"take the logarithm from the scores in one stable step: {wrap}"
    yield Proposal("stable_logarithm", text, changes=changes, local=False)


def subtract_maximum(site: Site) -> Iterator[Proposal]:
    """Subtract the maximum before an exponential whose sum divides it, or whose sum's logarithm is taken."""
    if site.op != "exp" or site.node is None or site.node.written or len(site.alike()) > _MANY:
        return
    changes: dict[int, Change] = {}
    wrap = ""
    for index in site.alike():
        node = site.program.nodes[index]
        users = _users(site, node)
        total = next((u for u in users if base_name(str(u.target)) == "sum" and len(u.args) > 1), None)
        if total is None:
            return
        dims = total.args[1]
        after = _users(site, total)
        ratio = [u for u in users if base_name(str(u.target)) == "div"]
        logs = [u for u in after if base_name(str(u.target)) == "log"]
        if ratio and {u.index for u in ratio} == {u.index for u in after} and len(users) == 1 + len(ratio):
            changes |= {index: lambda target, a, dims=dims: target(a["self"] - a["self"].amax(dims, keepdim=True))}  # type: ignore[misc]
            wrap = "torch.softmax(x, dim)"
        elif logs and len(after) == len(logs) and len(users) == 1:
            changes |= _logsumexp(index, logs[0].index, dims, keepdim=len(total.args) > 2 and bool(total.args[2]))  # noqa: PLR2004
            wrap = "torch.logsumexp(x, dim)"
        else:
            return
    text = f"subtract the maximum before the exponential: {wrap}"
    yield Proposal("subtract_maximum", text, changes=changes, local=False)


def absolute_determinant(site: Site) -> Iterator[Proposal]:
    """Take the logarithm of the absolute value of a determinant, which `logdet` refuses where it is negative."""
    if site.node is None or site.op != "scalar_tensor":
        return
    number, source = site.node.outputs[0], site.node.source
    before = [n for n in site.program.nodes[: site.node.index] if n.source == source]
    decomposed = [n for n in before if base_name(str(n.target)) == "_linalg_slogdet"]
    chosen = [n for n in site.program.nodes if number in n.inputs() and base_name(str(n.target)) == "where"]
    if decomposed and chosen:
        yield Proposal(
            "absolute_determinant",
            "take the logarithm of the determinant's absolute value, where its sign does not matter",
            "torch.linalg.slogdet({x}).logabsdet",
            "A",
            whole=True,
            node=decomposed[-1],
            changes={n.index: instead(lambda arguments: arguments["other"].clone()) for n in chosen},
            local=False,
        )


def _users(site: Site, node: Node) -> list[Node]:
    """Return the calls of the forward pass that read a call's result."""
    made = set(node.outputs)
    return [n for n in site.program.nodes if n.phase is node.phase and made & set(n.inputs())]


def _handed_on(first: int, last: int, compute: Any) -> Mapping[int, Change]:
    """Compute at one call, from its arguments, what another one returns."""
    kept: list[torch.Tensor] = []

    def keep(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        kept.append(compute(arguments))
        return target(**arguments)

    return {first: keep, last: lambda _, __: kept.pop()}


def _logsumexp(first: int, last: int, dims: Any, *, keepdim: bool) -> Mapping[int, Change]:
    kept: list[torch.Tensor] = []

    def shifted(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        x = arguments["self"]
        kept.append(x.amax(dims, keepdim=keepdim))
        return target(x - x.amax(dims, keepdim=True))

    return {first: shifted, last: lambda target, arguments: target(**arguments) + kept.pop()}
