"""Writes a change into the line of the user, where that line shows the operand."""

from __future__ import annotations

import ast
import contextlib
import re

from bisect_nan.causes.evidence import base_name
from bisect_nan.finding import SourceLine
from bisect_nan.remedies.proposal import Proposal, Site

_OPERATORS: dict[str, type[ast.operator]] = {
    "div": ast.Div,
    "true_divide": ast.Div,
    "pow": ast.Pow,
    "mul": ast.Mult,
    "sub": ast.Sub,
    "add": ast.Add,
}
_NAMES = {
    "linalg_vector_norm": {"norm", "vector_norm"},
    "linalg_slogdet": {"logdet"},
    "special_erfinv": {"erfinv"},
    "to_copy": {"to", "half", "bfloat16", "float", "double"},
    "special_xlogy": {"xlogy"},
    "acos": {"acos", "arccos"},
    "asin": {"asin", "arcsin"},
    "acosh": {"acosh", "arccosh"},
    "atanh": {"atanh", "arctanh"},
}
"""By op: what users call it, where that is another name."""

_MODULES = {"torch", "F", "nn", "functional", "special", "linalg"}
"""What stands before the dot of a function; anything else is a tensor whose method is called."""


def line_to_write(site: Site, proposal: Proposal) -> tuple[str, str, SourceLine | None]:
    """Return the sentence that says what to do, the changed line of code ("" where it cannot be changed by itself), and which."""
    if not proposal.wrap:
        return proposal.text, "", None
    op, source = _place(site, proposal)
    node = proposal.node or site.node
    once = node is not None and len([i for i in site.alike(node) if site.program.nodes[i].module == node.module]) == 1
    line = None if source is None or not once else _changed(source.text, op, proposal)
    return (in_words(site, proposal), "", None) if line is None else (proposal.text, line, source)


def in_words(site: Site, proposal: Proposal) -> str:
    """Return the sentence that says what to do, with the operand as it has to be written; `x` where its line does not show it."""
    op, source = _place(site, proposal)
    where = f" at {source}" if proposal.node is not None else ""
    found = None if source is None else _operand_of(source.text, op, proposal)
    shown = "x" if found is None or source is None else _atom(source.text, found[1])
    return f"{proposal.text}{where}: {proposal.wrap.replace('{x}', shown)}"


def _place(site: Site, proposal: Proposal) -> tuple[str, SourceLine | None]:
    """Return the op whose operand is changed, and its line."""
    if proposal.node is None:
        return site.op, site.culprit.source
    return base_name(str(proposal.node.target)), proposal.node.source


def _changed(text: str, op: str, proposal: Proposal) -> str | None:
    """Return the line with the operand of its only call of `op` wrapped; None where there is not one such call."""
    found = _operand_of(text, op, proposal)
    if found is None:
        return None
    place, operand = found
    if proposal.wrap.count("{x}") > 1 and not isinstance(operand, ast.Name | ast.Attribute):
        return None  # written twice, it would be computed twice
    wrapped = proposal.wrap.replace("{x}", _atom(text, operand))
    line = _replaced(text, place if proposal.whole else operand, wrapped)
    return line if line is not None and _parsed(line) is not None else None


def _operand_of(text: str, op: str, proposal: Proposal) -> tuple[ast.expr, ast.expr] | None:
    """Return the only call of `op` in a line and its operand that is changed; None where there is not one such call."""
    tree = _parsed(text)
    places = [node for node in ast.walk(tree) if isinstance(node, ast.expr) and _calls(node, op)] if tree else []
    if len(places) != 1 or proposal.operand not in _FIRST | _SECOND:
        return None
    operand = _operand(places[0], op, second=proposal.operand in _SECOND)
    if operand is None or isinstance(operand, ast.Constant | ast.Starred):
        return None
    return places[0], operand


def _parsed(text: str) -> ast.Module | None:
    """Return the syntax of a line, of the head of a block as well; None for a part of a statement."""
    with contextlib.suppress(SyntaxError):
        return ast.parse(f"{text} pass" if text.endswith(":") else text)
    return None


_FIRST, _SECOND = {"self", "A", "input"}, {"other"}
"""Schema names of operands by their place in a function."""


def _calls(node: ast.expr, op: str) -> bool:
    name = op.strip("_")
    if isinstance(node, ast.BinOp):
        return name in _OPERATORS and isinstance(node.op, _OPERATORS[name])
    return isinstance(node, ast.Call) and _called(node).strip("_") in _NAMES.get(name, {name})


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _operand(place: ast.expr, op: str, *, second: bool) -> ast.expr | None:
    """Return the first or second operand of an operator, a function or a method; None where it cannot be told which."""
    if isinstance(place, ast.BinOp):
        return place.right if second else place.left
    assert isinstance(place, ast.Call)
    operands = list(place.args)
    if isinstance(place.func, ast.Attribute) and not _is_function(place.func.value, operands, op):
        operands.insert(0, place.func.value)
    return operands[second] if len(operands) > second else None


def _is_function(before: ast.expr, arguments: list[ast.expr], op: str) -> bool:
    """Whether a call after a dot is one of a module's function, not of a tensor's method."""
    last = before.attr if isinstance(before, ast.Attribute) else before.id if isinstance(before, ast.Name) else ""
    if last in _MODULES or last == "self":
        return True
    if op.strip("_") == "to_copy":
        return False
    if op.strip("_") in _OF_TWO:
        return len(arguments) > 1
    numbers = (ast.Constant, ast.UnaryOp, ast.Tuple, ast.List)
    if op.strip("_") in _ALONG:
        return len(arguments) > 1 and not isinstance(arguments[0], numbers)
    return bool(arguments) and not isinstance(arguments[0], numbers)


_OF_TWO = {
    "div",
    "true_divide",
    "pow",
    "xlogy",
    "special_xlogy",
    "special_xlog1py",
    "remainder",
    "fmod",
    "atan2",
    "mul",
} | {
    "sub",
    "add",
    "floor_divide",
}
"""Ops of two operands."""

_ALONG = {
    "softmax",
    "log_softmax",
    "logsumexp",
    "linalg_vector_norm",
    "norm",
    "std",
    "var",
    "sum",
    "mean",
    "logcumsumexp",
}
"""Ops that work along dimensions, which follow the operand."""


_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
"""Expressions that a dot or an operator may follow as they stand."""


def _atom(text: str, node: ast.expr) -> str:
    """Return an expression as it is written in a line, with brackets around it where something may follow."""
    written = ast.get_source_segment(text, node) or ast.unparse(node)
    return written if isinstance(node, _ATOMS) else f"({written})"


def _replaced(text: str, node: ast.expr, new: str) -> str | None:
    """Return the text with the source of one expression replaced, and with it the brackets around it that are no longer needed."""
    if node.lineno != 1 or node.end_lineno != 1 or node.end_col_offset is None:
        return None
    encoded = text.encode()
    before, after = encoded[: node.col_offset].decode(), encoded[node.end_col_offset :].decode()
    if re.search(r"(^|[^\w)\]])\($", before) and after.startswith(")") and isinstance(_expression(new), _ATOMS):
        before, after = before[:-1], after[1:]
    return f"{before}{new}{after}"


def _expression(text: str) -> ast.expr | None:
    """Return the syntax of an expression; None where it is none."""
    with contextlib.suppress(SyntaxError):
        return ast.parse(text, mode="eval").body
    return None
