"""Crash files of other tools: the names that people give tensors, Lightning's checkpoints, the Trainer's folders, and what lacks."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bisect_nan import Finding, Phase, Verdict, locate
from bisect_nan.command.child import Request
from bisect_nan.command.targets import Target
from bisect_nan.command.targets import load_target as load
from bisect_nan.command.weights import load_weights
from bisect_nan.errors import CodeError, TargetError

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x):
        return self.body(x) / x.std(-1, keepdim=True)

class Scored(Net):
    def forward(self, input_ids, attention_mask=None, labels=None):
        assert attention_mask is not None
        logits = super().forward(input_ids)
        return {"loss": (logits - labels).square().mean(), "logits": logits}

class Two(Net):
    def forward(self, left, right):
        return super().forward(left - right)

def loss(output, target):
    return (output.log() - target).square().mean()
"""
X = torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
Y = torch.ones(2, 2)
MSE = "torch.nn.functional:mse_loss"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in an empty folder with `net.py` in it, and forget afterwards what was imported from there."""
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("net", None)


def load_target(target: str | Path, **options: str) -> Target:
    """Load a target as the command line would with these options."""
    return load(Request(str(target), **options))  # type: ignore[arg-type]


def saved(content: Any, name: str = "batch.pt") -> Path:
    """Save what somebody saved by hand."""
    torch.save(content, name)
    return Path(name)


def finding_of(target: Target) -> Finding:
    """Return the answer to a target."""
    if target.finding is not None:
        return target.finding
    assert target.snapshot is not None
    return locate(target.snapshot, remedies=False)


def state(prefix: str = "", **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return weights for `Net`, under names that begin with something."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    return {f"{prefix}body.{name}": tensor for name, tensor in body.state_dict().items()} | more


@pytest.mark.parametrize(
    ("model", "loss", "content"),
    [
        ("Net", MSE, {"input": X, "target": Y}),
        ("Net", MSE, {"X": X, "Y": Y, "loss": 3.0, "epoch": 2}),
        ("Net", MSE, {"images": X, "labels": Y, "logits": Y}),
        ("Net", MSE, {"batch": {"data": X, "label": Y}, "step": 7}),
        ("Net", MSE, {"batch": (X, Y), "output": Y, "step": torch.tensor(7)}),
        ("Net", MSE, {"pixels": X, "y_true": Y, "y_pred": Y}),
        ("Net", MSE, (X, Y)),
        ("Net", MSE, [X, Y]),
        ("Two", MSE, [X, torch.zeros(2, 3), Y]),
        ("Two", MSE, {"left": X, "right": torch.zeros(2, 3), "target": Y}),
        ("Two", MSE, {"inputs": {"left": X, "right": torch.zeros(2, 3)}, "targets": Y}),
        ("Scored", "", {"input_ids": X, "attention_mask": Y, "labels": Y}),
        ("Scored", "", {"batch": {"input_ids": X, "attention_mask": Y, "labels": Y}, "step": 3}),
    ],
)
def test_names_that_people_use(model: str, loss: str, content: Any) -> None:
    """Flat or nested, as a dictionary, a list or a tuple, under any usual name, the batch goes where it belongs."""
    target = load_target(saved(content), model=f"net:{model}", loss=loss)
    culprit = finding_of(target).culprit
    assert culprit is not None
    assert (culprit.cause, culprit.samples) == ("zero_variance", (1,))
    assert target.notes[0].startswith("Used ")
    assert target.snapshot is not None
    if isinstance(content, Mapping) and "step" in content:
        assert target.snapshot.step_number == int(content["step"])


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("", "Weights from last.pt."),
        ("module.", "(`module.` taken off every name)"),
        ("model.", "(`model.` taken off every name)"),
        ("_orig_mod.", "(`_orig_mod.` left out of the names)"),
        ("module._orig_mod.", "(`_orig_mod.` left out of the names; `module.` taken off every name)"),
        ("trainer.net.", "(`trainer.net.` taken off every name)"),
    ],
)
def test_prefixes(prefix: str, said: str) -> None:
    """What wrappers put before every name is found out, taken off, and said."""
    saved(state(prefix), "last.pt")
    target = load_target(saved((X, Y)), model="net:Net", loss=MSE, weights="last.pt")
    assert target.notes[1].rstrip(".").endswith(said.rstrip("."))


def test_prefixes_of_the_model() -> None:
    """A model that is wrapped takes the weights of the bare one; a tied weight may be missing; others stay out, and that is said."""
    inner = nn.Linear(2, 2)
    assert "`model.` put before every name" in load_weights(nn.ModuleDict({"model": inner}), inner.state_dict(), "a.pt")
    tied = nn.ModuleDict({"first": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
    tied["last"].weight = tied["first"].weight  # type: ignore[union-attr]
    kept = {name: tensor for name, tensor in tied.state_dict().items() if name != "last.weight"}
    assert load_weights(tied, kept, "a.pt") == "Weights from a.pt."
    more = {f"model.{name}": tensor for name, tensor in kept.items()} | {"loss.scale": torch.ones(1)}
    assert "1 without it left out" in load_weights(tied, more, "a.pt")
    with pytest.raises(TargetError, match=r"Missing key\(s\): first.weight"):
        load_weights(tied, {"first.bias": torch.zeros(2), "last.bias": torch.zeros(2)}, "a.pt")
    with pytest.raises(TargetError, match=r"Unexpected key\(s\): depth"):
        load_weights(inner, inner.state_dict() | {"depth": torch.zeros(2)}, "a.pt")
    whole = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    with pytest.raises(TargetError, match="do not fit the model"):
        load_weights(inner, whole.state_dict(), "a.pt")


class Config:
    """A class of a user's own, as hyper-parameters have."""

    def __init__(self) -> None:
        self.width = 4


def test_a_checkpoint_of_lightning() -> None:
    """Weights, the step and the batch come together; hyper-parameters of unknown classes are left out, and that is said."""
    content = {
        "epoch": 1,
        "global_step": 640,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": state("model.", loss_weight=torch.ones(2)),
        "loops": {},
        "optimizer_states": [{"state": {}, "param_groups": []}],
        "hyper_parameters": {"config": Config()},
    }
    saved(content, "epoch=1.ckpt")
    target = load_target("epoch=1.ckpt", model="net:Net", loss=MSE, batch=str(saved((X, Y))))
    assert f"Left out of epoch=1.ckpt: objects of {Config.__module__}.Config." in target.notes
    assert target.notes[-1].startswith("Weights from the key state_dict of epoch=1.ckpt (`model.` taken off every name")
    assert target.snapshot is not None
    assert target.snapshot.step_number == 640
    weights = load_target(saved((X, Y)), model="net:Net", loss=MSE, weights="epoch=1.ckpt")
    assert finding_of(weights).verdict is finding_of(target).verdict is Verdict.LOCATED


@pytest.fixture
def trained(folder: Path) -> Path:
    """Return a folder as the Trainer of transformers leaves it, in two parts."""
    path = folder / "checkpoint-500"
    path.mkdir()
    weights = state()
    parts = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(weights)}
    for file in set(parts.values()):
        save_file({name: weights[name] for name in weights if parts[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    (path / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    log = [
        {"step": 499, "loss": 2.5, "grad_norm": 1.5, "epoch": 1},
        {"step": 500, "loss": float("nan")},
        {"step": 500, "eval_loss": 1},
    ]
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 500, "log_history": log}))
    generator = torch.Generator().manual_seed(7)
    numpy_state = np.random.get_state()  # noqa: NPY002  (as the Trainer does)
    states = {"python": random.getstate(), "numpy": numpy_state, "cpu": generator.get_state()}
    torch.save(states, path / "rng_state.pth")
    torch.save({"state": {}}, path / "optimizer.pt")
    return path


@pytest.mark.parametrize("as_weights", [False, True])
def test_a_folder_of_the_trainer(trained: Path, as_weights: bool) -> None:
    """The folder gives weights, the number of the step, the losses before, and the random generators, as target or as --weights."""
    batch = str(saved((X, Y)))
    options = {"model": "net:Net", "loss": MSE}
    target = (
        load_target(batch, weights=str(trained), **options)
        if as_weights
        else load_target(trained, batch=batch, **options)
    )
    assert target.notes[1] == f"Weights from 2 files of {trained}."
    assert target.notes[2] == "Random generators (torch, Python, NumPy) as the checkpoint has them."
    snapshot = target.snapshot
    assert snapshot is not None
    assert snapshot.step_number == 500
    assert snapshot.history == ({"step": 499, "loss": 2.5, "gradient_norm": 1.5}, {"step": 500})
    again = load_target(trained, batch=batch, **options).snapshot
    assert again is not None
    assert str(again.loss) == str(snapshot.loss), "dropout draws the same numbers"


def test_one_file_and_old_names(trained: Path) -> None:
    """A folder with one file, or with pytorch_model.bin, is read as well; one with neither is refused with what it holds."""
    for file in trained.glob("model*"):
        file.unlink()
    options = {"model": "net:Net", "loss": MSE, "batch": str(saved((X, Y)))}
    with pytest.raises(
        TargetError, match=r"which holds config.json, .*\nexpected: a checkpoint folder, with model.safetensors or"
    ):
        load_target(trained, **options)
    torch.save(state(), trained / "pytorch_model.bin")
    assert f"Weights from {trained / 'pytorch_model.bin'}." in load_target(trained, **options).notes
    save_file(state(), trained / "model.safetensors")
    assert f"Weights from {trained / 'model.safetensors'}." in load_target(trained, **options).notes


COMMAND = re.compile(r"do this: (?:.*then )?(bisect-nan run .*)")


def test_what_to_type_next(trained: Path) -> None:
    """What is missing is said one after another, each with the whole command line to type next."""
    with pytest.raises(TargetError, match="which holds weights and no batch") as caught:
        load_target(trained)
    assert COMMAND.search(str(caught.value))[1] == f"bisect-nan run {trained} --batch batch.pt"  # type: ignore[index]
    saved((X, Y))
    with pytest.raises(TargetError, match="without a model") as caught:
        load_target(trained, batch="batch.pt")
    command = f"bisect-nan run {trained} --batch batch.pt --model transformers:BertForMaskedLM"
    assert COMMAND.search(str(caught.value))[1] == command  # type: ignore[index]
    with pytest.raises(TargetError, match="without a model") as caught:
        load_target("batch.pt", loss=MSE)
    command = f"bisect-nan run batch.pt --model module:callable --weights FILE --loss {MSE}"
    assert COMMAND.search(str(caught.value))[1] == command  # type: ignore[index]
    with pytest.raises(TargetError, match="without a model") as caught:
        load_target("batch.pt", repro="-")
    assert caught.value.do.endswith(" --save crash.safetensors, then bisect-nan repro crash.safetensors")


def test_a_loss_that_is_not_named() -> None:
    """A pair for a model with one argument holds a target, so it is the loss that is missing."""
    with pytest.raises(
        TargetError, match=r"got shape \[2, 2\] from the model\nexpected: the loss, one number\ndo this: add --loss"
    ):
        load_target(saved((X, Y)), model="net:Net")


def test_arrays_of_numpy() -> None:
    """NumPy's arrays are read as tensors, also where the step or a score is one of its numbers."""
    content = {"input": X.numpy(), "target": Y.numpy(), "step": np.int64(4), "best": np.float64(0.5)}
    target = load_target(saved(content), model="net:Net", loss=MSE)
    assert finding_of(target).verdict is Verdict.LOCATED
    assert target.snapshot is not None
    assert target.snapshot.step_number == 4
    assert len(target.notes) == 2, "nothing was left out"
    objects = np.array([Config()], dtype=object)
    with pytest.raises(TargetError, match="which cannot be read"):
        load_target(saved({"input": objects}), model="net:Net")


def test_files_of_numpy() -> None:
    """Arrays by name are a batch like any other; objects are not loaded."""
    np.savez("batch.npz", input=X.numpy(), target=Y.numpy())
    assert finding_of(load_target("batch.npz", model="net:Net", loss=MSE)).verdict is Verdict.LOCATED
    np.save("input.npy", X.masked_fill(X > 2, math.nan).numpy())
    finding = finding_of(load_target("input.npy"))
    assert finding.culprit is not None
    assert finding.culprit.cause == "input_nonfinite"
    np.save("objects.npy", np.array([Config()], dtype=object))
    with pytest.raises(TargetError, match=r"objects\.npy, which cannot be read"):
        load_target("objects.npy", model="net:Net")


def test_a_loss_that_is_a_class() -> None:
    """A class of modules is made with its defaults and then called, as the usual losses of torch are."""
    target = load_target(saved((X, Y)), model="net:Net", loss="torch.nn:MSELoss")
    finding = finding_of(target)
    assert finding.culprit is not None
    assert finding.culprit.cause == "zero_variance"


def test_the_loss_alone() -> None:
    """With an output and a target but no model, the loss is run on them, gradient included."""
    output = torch.tensor([[0.5, 0.0], [1.0, 2.0]])
    target = load_target(saved({"step": 3, "output": output, "target": Y}), loss="net:loss")
    finding = finding_of(target)
    assert finding.culprit is not None
    assert finding.culprit.cause == "log_of_zero"
    assert str(finding.culprit.source) == "net.py:24"
    assert target.notes == ("Ran the loss alone, on output and target of batch.pt, for there is no --model.",)
    with pytest.raises(TargetError, match=r"or the loss alone \(--loss\), run on the saved output"):
        load_target(saved({"output": output, "target": Y}))


def test_bad_inputs_need_no_model() -> None:
    """A saved input or target that is bad already is the answer, with its samples; a bad output says that the model is needed."""
    bad = X.clone()
    bad[1, 2] = float("nan")
    for content in ({"input": bad, "target": Y}, {"batch": {"x": bad, "y": Y}}, (bad, Y)):
        target = load_target(saved(content))
        finding = finding_of(target)
        assert finding.verdict is Verdict.LOCATED
        assert finding.culprit is not None
        assert (finding.culprit.phase, finding.culprit.cause) == (Phase.INPUT, "input_nonfinite")
        assert finding.culprit.samples == (1,)
        assert Finding.from_dict(finding.to_dict()) == finding
    mask = X.masked_fill(X > 2, float("-inf"))
    with pytest.raises(TargetError, match="without a model"):
        load_target(saved({"input": {"x": X, "mask": mask}, "target": Y}))
    with pytest.raises(TargetError, match=r"in which output is bad .*, and the input is not\nexpected: the model"):
        load_target(saved({"input": X, "output": bad, "target": Y}), loss="net:loss")


def test_bad_weights_need_no_model() -> None:
    """A checkpoint that was saved after the fault is told by its first bad weight."""
    weights = state("model.")
    weights["model.body.2.bias"] = torch.tensor([1.0, float("nan")])
    finding = finding_of(load_target(saved({"state_dict": weights, "epoch": 3}, "last.ckpt")))
    assert finding.culprit is not None
    assert (finding.culprit.cause, finding.culprit.name) == ("parameter_nonfinite", "model.body.2.bias")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.txt", b"step 3: loss nan", "it is text\n"),
        ("t.log", "schlie\u00dflich".encode() * 100, "it is text\n"),
        ("t.pt", b"", "it is empty\n"),
        ("t.bin", bytes(range(256)), "which cannot be read: "),
        ("t.ckpt", b"PK\x03\x04" + bytes(100), "which cannot be read: "),
    ],
)
def test_other_files(name: str, content: bytes, words: str) -> None:
    """A file of another kind is refused in words, not in those of an unpickler."""
    Path(name).write_bytes(content)
    with pytest.raises(TargetError) as caught:
        load_target(name, model="net:Net")
    assert f"got {name}" in str(caught.value)
    assert words in str(caught.value)
    assert "do this: " in str(caught.value)


def test_safetensors_without_a_recorded_step() -> None:
    """A safetensors file that is no snapshot holds a batch or weights, as any other file does."""
    save_file({"input": X, "target": Y}, "batch.safetensors")
    assert finding_of(load_target("batch.safetensors", model="net:Net", loss=MSE)).verdict is Verdict.LOCATED
    save_file(state(), "model.safetensors")
    target = load_target("model.safetensors", model="net:Net", loss=MSE, batch="batch.safetensors")
    assert target.notes[1] == "Weights from model.safetensors."


def test_code_that_raises_is_told_from_wrong_usage() -> None:
    """A model that cannot be built or run is one error, a name that does not exist another."""
    (Path("broken.py")).write_text("import no_such_module")
    with pytest.raises(CodeError, match="no_such_module"):
        load_target(saved((X, Y)), model="broken:Net", loss=MSE)
    with pytest.raises(TargetError) as caught:
        load_target("batch.pt", model="no_such_module:Net", loss=MSE)
    assert not isinstance(caught.value, CodeError)
    with pytest.raises(CodeError, match=r"RuntimeError from net:Net on the input of batch.pt"):
        load_target(saved((torch.ones(2, 5), Y)), model="net:Net", loss=MSE)


@pytest.mark.models
def test_a_checkpoint_of_transformers(folder: Path) -> None:
    """A model of transformers is named by its class alone, built from the folder's configuration, tied weights and all."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    torch.nn.init.constant_(model.transformer.h[1].mlp.c_fc.bias, float("nan"))
    model.save_pretrained(folder / "checkpoint-3")
    (folder / "checkpoint-3" / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    tokens = torch.randint(11, (2, 5))
    batch = str(saved({"input_ids": tokens, "labels": tokens}))
    target = load_target("checkpoint-3", batch=batch, model="transformers:GPT2LMHeadModel")
    finding = finding_of(target)
    assert finding.culprit is not None
    assert (finding.culprit.cause, finding.culprit.name) == ("parameter_nonfinite", "transformer.h.1.mlp.c_fc.bias")
