"""Remedies are executed on the step, called verified only when the step came out finite, and never cost many executions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kinds import KINDS, Kind, fields, gradients, infinities, prepared, structure
from torch import nn

from bisect_nan import Culprit, Guard, NonFiniteStep, Snapshot, locate
from bisect_nan.answer.trial import EXECUTIONS, Trial
from bisect_nan.causes import CAUSES
from bisect_nan.finding import Remedy
from bisect_nan.remedies import BY_CAUSE, Proposal, Site
from bisect_nan.remedies.proposal import instead

PARTS = (fields, gradients, infinities, structure)
"""The modules that fill `KINDS`."""


def remedy_of(model: Any, batch: Any, step: Any) -> Remedy:
    """Return the remedy of a step's only culprit."""
    (culprit,) = locate(Snapshot.capture(model, batch, step)).culprits
    assert culprit.remedy is not None
    return culprit.remedy


@pytest.mark.filterwarnings("ignore:std", "ignore:Sparse invariant")
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.step.__name__)
def test_every_kind_has_a_verified_remedy(case: Kind) -> None:
    """For each kind of fault a change is found that makes its step finite; written into its source it does so in plain PyTorch."""
    model, data = prepared()
    torch.manual_seed(5)
    culprits = locate(Snapshot.capture(model, data, case.step)).culprits
    assert [culprit.remedy is not None and culprit.remedy.verified for culprit in culprits] == [True] * len(culprits)
    if all(culprit.remedy is not None and culprit.remedy.code for culprit in culprits):
        assert_finite(rewritten(case, culprits))


def rewritten(case: Kind, culprits: Sequence[Culprit]) -> Callable[[Any, Any], Any]:
    """Return a kind's step, compiled from its source with the remedies' lines in it."""
    path = Path(str(inspect.getsourcefile(case.step)))
    lines = path.read_text(encoding="utf-8").splitlines()
    for remedy in [culprit.remedy for culprit in culprits]:
        assert remedy is not None
        assert remedy.source is not None
        place = remedy.source.line - 1
        lines[place] = lines[place][: len(lines[place]) - len(lines[place].lstrip())] + remedy.code
    module, known = ModuleType(f"kinds.{path.stem}"), len(KINDS)
    exec(compile("\n".join(lines), str(path), "exec"), module.__dict__)  # noqa: S102  (our own file)
    del KINDS[known:]
    step: Callable[[Any, Any], Any] = getattr(module, case.step.__name__)
    return step


def assert_finite(step: Callable[[Any, Any], Any]) -> None:
    """Run a step in plain PyTorch and look at its loss and gradients."""
    model, data = prepared()
    torch.manual_seed(5)
    result = step(model, data)
    loss = sum(result.values()) if isinstance(result, dict) else result
    loss.backward()
    gradients = [parameter.grad.to_dense() for parameter in model.parameters() if parameter.grad is not None]
    assert all(bool(tensor.isfinite().all()) for tensor in [loss, *gradients])


def test_every_cause_has_its_remedies() -> None:
    """The table of remedies has one row for each entry of the catalog."""
    assert set(BY_CAUSE) == {cause.name for cause in CAUSES}


def test_executions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing helps, the step is executed twice for each culprit, and the remedy is not called verified."""
    made: list[Trial] = []
    original = Trial.remedies

    def remedies(trial: Trial) -> list[Remedy | None]:
        made.append(trial)
        return original(trial)

    monkeypatch.setattr(Trial, "remedies", remedies)

    def hopeless(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x).exp() * 1e30
        return (y * 1e30).square().sum() * 1e30

    (culprit,) = locate(Snapshot.capture(nn.Linear(3, 2), torch.ones(2, 3), hopeless)).culprits
    assert culprit.remedy is None or not culprit.remedy.verified
    assert [trial.executions for trial in made] == [EXECUTIONS]


def test_remedies_can_be_left_out() -> None:
    """`remedies=False` ends with the cause."""
    snapshot = Snapshot.capture(nn.Linear(2, 1), torch.zeros(2, 2), lambda m, x: (m(x) * 0).log().sum())
    finding = locate(snapshot, remedies=False)
    assert finding.culprits[0].remedy is None
    assert "remedy" not in finding.search.seconds


def test_the_line_to_write_is_the_line_with_the_change() -> None:
    """The remedy's code is the user's own line, changed, and its loss is what that line gives."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        score = model(x).relu() * 0
        return torch.log(score).mean()

    remedy = remedy_of(nn.Linear(3, 2), torch.ones(4, 3), step)
    assert remedy.verified
    assert remedy.code == "return torch.log(score.clamp(min=1e-6)).mean()"
    assert remedy.loss == pytest.approx(float(torch.tensor(1e-6).log()))


def test_the_line_keeps_its_own_writing() -> None:
    """Quotes and blanks of the operand stay as they are, and brackets around it are used again."""
    batch = {"x": torch.ones(2, 3)}
    snapshot = Snapshot.capture(nn.Linear(3, 2), batch, lambda model, b: (model(b["x"])*0).log().mean())  # fmt: skip
    (culprit,) = locate(snapshot).culprits
    assert culprit.remedy is not None
    assert '(model(b["x"])*0).clamp(min=1e-6).log().mean()' in culprit.remedy.code


def test_an_operand_is_named_though_its_line_cannot_be_changed_by_itself() -> None:
    """Two such calls that one line makes stand in a loop: the sentence shows what has to be written instead."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        score = model(x).relu() * 0
        return sum(torch.log(score + turn).mean() for turn in range(2))  # type: ignore[return-value]

    remedy = remedy_of(nn.Linear(3, 2), torch.ones(4, 3), step)
    assert not remedy.code
    assert remedy.text.endswith(": (score + turn).clamp(min=1e-6)")


def test_the_head_of_a_block_is_changed_as_well() -> None:
    """A line that ends with a colon is half a statement, and shows its operand all the same."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        score = model(x).relu() * 0
        for value in [torch.log(score).mean()]:
            return value
        return score.sum()

    remedy = remedy_of(nn.Linear(3, 2), torch.ones(4, 3), step)
    assert remedy.code == "for value in [torch.log(score.clamp(min=1e-6)).mean()]:"


def test_a_number_of_python_is_kept_away_from_zero_as_one() -> None:
    """It has no methods of tensors."""
    scale = 0.0

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) / scale).mean()

    remedy = remedy_of(nn.Linear(3, 2), torch.ones(4, 3), step)
    assert remedy.verified
    assert remedy.code == "return (model(x) / max(scale, 1e-6)).mean()"


def test_a_remedy_that_only_moves_the_fault_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 in the place of NaN repairs a value; the loss is then finite, and its gradient is not."""

    def zeros(site: Site) -> Iterator[Proposal]:
        change = instead(lambda arguments: arguments["self"].sqrt().nan_to_num())
        yield Proposal("zeros", "write 0 for NaN", changes=site.everywhere(change), local=False)

    monkeypatch.setitem(BY_CAUSE, "sqrt_of_negative", (zeros,))
    remedy = remedy_of(nn.Linear(3, 2), torch.ones(4, 3), lambda m, x: (m(x).abs() - 100).sqrt().sum())
    assert not remedy.verified
    assert remedy.loss == 0
    assert "is non-finite" in remedy.outcome


def test_several_culprits_are_repaired_together() -> None:
    """None of two faults is repaired by the other's remedy; together they make the step finite."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x).relu() * 0
        first = torch.log(y).mean()
        second = (y / y).mean()
        return first + second

    finding = locate(Snapshot.capture(nn.Linear(3, 2), torch.ones(4, 3), step))
    assert len(finding.culprits) == 2
    assert all(culprit.remedy is not None and culprit.remedy.verified for culprit in finding.culprits)


class Cube(torch.autograd.Function):
    """A Function whose backward code is its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return x cubed."""
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the derivative."""
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


def test_the_backward_code_of_a_function_is_executed() -> None:
    """Also where the loss was bad: it was recorded for this, and runs again on the new gradients."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = Cube.apply(model(x))
        return (y * 0).log().mean()

    remedy = remedy_of(nn.Linear(3, 2), torch.ones(4, 3), step)
    assert remedy.verified
    assert remedy.outcome.endswith("all 2 gradients finite (norm 0)")


class Unforgiving(Cube):
    """A Function whose backward code refuses NaN."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the derivative."""
        if not bool(gradients[0].isfinite().all()):
            raise ValueError(ctx)
        return gradients[0]


def test_unseen_backward_code_is_told() -> None:
    """Backward code that did not come to its end cannot be executed: the remedy says so and is not called verified."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = Unforgiving.apply(model(x))
        return (y * 0).log().mean()

    remedy = remedy_of(nn.Linear(3, 2), torch.ones(4, 3), step)
    assert not remedy.verified
    assert "Unforgiving" in remedy.outcome


class Brittle(Cube):
    """A Function whose backward code divides by its input."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return what is infinite at 0."""
        (x,) = ctx.saved_tensors
        return gradients[0] / x


def test_backward_code_that_fails_is_not_called_verified() -> None:
    """A repaired loss is not enough: the Function's own derivative at 0 is infinite."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = Brittle.apply(model(x) * 0)
        return (y.log() + 0 * y).mean() + y.mean()

    culprits = locate(Snapshot.capture(nn.Linear(3, 2), torch.ones(4, 3), step)).culprits
    assert all(culprit.remedy is None or not culprit.remedy.verified for culprit in culprits)


def test_a_loss_that_a_function_returns_is_known() -> None:
    """Behind the last Function there is no call that would show what autograd tracked."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = Cube.apply((model(x) * 0).log().clamp(max=0).mean())
        return loss

    remedy = remedy_of(nn.Linear(3, 2), torch.ones(4, 3), step)
    assert "all 2 gradients finite" in remedy.outcome


def test_hooks_are_told() -> None:
    """Hooks change gradients after autograd: a run without them is no proof."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        y.register_hook(lambda gradient: gradient * 2)
        return (y - y.detach()).abs().sqrt().mean()

    remedy = remedy_of(nn.Linear(3, 2), torch.ones(4, 3), step)
    assert not remedy.verified
    assert "hooks" in remedy.outcome


def test_healthy_values_stay() -> None:
    """A floor that would change healthy results is not taken: the smallest that helps is."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tiny = torch.tensor([1e-9, 1e-10, 0.0]) + 0 * model(x).sum()
        return (x.sum() / tiny).clamp(max=1e9).log().mean()

    culprits = locate(Snapshot.capture(nn.Linear(3, 2), torch.ones(4, 3), step)).culprits
    codes = [culprit.remedy.code for culprit in culprits if culprit.remedy]
    assert all("1e-12" in code for code in codes if "clamp(min" in code)


@pytest.mark.parametrize("half", [torch.float16])
def test_half_precision_is_widened(half: torch.dtype) -> None:
    """Beyond 65504 the call runs in float32 until the values fit again."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x.to(half))
        return (y.square().mean() / 1000).float()

    model = nn.Linear(3, 2).to(half)
    with torch.no_grad():
        model.weight.fill_(200)
    remedy = remedy_of(model, torch.ones(4, 3), step)
    assert remedy.verified
    assert remedy.name == "float32_island"
    assert remedy.loss == pytest.approx(360, rel=0.01)


def test_hooks_are_told_where_no_backward_pass_was_recorded() -> None:
    """The loss was bad already, and nobody saw what the hooks do."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        y.register_hook(lambda gradient: gradient / 0)
        return (y * 0).log().mean()

    remedy = remedy_of(nn.Linear(3, 2), torch.ones(4, 3), step)
    assert not remedy.verified
    assert "hooks" in remedy.outcome
    model = nn.Linear(3, 2)
    model.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert not remedy_of(model, torch.ones(4, 3), lambda m, x: (m(x) * 0).log().mean()).verified


def test_two_islands_are_executed_together() -> None:
    """Each of two lines that overflow in half precision is widened."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x.half())
        first = y.square().mean() / 1000
        second = (y * y * 2).mean() / 1000
        return first.float() + second.float()

    model = nn.Linear(3, 2).half()
    with torch.no_grad():
        model.weight.fill_(150)
    culprits = locate(Snapshot.capture(model, torch.ones(4, 3), step)).culprits
    assert culprit_names(culprits) == ["float32_island"] * 2
    assert all(culprit.remedy is not None and culprit.remedy.verified for culprit in culprits)


def culprit_names(culprits: tuple[Culprit, ...]) -> list[str]:
    """Return the names of the remedies."""
    return [culprit.remedy.name for culprit in culprits if culprit.remedy]


def test_bad_state_is_replaced() -> None:
    """A bad row of the batch is left out, a bad parameter restored."""
    batch = torch.ones(4, 3)
    batch[2] = float("nan")
    finding = locate(Snapshot.capture(nn.Linear(3, 2), batch, lambda m, x: m(x).mean()))
    assert culprit_names(finding.culprits) == ["skip_samples"]
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0, 0] = float("inf")
    finding = locate(Snapshot.capture(model, torch.ones(4, 3), lambda m, x: m(x).mean()))
    assert culprit_names(finding.culprits) == ["restore_parameter"]
    assert all(culprit.remedy is not None and culprit.remedy.verified for culprit in finding.culprits)


class Reversal(torch.autograd.Function):
    """Returns what it is given, and turns its gradient round: no call tells of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return a view of x."""
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the opposite, which is no number."""
        del ctx
        return -gradients[0] / 0


def clamped_logarithm(y: torch.Tensor) -> torch.Tensor:
    """Return what the catalog's first remedy repairs."""
    return (y * 0).log().mean()


UNSEEN: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "a Function that makes no value": lambda m, x: clamped_logarithm(Reversal.apply(m(x))),
    "a decision": lambda m, x: (y := (m(x) * 0).log()).mean() * (math.nan if bool(y.isinf().any()) else math.inf),
    "a comparison": lambda m, x: (y := (m(x) * 0).log()).mean() * (math.nan if torch.equal(y, y + 1) else math.inf),
    "a backward pass of its own": lambda m, x: (m(x).sum().backward(), clamped_logarithm(m(x)))[1],  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_the_run_does_not_contain_is_no_proof(name: str) -> None:
    """Python code in the backward pass that no call tells of, decisions on changed numbers, gradients from elsewhere."""
    culprits = locate(Snapshot.capture(nn.Linear(3, 2), torch.ones(4, 3), UNSEEN[name])).culprits
    assert all(culprit.remedy is None or not culprit.remedy.verified for culprit in culprits)


def test_other_calls_of_the_line_keep_their_healthy_results() -> None:
    """A floor under the base of one power would cut the negative bases of another on the same line."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        s = model(x) * torch.tensor([0.0, 1.0, 1.0, 1.0])[:, None]
        return ((s**2).sum(1) ** 0.5).mean()

    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    with torch.no_grad():
        model.weight.fill_(-1)
    remedy = remedy_of(model, x, step)
    assert not remedy.verified or remedy.loss == pytest.approx(float(step(model, x).detach()), rel=1e-3)


class Layered(nn.Module):
    """Calls a layer of its own by attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.softmax = nn.Linear(3, 3), nn.Softmax(-1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x).masked_fill(mask, -math.inf)
        weights: torch.Tensor = self.softmax(scores)
        return weights.square().sum()


def test_a_layer_of_the_model_is_no_tensor() -> None:
    """`self.softmax(scores)` is changed at its argument."""
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2] = True
    batch = {"x": torch.ones(4, 3), "mask": mask}
    remedy = remedy_of(Layered(), batch, lambda m, b: m(b["x"], b["mask"]))
    assert remedy.verified
    assert ".softmax" not in remedy.code.replace("self.softmax", "")
    assert "self.masked_fill" not in remedy.code


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_an_optimizer_without_eps_gets_one(kind: Any) -> None:
    """Its line calls `step`: what can be changed there is a setting, and not a divisor within torch."""
    weight = nn.Linear(2, 1, bias=False)
    optimizer = kind(weight.parameters(), eps=0.0)
    weight(torch.tensor([[1.0, 0.0]])).sum().backward()
    culprit = locate(Snapshot.capture_update(weight, optimizer, 1.0)).culprit
    assert culprit is not None
    assert culprit.remedy is not None
    assert (culprit.remedy.text, culprit.remedy.verified) == ("give the optimizer eps=1e-08", True)


def test_momentum_goes_back_with_the_weights(tmp_path: Path) -> None:
    """What grew over the steps is tried at its former size, the optimizer's own tensors with the weights."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=9.0)
    guard = Guard(model, optimizer, directory=tmp_path)
    step = guard.watch(lambda model, x: model(x).abs().mean())

    def train() -> None:
        for _ in range(80):
            optimizer.zero_grad()
            step(model, torch.ones(3, 2)).backward()
            optimizer.step()

    with pytest.raises(NonFiniteStep) as caught:
        train()
    finding = locate(Snapshot.load(caught.value.path))
    assert finding.culprits[0].cause == "learning_rate_explosion"
    assert finding.culprits[0].remedy is not None
    assert finding.culprits[0].remedy.verified
