"""The program of a watched script that is being recorded: where it begins, what its backward passes leave, and whom to suspect."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bisect_nan import finite
from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase
from bisect_nan.norms import norms
from bisect_nan.recording.outcome import Recording, outcome
from bisect_nan.recording.recorder import Recorder
from bisect_nan.recording.setting import eager, hooked_parts, hooks_noticed, modules_followed
from bisect_nan.snapshots.snapshot import Snapshot
from bisect_nan.watching.looks import Looks
from bisect_nan.watching.names import Names, loading
from bisect_nan.watching.stream import Stream, Working
from bisect_nan.watching.suspects import Suspect, kept

_SPAN = 8
"""Updates that a program may go through because of a graph that waits for its backward pass."""

_PATIENCE = 20
"""Bad backward passes in a row, without an update, after which nobody searches for a scale any more."""


class Tape:
    """Records what the thread that made it runs.

    Only the present program is kept: what ran since the latest backward pass that came out finite, or since the latest update. As
    long as autograd holds a graph of it that was not run (the generator's, while the discriminator is trained) it goes on.

    Attributes:
        names: The models, optimizers and batches that the script was seen to use.
        losses: The losses since the latest update.
        looks: What the script has looked at itself since the latest update.
        suspect: The first backward pass that came out bad and whose gradients are still there.
        updating: Whether an optimizer's step runs; set by whoever watches that.
        deriving: Whether a backward pass runs.
        problem: Why the present program could not be recorded to its end; None while it can.
    """

    def __init__(
        self,
        settle: Callable[[], bool],
        snapshot: Callable[[Recording], Snapshot],
        hopeless: Callable[[Snapshot], object],
    ) -> None:
        """Prepare; `open` begins.

        Args:
            settle: Asked whether an update still runs, which an exception may have ended.
            snapshot: Makes the snapshot of a suspect.
            hopeless: Told the latest suspect when all backward passes come out bad, and none is used; may raise.
        """
        self.names, self.losses = Names(), list[float]()
        self.looks = Looks(snapshot)
        self.suspect: Suspect | None = None
        self.updating = self.deriving = False
        self.problem: RecordingError | None = None
        self._settle, self._snapshot, self._hopeless = settle, snapshot, hopeless
        self._stream = Stream(self._enter_closure, self._look_along, self._cut, self._stumble)
        self._stack, self._thread = list[str](), threading.get_ident()
        self._thrown = 0  # suspects in a row that no update has used
        self._hooks: list[object] = []  # what hooks can change the gradients of the program at
        self._root: torch.Tensor | None = None  # what the running backward pass starts from
        self._behind = 0  # calls of the program up to its latest backward pass
        self._span = 0  # updates that are part of the program
        self._closed = False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Record meanwhile."""
        replaced = {"backward": self._judged, "grad": self._followed}
        with (
            eager(),
            hooks_noticed(None, ()) as self._hooks,
            modules_followed(self.names.paths, self._stack, self._meet),
            loading(self._stream.aside, self._load),
            contextlib.ExitStack() as undo,
        ):
            for name, standing_in in replaced.items():
                plain = getattr(torch.autograd, name)
                setattr(torch.autograd, name, standing_in(plain))
                undo.callback(setattr, torch.autograd, name, plain)
            self._stream.enter()
            undo.callback(self._stream.leave)
            self.begin()
            try:
                yield
            finally:
                self._stream.recorder = self._stream.around = self.suspect = None
                self._closed = True

    @property
    def recorder(self) -> Recorder | None:
        """What records the present program; None while nothing is recorded."""
        return self._stream.around or self._stream.recorder

    @property
    def goes_on(self) -> bool:
        """Whether the present program is needed for a backward pass that runs or may still come."""
        return self.deriving or self._stream.graphs.wait

    def working(self) -> contextlib.AbstractContextManager[None, bool]:
        """Return the context for work of our own, which is not recorded, and where what cannot be recorded ends the recording."""
        return Working(self._stream, self._refuse)

    def new_recorder(self) -> Recorder:
        """Return a recorder that knows which module runs."""
        recorder = Recorder()
        recorder.modules = self._stack
        return recorder

    def use(self, recorder: Recorder) -> None:
        """Record into another program from now on."""
        self._stream.use(recorder)

    def begin(self) -> None:
        """Begin a new program."""
        self._stream.around = self.problem = None
        recorder = self.new_recorder()
        self._hooks.clear()
        self._behind = self._span = 0
        self._stream.use(recorder)
        with self.working():
            self.names.tell(recorder)

    def updated(self, *, joint: bool) -> None:
        """Begin a new program after an update, unless the update was part of the present one and that is still needed."""
        self.losses.clear()
        self.looks.nan, self._thrown = None, 0
        self._leave_closure()
        self._acquit()
        self._span += 1
        if not joint or (self._span >= _SPAN and not self.deriving):
            self._stream.graphs.forget()
            self.begin()

    def judge(self, recorder: Recorder, gradients: Mapping[str, torch.Tensor]) -> Recording:
        """Return the recording of the program so far, judged by the running backward pass's loss and by some gradients."""
        parts = [*self.leaves(recorder).values(), *(part for model in self.names.models() for part in model.modules())]
        hooked = bool(self._hooks) or bool(hooked_parts(parts))
        return kept(
            recorder,
            outcome(recorder, self._root, gradients, self.names.buffers(), held=self.names.held, hooked=hooked),
        )

    def judge_gradients(self, recorder: Recorder, parameters: Sequence[torch.Tensor]) -> Recording:
        """Return the recording of what made the gradients of some parameters bad after the backward pass, which left them finite."""
        recorder.calls[self._behind :] = [call.in_phase(Phase.BACKWARD) for call in recorder.calls[self._behind :]]
        mine = {id(parameter) for parameter in parameters}
        leaves = self.leaves(recorder).items()
        gradients = {name: leaf.grad for name, leaf in leaves if id(leaf) in mine and leaf.grad is not None}
        return self.judge(
            recorder, {name: gradient for name, gradient in gradients.items() if finite.probe([gradient])}
        )

    def leaves(self, recorder: Recorder) -> dict[str, torch.Tensor]:
        """Return all that gradients may have been left in, by name."""
        named = self.names.parameters()
        known = {id(parameter) for parameter in named.values()}
        return named | {name: leaf for name, leaf in recorder.values.leaves.items() if id(leaf) not in known}

    # --- what the script does -------------------------------------------------------------------------------------------

    def _meet(self, module: nn.Module) -> None:
        recorder = self._stream.recorder
        if recorder is not None and threading.get_ident() == self._thread and self.names.meet(module):
            with self.working():
                self.names.tell(recorder)

    def _load(self, batch: Any) -> None:
        recorder = self._stream.recorder
        if recorder is not None:
            self.names.load(batch)
            with self.working():
                self.names.tell_batch(recorder)

    def _followed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for `torch.autograd.grad`: it uses up the graph."""

        @functools.wraps(plain)
        def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            found = plain(outputs, *args, **kwargs)
            if self._sees() and not (kwargs.get("retain_graph") or kwargs.get("create_graph") or any(args[2:4])):
                self._stream.graphs.ran(_roots(outputs))
            return found

        return grad

    def _judged(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for `torch.autograd.backward`: the backward pass is looked at when it ends."""

        @functools.wraps(plain)
        def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = self._stream.recorder
            if recorder is None or not self._sees():
                return plain(tensors, *args, **kwargs)
            self._settle()
            recorder = self._stream.recorder or recorder
            with self._backward(recorder, _roots(tensors)), torch.autograd.set_detect_anomaly(mode=False):
                found = plain(tensors, *args, **kwargs)
            if self._thrown >= _PATIENCE and self.suspect is not None:
                self._hopeless(self.suspect.snapshot)
                return found
            if not (kwargs.get("retain_graph") or kwargs.get("create_graph") or any(args[1:3])):
                self._stream.graphs.ran(_roots(tensors))
            if self.updating:
                self._leave_closure()
            elif self._stream.recorder is not None and not self._stream.graphs.wait:
                self.begin()
            return found

        return run_backward

    def _sees(self) -> bool:
        """Whether a backward pass that begins is one of the script's own, and recorded."""
        return not self.deriving and self._stream.recorder is not None and threading.get_ident() == self._thread

    @contextlib.contextmanager
    def _backward(self, recorder: Recorder, roots: Sequence[torch.Tensor]) -> Iterator[None]:
        """Look at the loss and its gradients when a backward pass ends, in whatever way."""
        phase, recorder.phase = recorder.phase, Phase.BACKWARD
        self._root = next((root for root in roots if root.numel() == 1 and root.is_floating_point()), None)
        if not self.updating:  # there the first of several tries is the one that counts
            self._acquit()
        self.deriving = True
        try:
            yield
        finally:
            self.deriving = False
            recorder.phase, self._behind = phase, len(recorder.calls)
            if self._stream.recorder is not None:
                with self.working():
                    self._look(recorder)
            elif self._closed:
                self._stream.leave()
            self._root = None

    def _look(self, recorder: Recorder) -> None:
        """Look at what a backward pass has made; the first that is bad is the suspect."""
        seen, leaves = recorder.values.seen, self.leaves(recorder)
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None and seen(leaf.grad)}
        loss = 0.0
        if self._root is not None:
            loss = float(self._root.detach())
            self.losses.append(loss)
        buffers = self.names.buffers()
        written = [buffer for buffer in buffers.values() if recorder.values.wrote(buffer)]
        fine = math.isfinite(loss) and all(map(math.isfinite, norms(gradients.values(), written)))
        if fine or self.suspect is not None:
            return
        recording = self.judge(recorder, gradients)
        if recording.observed is not None:
            half = self._root is not None and self._root.dtype is torch.float16
            self.suspect = Suspect.of(self._snapshot(recording), leaves, buffers, half=half)

    def _look_along(self) -> None:
        """Look at what the script has just read."""
        recorder = self._stream.recorder
        if recorder is not None and not (self.updating or self.deriving):
            with self.working():
                self.looks.note(recorder, self.suspect)

    def _enter_closure(self) -> None:
        """Record what an update computes by a closure in a program of its own as well; gradients are enabled there alone."""
        stream = self._stream
        if self.updating and not self.deriving and stream.around is None and self._settle():
            around, recorder = stream.recorder, self.new_recorder()
            with self.working():
                self.names.tell(recorder)
            stream.use(recorder)
            stream.around = around

    def _leave_closure(self) -> None:
        around, self._stream.around = self._stream.around, None
        if around is not None and self._stream.recorder is not None:
            self._stream.use(around)

    def _acquit(self) -> None:
        """Forget the suspect when what it made is not there any more."""
        if self.suspect is not None:
            with self.working():
                if not self.suspect.stands():
                    self.suspect, self._thrown = None, self._thrown + 1

    # --- what cannot go on ----------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Give up a program that has become too long."""
        if not self.updating and not self.deriving:
            self._stream.graphs.forget()
            self.begin()

    def _stumble(self, problem: RecordingError) -> None:
        """Begin behind a call that cannot be recorded, where no step is under way (a copy of the model is made, say)."""
        if self.updating or self.goes_on:
            self._refuse(problem)
        else:
            self.begin()

    def _refuse(self, problem: RecordingError) -> None:
        """Give up a program that something in it cannot be part of; the script goes on."""
        self._stream.recorder = self._stream.around = None
        self.problem = problem


def _roots(tensors: Any) -> list[torch.Tensor]:
    listed = tensors if isinstance(tensors, list | tuple) else [tensors]
    return [tensor for tensor in listed if isinstance(tensor, torch.Tensor)]
