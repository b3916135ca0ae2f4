"""Searching for the smallest input that a loss fails on: right causes, no false alarms, files that fail in a fresh process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from bisect_nan import BisectNanError, Phase, RecordingError, StressFailure, Verdict, stress
from bisect_nan.strategies import distributions, labels, lengths, masks, probabilities, tensors

EPSILON = 0.0


def binary_cross_entropy(probability: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of probabilities, without a clamp."""
    return -(target * probability.log() + (1 - target) * (1 - probability).log()).mean()


def sigmoid_then_log(score: Tensor, target: Tensor) -> Tensor:
    """The same of scores, through a sigmoid that saturates."""
    return binary_cross_entropy(torch.sigmoid(score), target)


def dice(probability: Tensor, target: Tensor) -> Tensor:
    """One minus the Dice coefficient."""
    overlap = (probability * target).sum()
    return 1 - 2 * overlap / (probability.sum() + target.sum() + EPSILON)


def softmax_by_hand(score: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy without the subtraction of the maximum."""
    odds = score.exp()
    return -(odds / odds.sum(-1, keepdim=True)).gather(1, target[:, None]).log().mean()


def logsumexp_by_hand(score: Tensor, target: Tensor) -> Tensor:
    """The same, the other way round."""
    return (score.exp().sum(-1).log() - score.gather(1, target[:, None])[:, 0]).mean()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine distance without an epsilon."""
    return 1 - ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).mean()


def focal_weight(probability: Tensor, target: Tensor) -> Tensor:
    """A focal weight whose exponent is below 1."""
    right = target * probability + (1 - target) * (1 - probability)
    return ((1 - right) ** 0.5).mean()


def entropy(probability: Tensor) -> Tensor:
    """Entropy, with 0 log 0."""
    return -(probability * probability.log()).sum(-1).mean()


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Kullback-Leibler divergence by a quotient."""
    return (p * (p / q).log()).sum(-1).mean()


def masked_mean(error: Tensor, mask: Tensor) -> Tensor:
    """Mean error where a mask is set."""
    return (error * mask).sum() / mask.sum()


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean distance of pairs."""
    return (a - b).square().sum(-1).sqrt().mean()


def tempered(score: Tensor, temperature: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy at a temperature."""
    return F.cross_entropy(score / temperature, target)


def area(box: Tensor) -> Tensor:
    """Area of boxes."""
    return (box[:, 2] - box[:, 0]).clamp(min=0) * (box[:, 3] - box[:, 1]).clamp(min=0)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """One minus intersection over union."""
    common = area(torch.cat([torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])], 1))
    return 1 - (common / (area(a) + area(b) - common)).mean()


def standardised(x: Tensor, target: Tensor) -> Tensor:
    """Square error of standardised rows."""
    return F.mse_loss((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True), target)


def energy(x: Tensor) -> Tensor:
    """Sum of squares."""
    return x.square().sum()


def attention(score: Tensor, mask: Tensor) -> Tensor:
    """Attention weights under a mask."""
    return score.masked_fill(~mask, float("-inf")).softmax(-1).square().mean()


def mean_over_length(x: Tensor, length: Tensor) -> Tensor:
    """Mean over the valid part of a sequence."""
    return ((x * (torch.arange(x.shape[1]) < length[:, None])).sum(1) / length).mean()


def root_mean_square(x: Tensor, target: Tensor) -> Tensor:
    """Root of the mean square error."""
    return (x - target).square().mean().sqrt()


N = "rows"
SCORES, CHANCES, BINARY = tensors((N, 4)), probabilities((N, 4)), masks((N, 4), torch.float32)
SIGNS = BINARY.map(lambda mask: 2 * mask - 1)
CLASSES = labels((N,), 4)
FAULTY: dict[Callable[..., Tensor], tuple[str, Phase, tuple[st.SearchStrategy[Tensor], ...]]] = {
    binary_cross_entropy: ("log_of_zero", Phase.FORWARD, (CHANCES, BINARY)),
    sigmoid_then_log: ("log_of_zero", Phase.FORWARD, (SCORES, BINARY)),
    dice: ("zero_over_zero", Phase.FORWARD, (CHANCES, BINARY)),
    softmax_by_hand: ("overflow", Phase.FORWARD, (SCORES, CLASSES)),
    logsumexp_by_hand: ("overflow", Phase.FORWARD, (SCORES, CLASSES)),
    cosine: ("zero_over_zero", Phase.FORWARD, (SCORES, SCORES)),
    focal_weight: ("pow_grad_at_zero", Phase.BACKWARD, (CHANCES, BINARY)),
    entropy: ("zero_times_inf", Phase.FORWARD, (distributions((N, 4)),)),
    divergence: ("division_by_zero", Phase.FORWARD, (distributions((N, 4)), distributions((N, 4)))),
    masked_mean: ("zero_over_zero", Phase.FORWARD, (SCORES, masks((N, 4)))),
    distance: ("sqrt_grad_at_zero", Phase.BACKWARD, (SCORES, SCORES)),
    tempered: ("zero_over_zero", Phase.FORWARD, (SCORES, tensors((), min_value=0.0), CLASSES)),
    iou: ("zero_over_zero", Phase.FORWARD, (CHANCES, CHANCES)),
    standardised: ("zero_variance", Phase.FORWARD, (SCORES, SCORES)),
    energy: ("fp16_overflow", Phase.FORWARD, (tensors((N, 4), torch.float16),)),
    attention: ("softmax_all_masked", Phase.FORWARD, (SCORES, masks((N, 4)))),
    F.cross_entropy: ("empty_reduction", Phase.FORWARD, (SCORES, labels((N,), 4, ignore_index=-100))),
    F.soft_margin_loss: ("exp_overflow", Phase.FORWARD, (SCORES, SIGNS)),
    mean_over_length: ("zero_over_zero", Phase.FORWARD, (SCORES, lengths((N,), 4))),
    root_mean_square: ("sqrt_grad_at_zero", Phase.BACKWARD, (SCORES, SCORES)),
}
SOUND: dict[Callable[..., Tensor], tuple[st.SearchStrategy[Tensor], ...]] = {
    F.cross_entropy: (SCORES, CLASSES),
    F.nll_loss: (SCORES.map(lambda score: score.log_softmax(-1)), CLASSES),
    F.binary_cross_entropy: (CHANCES, CHANCES),
    F.binary_cross_entropy_with_logits: (SCORES, CHANCES),
    F.mse_loss: (SCORES, SCORES),
    F.l1_loss: (SCORES, SCORES),
    F.smooth_l1_loss: (SCORES, SCORES),
    F.huber_loss: (SCORES, SCORES),
    F.multi_margin_loss: (SCORES, CLASSES),
    F.multilabel_soft_margin_loss: (SCORES, BINARY),
    F.gaussian_nll_loss: (SCORES, SCORES, tensors((N, 4), min_value=0.0)),
    F.poisson_nll_loss: (tensors((N, 4), max_value=80.0), tensors((N, 4), min_value=0.0)),
    F.hinge_embedding_loss: (SCORES, SIGNS),
    F.cosine_embedding_loss: (SCORES, SCORES, SIGNS.map(lambda sign: sign[:, 0])),
    F.margin_ranking_loss: (SCORES, SCORES, SIGNS),
    F.triplet_margin_loss: (SCORES, SCORES, SCORES),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave files in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failure(function: Callable[..., Any], *arguments: Any, **options: Any) -> StressFailure:
    """Return what a search raises."""
    with pytest.raises(StressFailure) as caught:
        stress(function, *arguments, **options)
    return caught.value


def rerun(case: Path) -> subprocess.CompletedProcess[str]:
    """Run `bisect-nan run` on a case in a process of its own."""
    command = [sys.executable, "-m", "bisect_nan", "run", str(case)]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (this very interpreter)


@pytest.mark.parametrize("loss", FAULTY, ids=lambda loss: loss.__name__)
def test_faulty_losses(loss: Callable[..., Tensor]) -> None:
    """A loss that is written carelessly fails on a legal input, which is named with its cause."""
    cause, phase, strategies = FAULTY[loss]
    found = failure(loss, *strategies, directory=None)
    assert found.finding.verdict is Verdict.LOCATED
    culprit = found.finding.culprit
    assert culprit is not None
    assert (culprit.cause, culprit.phase) == (cause, phase)
    first = next(iter(found.example.values()))
    assert len(first) <= 2, "the smallest example has one row, or two whose sum overflows"


@pytest.mark.parametrize("loss", SOUND, ids=lambda loss: loss.__name__)
def test_sound_losses(loss: Callable[..., Tensor]) -> None:
    """The losses of torch bear every legal input, and infinite gradients of targets raise no alarm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says about the choice of a reduction
        assert stress(loss, *SOUND[loss], max_examples=100) == 100


def test_a_repaired_loss_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is the report with the input and the command to type; with an epsilon the same search finds nothing."""
    found = failure(dice, CHANCES, BINARY)
    text = str(found)
    assert text.startswith("got a legal input that dice fails on, the smallest of ")
    assert "\n  target = torch.full((1, 4), 0.0, dtype=torch.float32)\n\nerror[zero_over_zero]: `div` made" in text
    assert text.endswith(f"do this: bisect-nan run {found.case}")
    monkeypatch.setattr(sys.modules[__name__], "EPSILON", 1e-6)
    assert stress(dice, CHANCES, BINARY) == 300


def test_case_that_imports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case of a function in a module imports it, so that a repair is seen, and shows the same cause in a fresh process."""
    module = folder / "package" / "losses_of_mine.py"
    module.parent.mkdir()
    module.write_text("def ratio(output, target):\n    return (output / target).mean()\n")
    monkeypatch.syspath_prepend(str(module.parent))
    import losses_of_mine  # type: ignore[import-not-found]  # noqa: PLC0415

    found = failure(losses_of_mine.ratio, torch.randn(3, 2), torch.randn(3, 2), directory="cases")
    assert found.case == Path("cases/stress_ratio.py")
    done = rerun(found.case)
    assert done.returncode == 1
    assert "error[zero_over_zero]" in done.stdout
    assert "package/losses_of_mine.py:2 in ratio" in done.stdout
    module.write_text(module.read_text().replace("/ target", "/ target.abs().clamp(min=1)"))
    assert rerun(found.case).returncode == 0


def test_a_case_that_cannot_be_written(folder: Path) -> None:
    """What was found is told all the same, and why there is no file of it."""
    (folder / "taken").write_text("")
    found = failure(distance, SCORES, SCORES, directory="taken")
    assert found.case is None
    assert found.finding.verdict is Verdict.LOCATED
    assert "note: no file of it was written: " in str(found)


def test_case_that_is_copied() -> None:
    """A function inside of another is copied with what it uses, and shows the same cause in a fresh process."""
    scale = 0.0

    def scaled(output: Tensor) -> Tensor:
        halves = [part * scale for part in output]
        return (F.relu(area(torch.stack(halves))) ** -1.0).mean()

    found = failure(scaled, tensors((N, 4)))
    assert found.case is not None
    text = found.case.read_text()
    assert "scale = 0.0" in text
    assert "import torch.nn.functional as F" in text
    done = rerun(found.case)
    assert done.returncode == 1
    assert found.finding.culprit is not None
    assert f"error[{found.finding.culprit.cause}]" in done.stdout


def test_a_snapshot_where_there_is_a_model() -> None:
    """A step with a model is kept as a snapshot; gradients are those of the parameters, and the model is left as it was."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = {"x": torch.randn(4, 3), "length": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    generator = torch.get_rng_state()
    found = failure(lambda model, batch: (model(batch["x"]).sum(-1) / batch["length"]).mean(), model, batch)
    assert found.case is not None
    assert found.case.suffix == ".safetensors"
    assert rerun(found.case).returncode == 1
    assert len(found.example["batch"]["x"]) > 1, "batch normalisation takes no single row"
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_module_may_be_the_loss() -> None:
    """A loss that is a module is taken as it is, its own parameters included."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(()))

        def forward(self, output: Tensor) -> Tensor:
            return (output * self.scale).square().sum().sqrt()

    found = failure(Scaled(), torch.randn(2, 2))
    assert found.finding.symptom is not None
    assert (found.finding.symptom.kind, found.finding.symptom.name) == ("gradient", "scale")


def test_gradients_of_marked_tensors_only() -> None:
    """Where a tensor requires a gradient, those of the others are not looked at; where none does, the message says so."""
    assert stress(distance, tensors((N, 4), min_value=1.0, requires_grad=True), tensors((N, 4), max_value=0.0)) == 300
    found = failure(distance, SCORES, SCORES, directory=None)
    assert "mark those that it takes with requires_grad=True" in str(found)


def test_meant_infinities_are_assumed_away() -> None:
    """`assume` leaves out what is meant, in the search and when the failing input is recorded; all of it is too much."""

    def documented(output: Tensor) -> Tensor:
        loss = -output.log().sum()
        hypothesis.assume(bool(loss.isfinite()))
        return loss

    assert stress(documented, CHANCES.filter(lambda chance: bool((chance > 1e-30).all()))) >= 300
    with pytest.raises(BisectNanError, match="got no input that the strategies and `assume` allow"):
        stress(documented, tensors((2,), max_value=-1.0))

    def assuming(output: Tensor) -> Tensor:
        hypothesis.assume(bool((output < 0.5).all()))
        return output.log().sum()

    assert failure(assuming, CHANCES, directory=None).finding.verdict is Verdict.LOCATED


def test_the_same_seed_tries_the_same() -> None:
    """Two searches with one seed try the same inputs, those with another seed do not."""

    def tried(seed: int) -> list[str]:
        seen: list[str] = []

        def loss(output: Tensor) -> Tensor:
            seen.append(repr(output.tolist()))
            return output.square().mean()

        stress(loss, SCORES, max_examples=20, seed=seed)
        return seen

    assert tried(0) == tried(0) != tried(1)


def test_errors_of_the_loss_pass_through() -> None:
    """What the loss raises itself, or returns instead of a loss, is not called a fault of numbers."""
    with pytest.raises(IndexError, match="out of bounds"):
        stress(F.cross_entropy, SCORES, labels((N,), 5))
    with pytest.raises(RecordingError, match="returned a tensor of shape"):
        stress(torch.log, tensors((3,)))


def test_a_warning_is_given_once() -> None:
    """A loss that warns at every call fills no screen."""

    def loud(output: Tensor) -> Tensor:
        warnings.warn("mind the gap", stacklevel=1)
        return output.square().mean()

    with pytest.warns(UserWarning, match="mind the gap") as caught:
        stress(loud, SCORES)
    assert len(caught) == 1


def test_without_hypothesis() -> None:
    """Where hypothesis is not installed, the error names the extra."""
    code = "import sys; sys.modules['hypothesis'] = None\nfrom bisect_nan import stress"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert "do this: pip install 'bisect_nan[stress]'" in done.stderr


TEST = """
from bisect_nan import stress
from bisect_nan.strategies import masks, probabilities

def dice(output, target):
    return 1 - 2 * (output * target).sum() / (output.sum() + target.sum())

def test_dice():
    stress(dice, probabilities((3,)), masks((3,)))
"""


def test_a_failing_test_shows_the_report(folder: Path) -> None:
    """In a test of pytest the failure is the report, without the inside of the search."""
    (folder / "test_losses.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_losses.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "error[zero_over_zero]: `div` made the first NaN" in done.stdout
    assert "--> test_losses.py:6 in dice" in done.stdout
    assert "hypothesis/core.py" not in done.stdout
    assert "search.py" not in done.stdout
    assert (folder / "crashes" / "stress_dice.py").is_file()


def centred(x: Tensor) -> Tensor:
    """Normalise by the largest element, and compute an entropy, which refuses what is no number."""
    return torch.distributions.Normal(x / x.max(), 1.0, validate_args=True).entropy().sum()


def test_a_loss_that_raises_because_of_a_nan() -> None:
    """What a check within the loss refuses is a failing example like any other."""
    found = failure(centred, tensors(("rows", 3), min_value=0.0, max_value=1.0))
    assert found.finding.culprits[0].cause == "zero_over_zero"
    assert found.finding.symptom is not None
    assert found.finding.symptom.kind == "value"
    assert found.case is not None
    assert rerun(found.case).returncode == 1
