"""A snapshot survives the file: the same program, the same bits, the same replay; or the file does not come about at all."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import changed, parts
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from steps import STEPS
from torch import nn

from bisect_nan.errors import SnapshotError
from bisect_nan.finite import same
from bisect_nan.recording.program import Node, Program
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Run, own_generator
from bisect_nan.replaying.stretch import Stretch
from bisect_nan.snapshots.snapshot import Snapshot

# What a file has to cope with, rather than the recorder.
CARRIED = [
    *("convolutions_with_batch_norm", "tied_embeddings", "checkpointing", "complex_spectrum", "autocast_float16"),
    *(
        "explicit_generators",
        "reseeding",
        "sparse_gradients",
        "sparse_product",
        "moved_in_place",
        "resized_and_out_arguments",
    ),
    *(
        "overlapping_batch",
        "parameter_in_the_batch",
        "zero_sized",
        "custom_operator",
        "attention",
        "foreach_operations",
    ),
]
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint16,
    ),
]


def squared(model: Any, batch: Any) -> torch.Tensor:
    """Return the mean square of a model's output, as a loss."""
    return model(batch).square().mean()


def broken(model: Any, batch: Any) -> torch.Tensor:
    """Return a loss that is NaN."""
    return (model(batch) * 0 - 1).log().mean()


def linear() -> nn.Linear:
    """Return a model whose weights are always the same."""
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def replay(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Execute the whole program of a snapshot and return its targets."""
    program = snapshot.program
    kinds = ("loss", "gradient", "buffer", "parameter", "optimizer")
    targets = {f"{kind} {name}": number for kind in kinds for name, number in program.targets.of(kind).items()}
    stretch = Stretch(program, Dependence(program).slice(targets.values()), targets.values())
    with own_generator():
        run = Run(stretch, stretch.start(snapshot.tensors()))
        run.advance(len(stretch))
    return {name: run.env[number] for name, number in targets.items()}


def assert_same_program(one: Program, other: Program) -> None:
    """Compare two programs field by field; tensors bit by bit, and numbers by their text, so that NaN equals NaN."""
    assert one.values == other.values
    assert one.placeholders == other.placeholders
    assert one.targets == other.targets
    assert len(one.nodes) == len(other.nodes)
    for mine, theirs in zip(one.nodes, other.nodes, strict=True):
        assert mine.target is theirs.target
        for field in dataclasses.fields(Node):
            left, right = getattr(mine, field.name), getattr(theirs, field.name)
            if isinstance(left, torch.Tensor):
                assert same(left, right)
            elif field.name != "target":
                assert repr(left) == repr(right), (mine.index, field.name)


@pytest.mark.parametrize("name", CARRIED)
def test_a_loaded_snapshot_is_the_saved_one(name: str, tmp_path: Path) -> None:
    """Program, tensors and replay are the same, bit for bit, after saving and loading."""
    torch.manual_seed(0)
    history = ({"step": 1, "loss": 0.5}, {"step": 2, "loss": float("inf"), "learning_rate": 1e-3})
    snapshot = Snapshot.capture(*STEPS[name](), history=history, step_number=3)
    loaded = Snapshot.load(snapshot.save(tmp_path / "crash.safetensors"))
    assert_same_program(snapshot.program, loaded.program)
    for number, tensor in snapshot.tensors().items():
        assert same(tensor, loaded.tensors()[number])
    for target, tensor in replay(snapshot).items():
        assert same(tensor, replay(loaded)[target])
    for field in ("loss", "environment", "history", "step_number"):
        assert repr(getattr(snapshot, field)) == repr(getattr(loaded, field))
    assert snapshot.differences() == loaded.differences() == ()


def test_what_was_observed_is_kept(tmp_path: Path) -> None:
    """The symptom, its names and the bits of the first non-finite tensor come back."""
    snapshot = Snapshot.capture(linear(), torch.ones(4, 3), broken)
    loaded = Snapshot.load(snapshot.save(tmp_path / "crash.safetensors"))
    assert snapshot.observed is not None
    assert loaded.observed is not None
    assert (loaded.observed.symptom, loaded.observed.names) == (snapshot.observed.symptom, snapshot.observed.names)
    assert same(loaded.observed.tensor, snapshot.observed.tensor)
    assert loaded.path == tmp_path / "crash.safetensors"


def test_an_update_is_kept(tmp_path: Path) -> None:
    """An optimizer's step with its state replays from the file as it was."""
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        squared(model, torch.ones(4, 3)).backward()
        optimizer.step()
    snapshot = Snapshot.capture_update(model, optimizer, 1.5, step_number=2)
    expected = replay(snapshot)
    loaded = Snapshot.load(snapshot.save(tmp_path / "crash.safetensors"))
    assert_same_program(snapshot.program, loaded.program)
    assert all(same(tensor, replay(loaded)[name]) for name, tensor in expected.items())


@given(data=st.data())
@settings(max_examples=25)
def test_any_view_of_any_dtype_survives(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Shape, strides, offset and every bit of a placeholder come back, whatever its dtype."""
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    stride = [data.draw(st.integers(0, 5)) for _ in shape]
    offset = data.draw(st.integers(0, 4))
    size = (offset + 1 + sum(step * max(n - 1, 0) for step, n in zip(stride, shape, strict=True))) * dtype.itemsize
    memory = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    tensor = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, shape, stride)
    if dtype.is_complex and data.draw(st.booleans()):
        tensor = tensor.conj()
    wide = torch.complex64 if dtype.is_complex else torch.float32
    snapshot = Snapshot.capture(None, tensor, lambda _, batch: batch.clone().to(wide).sum().real, backward=False)
    loaded = Snapshot.load(snapshot.save(tmp_path_factory.mktemp("views") / "crash.safetensors"))
    (back,) = loaded.tensors().values()
    assert (back.shape, back.stride(), back.storage_offset()) == (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
    )
    assert back.is_conj() == tensor.is_conj()
    assert same(back.resolve_conj(), tensor.resolve_conj())


def test_tied_memory_is_written_once_and_still_tied(tmp_path: Path) -> None:
    """Two views of one memory are one entry of the file, and share memory when they are loaded."""
    whole = torch.randn(40)
    batch = {"low": whole[:30].view(10, 3), "high": whole[10:].view(10, 3)}
    step = lambda model, batch: squared(model, batch["low"] + batch["high"])  # noqa: E731
    loaded = Snapshot.load(Snapshot.capture(linear(), batch, step).save(tmp_path / "crash.safetensors"))
    names = {item.name: loaded.tensors()[item.value] for item in loaded.program.placeholders}
    low, high = names["batch['low']"], names["batch['high']"]
    assert low.untyped_storage().data_ptr() == high.untyped_storage().data_ptr()
    assert high.data_ptr() - low.data_ptr() == 40
    _, manifest, _ = parts(tmp_path / "crash.safetensors")
    assert sorted(size for _, _, size in manifest["storages"]) == [8, 24, 160]  # bias, weight, and the shared memory


def test_a_slice_of_a_data_set_does_not_drag_all_of_it_along(tmp_path: Path) -> None:
    """Of a large memory of which the step sees a small part, only the part is written; views of it still fit."""
    dataset = torch.randn(100_000, 3)

    def step(model: Any, batch: Any) -> torch.Tensor:
        shifted = batch.as_strided((7, 3), (3, 1), batch.storage_offset() + 3)
        return squared(model, batch.data[1:] * shifted)

    snapshot = Snapshot.capture(linear(), dataset[50_001:50_009], step)
    expected = replay(snapshot)
    path = snapshot.save(tmp_path / "crash.safetensors")
    assert path.stat().st_size < 20_000
    assert all(same(tensor, replay(Snapshot.load(path))[name]) for name, tensor in expected.items())


def test_a_replay_writes_neither_to_the_file_nor_to_its_tensors(tmp_path: Path) -> None:
    """A program that writes to its inputs leaves the loaded tensors and the file as they were."""
    model = nn.BatchNorm1d(3)
    snapshot = Snapshot.capture(model, torch.randn(4, 3), lambda model, batch: squared(model, batch.add_(1)))
    path = snapshot.save(tmp_path / "crash.safetensors")
    before, loaded = path.read_bytes(), Snapshot.load(path)
    kept = {number: tensor.clone() for number, tensor in loaded.tensors().items()}
    assert all(same(tensor, replay(loaded)[name]) for name, tensor in replay(loaded).items())
    assert all(same(kept[number], tensor) for number, tensor in loaded.tensors().items())
    assert path.read_bytes() == before


def test_a_tensor_written_to_since_is_noticed(tmp_path: Path) -> None:
    """Using a snapshot after the optimizer's step says which tensor is no longer what it was, and what to do."""
    model = linear()
    snapshot = Snapshot.capture(model, torch.ones(4, 3), broken)
    snapshot.save(tmp_path / "early.safetensors")
    with torch.no_grad():
        model.bias.add_(1)
    with pytest.raises(SnapshotError, match=r"got bias, which was written to(.|\n)*before the next optimizer step"):
        snapshot.tensors()
    with pytest.raises(SnapshotError, match="got bias"):
        snapshot.save(tmp_path / "late.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["early.safetensors"]


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_since_is_noticed(fused: bool) -> None:
    """Also one of a fused kernel, whose writes torch does not count; an update of another model changes nothing."""
    model, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    snapshot = Snapshot.capture(model, torch.ones(2, 3), lambda m, b: m(b).mean())
    for trained in (other, model):
        trained(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(trained.parameters(), lr=0.1, fused=fused).step()
        if trained is other:
            snapshot.tensors()
    with pytest.raises(SnapshotError, match="which was written to"):
        snapshot.tensors()


def test_the_file_is_valid_safetensors_with_aligned_memories(tmp_path: Path) -> None:
    """Safetensors' own reader takes the file, and memories of whole cache lines start at one, as torch's do."""
    batch = {"mask": torch.ones(5, dtype=torch.bool), "x": torch.randn(64, 3), "y": torch.randn(3)}
    path = Snapshot.capture(linear(), batch, lambda m, b: squared(m, b["x"] + b["y"] + b["mask"].sum())).save(
        tmp_path / "crash.safetensors"
    )
    header, manifest, _ = parts(path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata().keys() == {"bisect_nan"}
        for number, _, size in manifest["storages"]:
            assert file.get_tensor(f"storage.{number}").numel() == size
    length = int.from_bytes(path.read_bytes()[:8], "little")
    starts = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    assert all((8 + length + start) % 64 == 0 for start, end in starts.values() if (end - start) % 64 == 0)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in Snapshot.load(path).tensors().values())


def test_a_file_can_be_saved_over_itself(tmp_path: Path) -> None:
    """A loaded snapshot can replace its own file, and goes on working."""
    path = Snapshot.capture(linear(), torch.ones(4, 3), broken).save(tmp_path / "new" / "crash.safetensors")
    loaded = Snapshot.load(path)
    loaded.save(path)
    assert all(same(tensor, replay(Snapshot.load(path))[name]) for name, tensor in replay(loaded).items())


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full, the error says so, the old file is whole and no other one is left behind."""
    path = Snapshot.capture(linear(), torch.ones(4, 3), squared).save(tmp_path / "crash.safetensors")
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), fail)
    with pytest.raises(SnapshotError, match="cannot be written: No space left on device"):
        Snapshot.capture(linear(), torch.ones(4, 3), broken).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_killed_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    """After SIGKILL in the middle of a write the old file is whole."""
    path = Snapshot.capture(linear(), torch.ones(4, 3), squared).save(tmp_path / "crash.safetensors")
    before = path.read_bytes()
    code = f"""
import os, signal, torch
from bisect_nan.snapshots import storages
from bisect_nan.snapshots.snapshot import Snapshot
def write_half(file, storage):
    file.write(b"x" * (storage.nbytes() // 2))
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
storages._write_storage = write_half
Snapshot.capture(torch.nn.Linear(3, 2), torch.ones(4, 3), lambda m, b: m(b).sum()).save({str(path)!r})
"""
    child = subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parent.parent)  # noqa: S603
    assert child.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert Snapshot.load(path).observed is None


def test_a_recording_on_a_missing_device_can_be_moved(tmp_path: Path) -> None:
    """Without the device of the recording, loading says how to move the program; moved, it runs here."""
    snapshot = Snapshot.capture(
        linear(), torch.ones(4, 3), lambda m, b: squared(m, b + torch.zeros(4, 3, device="cpu"))
    )
    path = snapshot.save(tmp_path / "crash.safetensors")

    def recorded_on_cuda(manifest: dict[str, Any]) -> None:
        manifest["program"]["devices"] = ["cuda:0"]
        for item in (*manifest["placeholders"], *manifest["storages"]):
            item["device" if isinstance(item, dict) else 1] = "cuda:0"
        for node in manifest["program"]["nodes"]:
            for argument in node[9].values() if len(node) > 9 else ():
                if argument == {"device": "cpu"}:
                    argument["device"] = "cuda:0"

    there = changed(path, tmp_path / "cuda.safetensors", recorded_on_cuda)
    if not torch.cuda.is_available():
        with pytest.raises(
            SnapshotError, match=r"recorded on cuda:0(.|\n)*load\(path, device='cpu'\)(.|\n)*--device cpu"
        ):
            Snapshot.load(there)
    moved = Snapshot.load(there, device="cpu")
    assert {value.device.type for value in moved.program.values} == {"cpu"}
    assert all(same(tensor, replay(moved)[name]) for name, tensor in replay(snapshot).items())
    with pytest.raises(SnapshotError, match="nonsense"):
        Snapshot.load(path, device="nonsense")


def test_a_call_that_no_file_can_carry_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    """An operator that a stranger's file must not name is not written either; the error says which."""
    snapshot = Snapshot.capture(linear(), torch.ones(4, 3), squared)
    node = dataclasses.replace(snapshot.program.nodes[0], target=torch.ops.aten.resize.default)
    program = dataclasses.replace(snapshot.program, nodes=(node, *snapshot.program.nodes[1:]))
    with pytest.raises(SnapshotError, match=r"aten\.resize\.default"):
        dataclasses.replace(snapshot, program=program).save(tmp_path / "crash.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_call_takes_less_than_two_hundred_bytes(tmp_path: Path) -> None:
    """The description of a large program stays small: ten thousand calls below two megabytes."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(150)))
    snapshot = Snapshot.capture(layers, torch.randn(2, 4), squared)
    path = snapshot.save(tmp_path / "crash.safetensors")
    assert int.from_bytes(path.read_bytes()[:8], "little") < 200 * len(snapshot.program.nodes)
    assert_same_program(snapshot.program, Snapshot.load(path).program)
