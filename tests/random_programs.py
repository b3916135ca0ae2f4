"""Random training steps with planted faults, as plain Python source: one call a line, so that a line names a fault.

Every value has 4 rows and 6 columns. A fault is planted by zeros in a buffer `keep_i` of the model, which is healthy in itself;
with ones there instead the fault is repaired and nothing else of the program changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, COLUMNS = 4, 6
FILE = "/random/program.py"
"""The name under which a program's source is compiled."""

UNARY = (
    "torch.tanh({a})",
    "torch.sigmoid({a})",
    "F.relu({a})",
    "F.gelu({a})",
    "torch.sin({a})",
    "-{a}",
    "{a}.abs()",
    "0.5 * {a}",
    "F.softplus({a})",
    "{a}.clamp(-2, 2)",
    "{a}.flip(0)",
    "{a}.roll(1, 1)",
    "{a}.T.contiguous().T",
    "{a}.cumsum(1) / 3",
    "{a}.softmax(-1)",
    "{a}.log_softmax(-1) / 4",
    "{a} - {a}.mean(-1, keepdim=True)",
    "{a} + {a}.amax(0)",
    "{a}.sum(-1, keepdim=True).expand(4, 6) / 6",
    "F.layer_norm({a}, (6,))",
    "{a} @ model.w / 3",
    "F.linear({a}, model.w, model.b)",
    "({a} @ {a}.T).softmax(-1) @ {a}",
    "F.dropout({a}, 0.3)",
    "{a}.sort(-1).values",
    "{a}.topk(3, -1).values.repeat(1, 2)",
    "{a}.detach()",
    "torch.exp(-{a}.abs())",
    "{a}.reshape(2, 2, 6).transpose(0, 1).reshape(4, 6)",
    "torch.logsumexp({a}, -1, keepdim=True).expand(4, 6) / 2",
    "{a}.square().mean(-1, keepdim=True).sqrt() * {a} / ({a}.abs() + 1)",
    "({a} + batch['bias']).softmax(-1)",
    "{a}.masked_fill(batch['hidden'], float('-inf')).softmax(-1)",
    "torch.cat([{a}[:, 3:], {a}[:, :3]], 1)",
    "{a}[batch['order']]",
    "{a}.gather(1, batch['pick'])",
    "torch.zeros(4, 6).index_add(0, batch['order'], {a})",
    "torch.zeros(4, 6).scatter_add(1, batch['pick'], {a}) / 2",
    "{a}.cummax(-1).values",
    "F.pad({a}, (1, 0))[:, :6]",
    "torch.einsum('ij,jk->ik', {a}, model.w) / 3",
    "{a}.unfold(1, 2, 1).amax(-1).repeat(1, 2)[:, :6]",
    "{a}.norm(dim=-1, keepdim=True) * {a} / 5",
    "{a}.pow(3) / ({a}.pow(2) + 1)",
    "{a}.var(-1, keepdim=True) * {a} / 5",
)
"""Calls on one value."""

BINARY = (
    "0.5 * ({a} + {b})",
    "{a} - 0.5 * {b}",
    "0.3 * {a} * {b}",
    "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})",
    "torch.where({a} > 0, {a}, {b})",
    "torch.where(batch['hidden'], {a}, {b})",
    "torch.cat([{a}[:2], {b}[2:]])",
    "torch.cat([{a}[:, :1], {b}[:, 1:]], 1)",
    "({a} @ {b}.T) @ {b} / 20",
    "{a} / (1 + {b}.abs())",
    "torch.lerp({a}, {b}, 0.3)",
    "torch.addcmul({a}, {b}, {b}, value=0.1)",
    "torch.stack([{a}, {b}]).mean(0)",
    "torch.stack([{a}, {b}]).max(0).values",
    "{a} + {b}[0]",
    "F.softmax({b}, -1) * {a}",
    "torch.bmm({a}[:, :, None], {b}[:, None, :]).mean(1)",
    "torch.hypot({a}, {b} + 0.1) / 2",
)
"""Calls on two values."""

IN_PLACE = (
    "{v} = {a}.clone(); {v}[:, 1].mul_(0.5)",
    "{v} = {a}.clone(); {v}[1:3].add_({b}[1:3])",
    "{v} = {a}.clone(); {v}[:, 2] = 0.25",
    "{v} = {a}.clone(); {v}[2] = {b}[1]",
    "{v} = {a} * 1; {v}.add_({b}).mul_(0.5)",
    "{v} = {a}.clone(); {v}[batch['hidden']] = 0.5",
    "{v} = {a}.clone(); {v}.masked_fill_(batch['hidden'], 0.1)",
    "{v} = torch.empty(4, 6); {v}[:, ::2] = {a}[:, ::2]; {v}[:, 1::2] = {b}[:, 1::2]",
    "{v} = {a} * 1; {v}.T[3].neg_()",
    "{v} = torch.zeros(4, 6); {v}[:2] = {a}[:2]; {v}[2:].copy_({b}[2:])",
)
"""Statements that write in place."""

ENDS = (
    "{t}.mean()",
    "{t}.square().mean()",
    "{t}.abs().sum() / 9",
    "{t}[0].mean()",
    "{t}[:, 1:].mean()",
    "{t}.tanh().mean()",
)
"""How a value enters the loss."""

HIDING = (
    "{a} / {b}.abs().neg().exp().clamp(max=1)",
    "torch.log(1 / (1 + {b}.abs())) + {a}",
    "{a} / (2 / (1 + {b}.square())).sqrt()",
)
"""Calls that a finite value, made of an infinity, can break; fine on healthy values."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        text: The guilty call. `{k}` is 0 where the fault is planted and 1 elsewhere, `{p}` a positive value that is 0 there.
        makes: What is bad afterwards.
        rows: Whether whole rows are planted.
        before: A statement that makes `{q}` of healthy values.
    """

    text: str
    makes: str
    rows: bool = False
    before: str = ""


FORWARD = (
    Kind("{p}.log()", "inf"),
    Kind("1 / {p}", "inf"),
    Kind("{a} / {p}", "inf"),
    Kind("{p} / {p}", "nan"),
    Kind("({p} - 0.25).sqrt()", "nan"),
    Kind("torch.exp(100 * (1 - {k}))", "inf"),
    Kind("(1e5 * (1 - {k}) + 1).half().float()", "inf"),
    Kind("{p}.pow(-1.5)", "inf"),
    Kind("{p}.rsqrt()", "inf"),
    Kind("torch.log1p({p} - 1)", "inf"),
    Kind("torch.acos(1.5 - {k})", "nan"),
    Kind("(2e38 * (1 - {k}) + 1) * 2", "inf"),
    Kind("{q} * 0.0", "nan", before="{q} = torch.where({k} > 0, 1.0, float('inf'))"),
    Kind("{q} - {q}", "nan", before="{q} = {a}.masked_fill(~{m}, 0.0).masked_fill({k} == 0, float('inf'))"),
    Kind(
        "{q}.softmax(-1)",
        "nan",
        rows=True,
        before="{q} = {a}.masked_fill(~{m}, 0.0).masked_fill({k} == 0, float('-inf'))",
    ),
    Kind("{p} / {p}.sum(-1, keepdim=True)", "nan", rows=True),
    Kind("{p} / {p}.norm(dim=-1, keepdim=True)", "nan", rows=True),
    Kind("{p}.log().mean(-1, keepdim=True).expand(4, 6)", "inf", rows=True),
    Kind("(3e38 * (1 - {k})) @ torch.ones(6, 6)", "inf", rows=True),
    Kind("torch.logdet({p}[:, 0, None, None] * torch.eye(2))[:, None].expand(4, 6)", "inf", rows=True),
    Kind("{p}.log_softmax(-1) * 0 + F.kl_div({p}.log(), {p}, reduction='none')", "inf"),
)
"""Faults that make non-finite values in the forward pass."""

STATE = (Kind("{a} + batch['extra_{i}']", "batch['extra_{i}']"), Kind("{a} * model.extra_{i}", "extra_{i}"))
"""Tensors from outside that are bad where a fault is planted; `makes` is how they are called."""

BACKWARD = (
    Kind("{p}.sqrt()", "gradient"),
    Kind("{p}.pow(0.3)", "gradient"),
    Kind("{p}.square().sum(-1, keepdim=True).sqrt().expand(4, 6)", "gradient", rows=True),
    Kind("({p} * 0 + {k}).acos() / 3", "gradient inverse"),
    Kind("{p}.pow(0.5) * {a}", "gradient"),
    Kind("torch.atan2({p}.sqrt(), {a}.detach().abs() + 1)", "gradient"),
)
"""Faults whose value is finite and whose derivative is not."""

RUNNING = (
    Kind("hooked({a} * model.b, lambda g: g / {p})", "gradient"),
    Kind("hooked({a} * model.b, lambda g: g * {p}.rsqrt())", "gradient"),
    Kind("checkpoint(lambda a: (a * 0 + {p}).log(), {a} * model.b, use_reentrant=False)", "inf"),
    Kind("checkpoint(lambda a: (a * 0 + {p}).sqrt(), {a} * model.b, use_reentrant=False)", "gradient"),
    Kind("sum({p} / {p} + turn * {a} for turn in range(3)) / 6", "nan"),
    Kind("sum({p}.sqrt() + turn * {a} for turn in range(3)) / 6", "gradient"),
)
"""Faults in code that runs in the backward pass, or more than once."""

SPECIAL = (
    "checkpoint(torch.tanh, {a} * model.b, use_reentrant=False)",
    "hooked({a} * model.b, lambda g: g.clamp(-1, 1))",
    "hooked({a} * model.b, lambda g: torch.nan_to_num(g, nan=0.0, posinf=1.0, neginf=-1.0))",
    "hooked({a} * model.b, lambda g: g * ({b}.detach().abs() < 2))",
    "sum({a}.sin() / (1 + turn) for turn in range(3)) / 2",
)
"""Healthy calls of the same sorts; a hook may keep a bad gradient from spreading."""

PLANTING = (
    "{p} = ({a}.sigmoid() + 0.5) * {k}",
    "{p} = torch.where({m}, {a}.sigmoid() + 0.5, {k})",
    "{p} = {a}.sigmoid().add(0.5).mul_({k})",
)

MASKING = (
    "torch.where({m}, {a}, 0.5)",
    "{a}.masked_fill(~{m}, 0.5)",
    "torch.nan_to_num({a}, nan=0.1, posinf=1.0, neginf=-1.0)",
    "{a}.clamp(-2, 2)",
    "torch.tanh({a})",
    "torch.exp(-{a}.abs())",
    "1 / (1 + {a}.abs())",
    "{a}[batch['rows_{i}']]",
    "torch.where({m}.all(-1, keepdim=True), {a}, {b})",
    "{b} * 1",
    "{a}.detach().argmax(-1, keepdim=True) * 0.1 + {b}",
    "torch.nanmean({a}, -1, keepdim=True).clamp(-2, 2).expand(4, 6)",
    "{b} + 0.1 * {a}.detach().isfinite()",
    "{a} * {m}",
)
"""Calls that may keep a fault from spreading."""


def hooked(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Register a hook for the gradient of a tensor, where it has any, and return the tensor."""
    if tensor.requires_grad:
        tensor.register_hook(hook)
    return tensor


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault: the lines that may be named for it, and its elements."""

    number: int
    line: int
    where: tuple[tuple[int, int], ...]
    name: str = ""

    @property
    def culprit(self) -> int | str:
        """What a finding names for it: the line, or the tensor that came in bad."""
        return self.name or self.line


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """The source of a step and the faults in it."""

    lines: tuple[str, ...]
    faults: tuple[Fault, ...]
    seed: int = 0

    @property
    def source(self) -> str:
        """The program as Python."""
        return "\n".join(["def step(model, batch):", *(f"    {line}" for line in self.lines)])

    def __repr__(self) -> str:
        """Show the source: it is what a failing test has to print."""
        return f"{self.source}\n# faults: {self.faults}, seed {self.seed}\n"

    def step(self) -> Callable[[Any, Any], torch.Tensor]:
        """Compile the program."""
        scope: dict[str, Any] = {"torch": torch, "F": nn.functional, "hooked": hooked, "checkpoint": checkpoint}
        exec(compile(self.source, FILE, "exec"), scope)  # noqa: S102
        step: Callable[[Any, Any], torch.Tensor] = scope["step"]
        return step

    def build(
        self,
        repaired: frozenset[int] = frozenset(),
        spared: dict[int, tuple[int, ...]] | None = None,
        repair: float = 1.0,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Return model and batch, with `repair` in the place of the zeros of some faults; of those in `spared` these rows stay."""
        generator = torch.Generator().manual_seed(self.seed)
        model = nn.Module()
        model.w = nn.Parameter(torch.randn(COLUMNS, COLUMNS, generator=generator))
        model.b = nn.Parameter(torch.randn(COLUMNS, generator=generator))
        extras: dict[str, torch.Tensor] = {}
        for fault in self.faults:
            keep = torch.ones(ROWS, COLUMNS)
            extra = torch.randn(ROWS, COLUMNS, generator=generator)
            for row, column in fault.where:
                stays = fault.number not in repaired and (spared is None or row in spared.get(fault.number, (row,)))
                keep[row, column] = 0 if stays else repair
                if stays:
                    extra[row, column] = float("nan") if column % 2 else float("inf")
            if fault.name == f"extra_{fault.number}":
                model.register_parameter(fault.name, nn.Parameter(extra))
            elif fault.name:
                extras[f"extra_{fault.number}"] = extra
            model.register_buffer(f"keep_{fault.number}", keep)
        hidden = torch.rand(ROWS, COLUMNS, generator=generator) < 0.3
        hidden[:, 0] = False
        batch = {
            **extras,
            "x": torch.randn(ROWS, COLUMNS, generator=generator),
            "y": torch.randn(ROWS, COLUMNS, generator=generator),
            "hidden": hidden,
            "bias": torch.zeros(ROWS, COLUMNS).masked_fill(hidden, float("-inf")),
            "order": torch.randperm(ROWS, generator=generator),
            "pick": torch.randint(0, COLUMNS, (ROWS, COLUMNS), generator=generator),
        }
        for fault in self.faults:
            bad = {row for row, _ in fault.where}
            sound = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
            for row, column in fault.where:
                sound[row, column] = False
            batch[f"sound_{fault.number}"] = sound
            good = [row for row in range(ROWS) if row not in bad]
            batch[f"rows_{fault.number}"] = torch.tensor(
                [row if row in good or not good else good[0] for row in range(ROWS)]
            )
        return model, batch


@dataclasses.dataclass(frozen=True)
class Plan:
    """What programs are to be drawn.

    Attributes:
        least: Fewest faults.
        most: Most faults; each is masked, or not, by whatever comes after it.
        length: Most statements, those that plant faults counted once.
        backward: Whether faults of the gradient are among them.
        hiding: Whether calls are among them that an infinity's finite traces can break.
        state: Whether tensors from outside may be bad.
        running: Whether there are hooks, recomputed calls and loops.
    """

    least: int = 0
    most: int = 4
    length: int = 14
    backward: bool = False
    hiding: bool = False
    state: bool = False
    running: bool = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of fault to draw from."""
        return FORWARD + BACKWARD * self.backward + STATE * (3 * self.state) + RUNNING * (3 * self.running)


class _Writer:
    """A program under construction."""

    def __init__(self, draw: st.DrawFn, plan: Plan) -> None:
        """Start with one value of the batch and one of the batch and a parameter."""
        self.draw, self.plan = draw, plan
        self.lines = ["v0 = batch['x'] * 1", "v1 = batch['y'] * model.b"]
        self.names = ["v0", "v1"]
        self.faults: list[Fault] = []

    def pick(self, items: Sequence[Any]) -> Any:
        """Draw one of several things."""
        return self.draw(st.sampled_from(items))

    def write(self, text: str, **slots: Any) -> str:
        """Add a line that makes a new value and return its name."""
        name = f"v{len(self.lines)}"
        text = text.format(v=name, **slots)
        self.lines.append(text if text.startswith(f"{name} =") else f"{name} = {text}")
        return name

    def operands(self) -> dict[str, str]:
        """Draw two values, one of them recent."""
        return {"a": self.pick(self.names[-4:]), "b": self.pick(self.names)}

    def statement(self) -> str:
        """Add a healthy statement and return the name of its value."""
        tables = [UNARY, UNARY, BINARY, BINARY, IN_PLACE, IN_PLACE, HIDING if self.plan.hiding else UNARY]
        tables += [SPECIAL, SPECIAL] * self.plan.running
        return self.write(self.pick(self.pick(tables)), **self.operands())

    def fault(self) -> str:
        """Plant a fault, perhaps mask it, and return the name of the value."""
        number, kind = len(self.faults), self.pick(self.plan.kinds)
        slots = self.operands() | {
            "k": f"model.keep_{number}",
            "m": f"batch['sound_{number}']",
            "p": f"p{number}",
            "q": f"q{number}",
            "i": str(number),
        }
        self.lines.append(self.pick(PLANTING).format(**slots))
        if kind.before:
            self.lines.append(kind.before.format(**slots))
        name = self.write(kind.text, **slots)
        outside = kind.makes.format(**slots) if kind in STATE else ""
        self.faults.append(Fault(number, len(self.lines) + 1, self.places(rows=kind.rows), outside))
        return self.write(self.pick(MASKING), **slots | {"a": name}) if self.draw(st.booleans()) else name

    def places(self, *, rows: bool) -> tuple[tuple[int, int], ...]:
        """Draw where to plant: one or two whole rows, or up to three elements."""
        row, column = st.integers(0, ROWS - 1), st.integers(0, COLUMNS - 1)
        if rows:
            chosen = self.draw(st.sets(row, min_size=1, max_size=2))
            return tuple((r, c) for r in sorted(chosen) for c in range(COLUMNS))
        return tuple(sorted(self.draw(st.sets(st.tuples(row, column), min_size=1, max_size=3))))

    def finish(self, tails: Sequence[str]) -> RandomProgram:
        """Add the loss over some values and return the program."""
        parts = [self.pick(ENDS).format(t=tail) for tail in dict.fromkeys([*tails, self.names[-1]])]
        self.lines += [f"loss = {' + '.join(parts)} + 0.01 * v1.mean()", "return loss"]
        return RandomProgram(tuple(self.lines), tuple(self.faults), self.draw(st.integers(0, 3)))


@st.composite
def programs(draw: st.DrawFn, plan: Plan = Plan()) -> RandomProgram:
    """Draw programs as planned."""
    writer, tails = _Writer(draw, plan), []
    steps = draw(st.integers(min(plan.length, 2 + plan.least), plan.length))
    for step in range(steps):
        due = steps - step <= plan.least - len(writer.faults)
        plants = due or (len(writer.faults) < plan.most and draw(st.integers(0, 9)) > 6)
        writer.names.append(writer.fault() if plants else writer.statement())
        if draw(st.integers(0, 4)) == 0:
            tails.append(writer.names[-1])
    return writer.finish(tails)
