"""Folders of checkpoints: their order, what is read of them, and the first one with bad numbers."""

from __future__ import annotations

import argparse
import json
import math
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from bisect_nan import TargetError, cli, first_bad_checkpoint
from bisect_nan.checkpoints import first
from bisect_nan.checkpoints.order import Ordered, ordered
from bisect_nan.checkpoints.reading import CheckpointError, read
from bisect_nan.finite import TensorSummary
from bisect_nan.prevention.check import Check, Spoiled

GOOD = {"weight": torch.ones(3), "epoch": torch.tensor(3), "best": torch.tensor(math.inf)}
BAD = {"weight": torch.tensor([1.0, math.nan, -math.inf])}


def state(*, good: bool) -> dict[str, torch.Tensor]:
    """Return a state dict."""
    return dict(GOOD if good else BAD)


def folder_of(path: Path, names: list[str], bad: int) -> Path:
    """Write `torch.save` files, of which those from number `bad` on hold a NaN, each a second younger than the one before."""
    for place, name in enumerate(names):
        torch.save(state(good=place < bad), path / name)
        os.utime(path / name, (1_000_000 + place, 1_000_000 + place))
    return path


# --- order ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "order", "left_out"),
    [
        (["step_2.pt", "step_10.pt", "step_100.pt"], "step number", []),
        (["epoch=0-step=90.ckpt", "epoch=1-step=180.ckpt", "epoch=1-step=180-v1.ckpt"], "step number", ["last.ckpt"]),
        (["loss=0.91-step=5.pt", "loss=0.35-step=50.pt", "loss=0.40-step=500.pt"], "step number", []),
        (["net_epoch9.pth", "net_epoch10.pth"], "epoch number", ["best.pth"]),
        (["iter_0000500.pt", "iter_0001000.pt"], "step number", []),
        (["7.safetensors", "12.safetensors"], "number", []),
        (["v2-a9.pt", "v2-a10.pt"], "number", []),
        (["zebra.pt", "apple.pt", "middle.pt"], "time of writing", []),
        (["b_step3.pt", "a.pt"], "time of writing", []),
    ],
)
def test_the_order_of_names(tmp_path: Path, names: list[str], order: str, left_out: list[str]) -> None:
    """Numbers in names decide, the surest kind of number first, and without numbers the time of writing does."""
    folder_of(tmp_path, [*names, *left_out], bad=99)
    (tmp_path / "notes.txt").write_text("no checkpoint")
    (tmp_path / ".step_1.pt.tmp").write_text("half")
    (tmp_path / "logs").mkdir()
    found = ordered(tmp_path)
    assert [path.name for path in found.paths] == names
    assert (found.order, list(found.left_out)) == (order, left_out)


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=9, unique=True), st.sampled_from(["step", "ckpt-", "m_it"]))
@settings(max_examples=30)
def test_numbers_are_ordered_as_numbers(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], word: str
) -> None:
    """Whatever the word in front of them, and however many digits they have."""
    path = tmp_path_factory.mktemp("run")
    for number in numbers:
        (path / f"{word}{number}.pt").touch()
    assert [p.name for p in ordered(path).paths] == [f"{word}{number}.pt" for number in sorted(numbers)]


def test_a_single_folder_is_entered(tmp_path: Path) -> None:
    """The folder of a run leads to that of its checkpoints; one checkpoint in a folder of its own is just that."""
    inner = tmp_path / "version_0" / "checkpoints"
    inner.mkdir(parents=True)
    folder_of(inner, ["step=1.ckpt", "step=2.ckpt"], bad=1)
    (tmp_path / "version_0" / "metrics.csv").touch()
    found = first_bad_checkpoint(tmp_path)
    assert (found.first, found.healthy) == (
        "version_0/checkpoints/step=2.ckpt",
        "version_0/checkpoints/step=1.ckpt",
    )
    lone = tmp_path / "lone"
    lone.mkdir()
    sharded(lone / "final", {"a": torch.ones(1), "b": torch.ones(1)})
    for rank in (0, 1):
        torch.save(GOOD, lone / "final" / f"rng_state_{rank}.pth")
    assert first_bad_checkpoint(lone).checkpoints == ("final",)


# --- search -----------------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=200)
def test_the_first_bad_one_is_found_with_few_reads(data: st.DataObject) -> None:
    """Against the truth: the first bad one among K is found with at most ceil(log2 K) + 1 reads, unreadable ones stepped around."""
    total = data.draw(st.integers(1, 70))
    bad = data.draw(st.integers(0, total))
    broken = data.draw(st.one_of(st.just(set()), st.sets(st.integers(0, total - 1), max_size=total)))
    reads: list[int] = []

    def look(path: Path) -> Check:
        number = int(path.name)
        if number in broken:
            raise CheckpointError("broken")
        reads.append(number)
        spoiled = Spoiled("weight", TensorSummary("w", "f32", (1,), nan=1))
        return Check("checkpoint", 1, (spoiled,) if number >= bad else ())

    paths = tuple(Path("run") / str(number) for number in range(total))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "read", look)
        patch.setattr(first, "ordered", lambda _: Ordered(paths, "number"))
        found = first.first_bad_checkpoint("run")
    readable = [number for number in range(total) if number not in broken]
    assert len(reads) == len(set(reads)) == len(found.read)
    assert len(reads) <= (max(total, 1) - 1).bit_length() + 1
    healthy, spoilt = [n for n in readable if n < bad], [n for n in readable if n >= bad]
    assert found.first == (str(spoilt[0]) if spoilt else None)
    if spoilt or healthy:
        assert found.healthy == (str(healthy[-1]) if healthy else None)
    if not broken:
        assert found.certain
    assert set(found.between) <= {str(number) for number in broken}
    if found.certain and spoilt:
        assert spoilt[0] == (healthy[-1] + 1 if healthy else 0)
    assert str(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_run_of_files(tmp_path: Path) -> None:
    """Names, kinds and counts of the bad tensors are told, and the last healthy one, with the reads that it took."""
    names = [f"step_{100 * number}.pt" for number in range(1, 18)]
    seen: list[tuple[str, int, int]] = []
    found = first_bad_checkpoint(folder_of(tmp_path, names, bad=11), progress=lambda *far: seen.append(far))
    assert (found.first, found.healthy, found.certain) == ("step_1200.pt", "step_1100.pt", True)
    (spoiled,) = found.bad
    assert (spoiled.name, spoiled.values.nan, spoiled.values.neg_inf) == ("weight", 1, 1)
    assert len(found.read) <= 6
    assert [stage for stage, *_ in seen] == [f"reading {name}" for name in found.read]
    assert all(done < most for _, done, most in seen)
    assert "step_1200.pt is the first checkpoint with bad numbers: 1 tensor" in str(found)


# --- formats ----------------------------------------------------------------------------------------------------------------


def sharded(path: Path, weights: dict[str, torch.Tensor], suffix: str = ".safetensors") -> None:
    """Write a checkpoint folder as transformers does, one tensor a shard."""
    path.mkdir()
    table = {}
    for place, (name, tensor) in enumerate(weights.items(), 1):
        file = f"model-{place:05}-of-{len(weights):05}{suffix}"
        if suffix == ".safetensors":
            save_file({name: tensor}, path / file)
        else:
            torch.save({name: tensor}, path / file)
        table[name] = file
    (path / f"model{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def test_folders_of_shards(tmp_path: Path) -> None:
    """Folders with shards, an index, an optimizer and pickled objects beside them are one checkpoint each."""
    for number in (500, 1000, 1500):
        bad = number > 500
        sharded(tmp_path / f"checkpoint-{number}", {"a": torch.ones(2), "b": torch.tensor([math.nan if bad else 0.0])})
        moments = {"state": {0: {"exp_avg": torch.tensor([math.inf if bad else 0.0])}}}
        torch.save(moments, tmp_path / f"checkpoint-{number}" / "optimizer.pt")
        torch.save(nn.Linear(1, 1), tmp_path / f"checkpoint-{number}" / "training_args.bin")
        (tmp_path / f"checkpoint-{number}" / "rng_state.pth").write_bytes(b"no zip")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    found = first_bad_checkpoint(tmp_path)
    assert (found.first, found.healthy, found.left_out) == ("checkpoint-1000", "checkpoint-500", ("model.safetensors",))
    assert [(spoiled.kind, spoiled.name) for spoiled in found.bad] == [
        ("weight", "model-00002-of-00002.safetensors: b"),
        ("optimizer", "optimizer.pt: state[0]['exp_avg']"),
    ]
    assert "1 tensor and 1 tensor of the optimizer's state" in str(found)


def test_shards_beside_each_other(tmp_path: Path) -> None:
    """Shards in the folder itself are one checkpoint for each name, and a missing one makes it unreadable."""
    for number in (1, 2):
        for part in (1, 2):
            bad = number == part == 2
            save_file(
                {f"w{part}": torch.tensor([math.nan if bad else 1.0])},
                tmp_path / f"step{number}-{part:05}-of-00002.safetensors",
            )
    found = first_bad_checkpoint(tmp_path)
    assert len(found.checkpoints) == 2
    assert (found.first or "").startswith("step2-")
    (tmp_path / "step2-00002-of-00002.safetensors").unlink()
    found = first_bad_checkpoint(tmp_path)
    assert (found.first, found.certain) == (None, False)
    assert "without step2-00002-of-00002.safetensors" in found.unreadable[0][1]


def lightning(*, good: bool, optimizer: bool = True) -> dict[str, Any]:
    """Return a checkpoint as Lightning writes it."""
    moments = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.tensor([1.0 if optimizer else math.nan])}}}
    return {
        "epoch": 1,
        "global_step": 90,
        "state_dict": {"net.weight": torch.tensor([1.0 if good else math.inf])},
        "callbacks": {"EarlyStopping": {"best_score": torch.tensor([math.inf])}},
        "optimizer_states": [{**moments, "param_groups": [{"lr": 1e-3, "params": [0]}]}],
        "loss": math.nan,
    }


def test_lightning(tmp_path: Path) -> None:
    """The state dict and the optimizer's state count, and neither callbacks nor numbers do."""
    path = tmp_path / "epoch=0-step=90.ckpt"
    torch.save(lightning(good=True), path)
    assert read(path).ok
    torch.save(lightning(good=False), path)
    assert read(path).names == ["state_dict['net.weight']"]
    torch.save(lightning(good=True, optimizer=False), path)
    assert [spoiled.kind for spoiled in read(path).bad] == ["optimizer"]


def test_old_files_and_other_kinds(tmp_path: Path) -> None:
    """Files from before torch 1.6, a bare tensor, half precision and masks are read; masks are told as meant."""
    torch.save(BAD, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert read(tmp_path / "old.pt").names == ["weight"]
    torch.save(torch.tensor([math.nan]), tmp_path / "bare.pt")
    assert len(read(tmp_path / "bare.pt").bad) == 1
    mask = torch.zeros(2, 2).masked_fill(torch.eye(2).bool(), -math.inf)
    save_file({"mask": mask, "h": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "m.safetensors")
    check = read(tmp_path / "m.safetensors")
    assert (check.ok, [spoiled.name for spoiled in check.meant]) == (True, ["mask"])


# --- damage -----------------------------------------------------------------------------------------------------------------


class Foreign:
    """Is a class that the reader does not know."""

    def __init__(self) -> None:
        self.weight = torch.tensor([math.nan])


class Calling:
    """Asks whoever reads it for a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def test_foreign_objects_are_looked_through(tmp_path: Path) -> None:
    """Arguments, arrays, whole models and optimizers beside the weights keep nobody from reading the tensors in them."""
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        model[0].bias[1] = math.nan
    others = {"args": argparse.Namespace(lr=1), "path": tmp_path, "mean": np.float64(3), "array": np.ones(2)}
    for held in ({"model": model.state_dict()}, {"model": model}, {"optim": torch.optim.Adam(model.parameters())}):
        torch.save({**others, **held}, tmp_path / "a.pt")
        assert [spoiled.values.nan for spoiled in read(tmp_path / "a.pt").bad] == [1]
    torch.save({"it": Foreign()}, tmp_path / "a.pt")
    assert read(tmp_path / "a.pt").names == ["it['state']['weight']"]


@pytest.mark.parametrize("call", [(os.mkdir,), (eval,), (nn.Linear, 1, 1), (Path.touch,)])
def test_nothing_of_a_file_is_executed(tmp_path: Path, call: tuple[Any, ...]) -> None:
    """A call that a file asks for is not made, whether the file can be read for all that or not."""
    mark = tmp_path / "mark"
    arguments = {os.mkdir: [str(mark)], eval: [f"open({str(mark)!r}, 'w')"], Path.touch: [mark]}.get(call[0], call[1:])
    torch.save({"w": torch.ones(1), "x": Calling(call[0], *arguments)}, tmp_path / "a.pt")
    try:
        assert read(tmp_path / "a.pt").tensors == 1
    except CheckpointError as problem:
        assert "torch.load never calls" in problem.got  # noqa: PT017  (either may happen)
    assert not mark.exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "no tensors", "flipped header"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, damage: str, suffix: str) -> None:
    """Whatever is wrong with a file, the error has one reason and no traceback, and the search steps around it."""
    for number in (1, 2, 3):
        file = tmp_path / f"step{number}{suffix}"
        if suffix == ".pt":
            torch.save(state(good=number < 3), file)
        else:
            save_file(state(good=number < 3), file)
    broken = tmp_path / f"step2{suffix}"
    data = broken.read_bytes()
    texts = {"cut": data[: len(data) // 2], "empty": b"", "garbage": b"garbage" * 99}
    if damage in texts:
        broken.write_bytes(texts[damage])
    elif damage == "flipped header":
        broken.write_bytes(bytes([data[0] ^ 0xFF]) + data[1:])
    elif suffix == ".safetensors":
        save_file({}, broken)
    else:
        torch.save({"x": 1}, broken)
    with pytest.raises(CheckpointError) as raised:
        read(broken)
    assert "step2" in raised.value.got
    assert "\n" not in raised.value.got
    found = first_bad_checkpoint(tmp_path)
    assert (found.first, found.healthy, found.between) == (f"step3{suffix}", f"step1{suffix}", (f"step2{suffix}",))
    assert f"note: skipped step2{suffix}" in str(found)
    assert f"step3{suffix} is the first readable checkpoint" in str(found)


@pytest.mark.parametrize("index", ["no json", "[]", '{"weight_map": {"a": "../../x"}}', '{"weight_map": []}'])
def test_a_damaged_index(tmp_path: Path, index: str) -> None:
    """An index that is none, or names files outside of its folder, makes the checkpoint unreadable."""
    sharded(tmp_path / "checkpoint-1", {"a": torch.ones(2)})
    (tmp_path / "checkpoint-1" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError):
        read(tmp_path / "checkpoint-1")


def test_folders_without_checkpoints(tmp_path: Path) -> None:
    """A missing folder, a file, and a folder without checkpoints are told with what was expected."""
    with pytest.raises(TargetError, match="no checkpoint"):
        first_bad_checkpoint(tmp_path)
    (tmp_path / "a.pt").touch()
    for path in (tmp_path / "gone", tmp_path / "a.pt"):
        with pytest.raises(TargetError, match="no folder"):
            first_bad_checkpoint(path)


# --- memory -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_one_tensor_at_a_time(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than one tensor of a file is held while it is checked."""
    held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most: list[int] = []
    probe = first.read.__globals__["finite"].probe

    def counted(tensors: list[torch.Tensor]) -> Any:
        held.update(tensors)
        most.append(len(held))
        return probe(tensors)

    weights = {f"w{number}": torch.ones(10) for number in range(5)}
    path = tmp_path / f"x{suffix}"
    torch.save(weights, path) if suffix == ".pt" else save_file(weights, path)
    monkeypatch.setattr(first.read.__globals__["finite"], "probe", counted)
    assert read(path).tensors == 5
    # A file of torch's maps all of its tensors into memory, and reads one when it is looked at.
    assert max(most) <= (5 if suffix == ".pt" else 2)


# --- the command line -------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(cli.app, ["checkpoints", *arguments])


def test_command_line(tmp_path: Path) -> None:
    """The statuses are those of `run`, and the JSON form says the same as the report."""
    names = [f"step_{number}.pt" for number in range(1, 6)]
    bad = tmp_path / "bad"
    bad.mkdir()
    folder_of(bad, names, bad=2)
    done = run(str(bad))
    assert done.exit_code == 1
    assert done.stdout.startswith("error: step_3.pt is the first checkpoint with bad numbers: 1 tensor\n  --> ")
    done = run(str(bad), "--json")
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert (answer["first"], answer["healthy"], answer["bad"][0]["name"]) == ("step_3.pt", "step_2.pt", "weight")
    good = tmp_path / "good"
    good.mkdir()
    folder_of(good, names, bad=9)
    done = run(str(good))
    assert (done.exit_code, done.stdout.split(":")[0]) == (0, "clean")
    (bad / "step_2.pt").write_bytes(b"half")
    done = run(str(bad))
    assert done.exit_code == 1
    assert "note: skipped step_2.pt, which cannot be read: " in done.stdout
    (good / "step_5.pt").write_bytes(b"half")
    done = run(str(good))
    assert (done.exit_code, done.stdout.split(":")[0]) == (125, "cannot tell")
    done = run(str(tmp_path / "gone"))
    assert done.exit_code == 2
    assert "expected: a folder of checkpoints" in done.stderr
