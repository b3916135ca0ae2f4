"""A recorded step that can be kept: captured from a live one, saved as a file, loaded anywhere.

What the file looks like says `bisect_nan.snapshots.manifest`; that nothing in a file runs or is believed unchecked see to
`bisect_nan.snapshots.operators` and `bisect_nan.snapshots.checks`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from bisect_nan.errors import SnapshotError
from bisect_nan.recording import capture as capturing
from bisect_nan.recording.frontiers import Frontier
from bisect_nan.recording.live import Live, watch
from bisect_nan.recording.outcome import Observed, Recording
from bisect_nan.recording.program import Program
from bisect_nan.recording.setting import is_compiled
from bisect_nan.snapshots import relocation, storages
from bisect_nan.snapshots.environment import Environment
from bisect_nan.snapshots.manifest import Manifest
from bisect_nan.snapshots.packing import Content, pack, unpack


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One recorded step.

    A captured snapshot refers to the live tensors of the model and the batch; see `tensors`. A loaded one refers to its file.

    Attributes:
        program: What was executed.
        observed: What came out non-finite; None for a clean step.
        loss: The loss as recorded.
        environment: What the recording ran on.
        history: Numbers of the steps before, and of this one as far as it came, the latest last: `step`, `loss`,
            `gradient_norm` and `parameter_norm`, both before the update.
        step_number: Number of the training step, where it is known.
        path: The file that it was loaded from, or None.
        entry: The code that the step came from, as `save` was told; empty where it is not known.
    """

    program: Program
    observed: Observed | None
    loss: float
    environment: Environment
    _tensors: Mapping[int, torch.Tensor] = field(repr=False)
    _live: tuple[Live, ...] = field(default=(), repr=False)
    _frontiers: tuple[Program | None, tuple[Frontier, ...]] = field(default=(None, ()), repr=False)
    history: tuple[Mapping[str, float], ...] = ()
    step_number: int | None = None
    path: Path | None = None
    entry: str = ""

    @classmethod
    def capture(
        cls,
        model: Any,
        batch: Any,
        step: capturing.Step,
        *,
        backward: bool = True,
        frontiers: bool = True,
        history: Sequence[Mapping[str, float]] = (),
        step_number: int | None = None,
    ) -> Self:
        """Run one training step under the recorder; nothing of the model is left changed.

        Args:
            model: The module (or any object that `step` takes).
            batch: Any pytree of tensors and plain values.
            step: `step(model, batch) -> loss`.
            backward: Whether to run the backward pass, too.
            frontiers: Whether to hold what is alive on the way, in the backward pass at most 512 MB, so that `locate` in this
                process need not run the whole step again.
            history: Numbers of the steps before.
            step_number: Number of this step.

        Raises:
            RecordingError: The step cannot be recorded.
        """
        recording = capturing.record(model, batch, step, backward=backward, frontiers=frontiers)
        live = watch(recording, model, batch)
        return cls.of(recording, live, history, step_number, compiled=is_compiled(model))

    @classmethod
    def capture_update(
        cls,
        model: Any,
        optimizer: torch.optim.Optimizer,
        loss: float,
        *args: Any,
        history: Sequence[Mapping[str, float]] = (),
        step_number: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """Run `optimizer.step(*args, **kwargs)` under the recorder, on the gradients that are there; nothing is left changed.

        Args:
            model: The module that is trained.
            optimizer: Its optimizer.
            loss: The loss of the step.
            args: Arguments of `optimizer.step`, such as a closure.
            history: Numbers of the steps before.
            step_number: Number of this step.
            kwargs: Further arguments of `optimizer.step`.

        Raises:
            RecordingError: The update cannot be recorded.
        """
        recording = capturing.record_update(model, optimizer, loss, *args, **kwargs)
        return cls.of(recording, watch(recording, model, optimizer=optimizer), history, step_number)

    @classmethod
    def of(
        cls,
        recording: Recording,
        live: tuple[Live, ...] = (),
        history: Sequence[Mapping[str, float]] = (),
        step_number: int | None = None,
        *,
        compiled: bool = False,
    ) -> Self:
        """Return the snapshot of a recording.

        Args:
            recording: The recorded step.
            live: Tensors of the running training that it refers to.
            history: Numbers of the steps before.
            step_number: Number of this step.
            compiled: Whether the model runs under `torch.compile`.
        """
        return cls(
            program=recording.program,
            observed=recording.observed,
            loss=recording.loss,
            environment=Environment.here(relocation.devices(recording.program), compiled=compiled),
            _tensors=recording.tensors,
            _live=live,
            _frontiers=(recording.program, recording.frontiers),
            history=tuple(history),
            step_number=step_number,
        )

    def tensors(self) -> Mapping[int, torch.Tensor]:
        """Return the placeholders' tensors by value number; they must not be written to.

        Raises:
            SnapshotError: A captured tensor has been written to since.
        """
        for live in self._live:
            if live.changed:
                got = f"got {live.name}, which was written to after the step was captured"
                do = "call locate(snapshot) or snapshot.save(path) before the next optimizer step"
                raise SnapshotError(got, "the tensors as they were before the step", do)
        return self._tensors

    def frontiers(self) -> tuple[Frontier, ...]:
        """Return what was alive in the middle of the step, the latest last; nothing where the step was not recorded here."""
        program, found = self._frontiers
        return found if program is self.program else ()

    def differences(self) -> tuple[str, ...]:
        """Return what differs between the recording's environment and this process, each as a sentence."""
        return self.environment.differences(Environment.here(relocation.devices(self.program)))

    def save(self, path: str | os.PathLike[str], *, entry: str = "") -> Path:
        """Write the snapshot as one file, as a whole or not at all.

        Args:
            path: The file (`crash.safetensors`); folders on the way are made, a file that is there is replaced.
            entry: The code that builds this step, as `module:function` or `path/to/file.py:function`, for a test that runs the
                step on the code of another day: a function without arguments that returns `{"model", "batch", "step"}`. That of
                the file that the snapshot was loaded from, when empty.

        Returns:
            The path.

        Raises:
            SnapshotError: The program holds what no file can carry, the captured tensors have been written to since, the entry is no
                such name, or the file cannot be written.
        """
        if entry and not all(entry.rpartition(":")):
            expected = "module:function or path/to/file.py:function"
            raise SnapshotError(f"got the entry {entry!r}", expected, "name the function that builds the step")
        content = Content(
            self.program,
            self.tensors(),
            self.observed,
            self.loss,
            self.environment,
            self.history,
            self.step_number,
            entry or self.entry,
        )
        manifest, entries = pack(content)
        storages.write(Path(path), json.dumps(manifest, separators=(",", ":"), allow_nan=False), entries)
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device | None = None) -> Self:
        """Open a file. Nothing in it is executed; its tensors are read when they are used.

        Args:
            path: The file.
            device: Where to move the program: what it recorded on an accelerator, or all of it when it recorded on the CPU alone.
                By default it stays where it was.

        Raises:
            SnapshotError: The file cannot be read, is damaged, has another format, or needs an operator or a device that this
                process does not have.
        """
        path = Path(path)
        manifest = Manifest.read(path)
        content = unpack(manifest, storages.Reader(path, manifest.entries))
        program, observed = content.program, content.observed
        to = {} if device is None else relocation.destinations(program, _known(device))
        for home in relocation.devices(program):
            _require(to.get(home, home), asked=home in to)
        program = relocation.moved(program, to)
        if observed is not None:
            home = program.values[program.targets.of(observed.symptom.kind)[observed.names[0]]].device
            observed = replace(observed, tensor=observed.tensor.to(home))
        tensors = relocation.moved_tensors(content.tensors, program)
        return cls(
            program=program,
            observed=observed,
            loss=content.loss,
            environment=content.environment,
            _tensors=tensors,
            history=tuple(content.history),
            step_number=content.step_number,
            path=path,
            entry=content.entry,
        )


def _known(device: str | torch.device) -> torch.device:
    """Return a device with its number, so that it compares equal to those of tensors."""
    try:
        found = torch.device(device)
    except RuntimeError as problem:
        raise SnapshotError(
            f"got the device {device!r}", "a device, such as cpu or cuda:0", "name one of this machine"
        ) from problem
    return _require(found, asked=True)


def _require(device: torch.device, *, asked: bool) -> torch.device:
    """Return the device as tensors on it name it, once it is known to be there."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as problem:  # a torch without CUDA fails an assertion
        got = (
            f"got the device {device}, which this machine does not have"
            if asked
            else f"got a step recorded on {device}"
        )
        do = "open it on the CPU: load(path, device='cpu'), on the command line --device cpu"
        raise SnapshotError(got, "a device of this machine", do) from problem
