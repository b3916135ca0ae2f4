"""The dispatch mode of a watched script: every call of the thread goes through it, to the recorder of the present program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack  # torch 2.6 to 2.13
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode  # torch 2.6 to 2.13

from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase
from bisect_nan.recording.program import tensors
from bisect_nan.recording.recorder import Recorder
from bisect_nan.watching.graphs import Graphs
from bisect_nan.watching.looks import Look

_OFTEN = 256
"""Calls from one look at the size of a program to the next."""

_CALLS = 20_000
_BYTES = 2**29
"""Calls, and bytes of tensors from outside other than parameters and buffers, that a program may hold if it need not."""

_FEWEST, _MOST = 1, 10
"""How many times as much it may hold: while no graph waits for its backward pass, and while one does."""


class Stream(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotations
    """Hands the calls of a thread to a recorder, which can be exchanged at any time.

    Attributes:
        recorder: What records now; None while calls only run.
        around: What records the same calls as part of a longer program; usually None.
        graphs: The graphs whose backward pass may still come.
        rejected: What the latest call was given that raised an exception; None where none has since the program began.
    """

    supports_higher_order_operators = True

    def __init__(
        self, tracked: Callable[[], object], full: Callable[[], object], refused: Callable[[RecordingError], object]
    ) -> None:
        """Start without a recorder.

        Args:
            tracked: Called before every call that runs while gradients are enabled; may exchange the recorder.
            full: Called when the program has become so long that it has to be given up; may exchange the recorder.
            refused: Called when the recorder cannot take a call; the script goes on without it.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder: Recorder | None = None
        self.around: Recorder | None = None
        self.graphs = Graphs()
        self.rejected: Look | None = None
        self._tracked, self._full, self._refused = tracked, full, refused
        self._entered = False
        self._looked = self._bytes = 0  # placeholders whose bytes are counted

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out the wrapper against compilation; see `Recorder`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one call."""
        recorder = self.recorder
        if recorder is None:
            return func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            self.graphs.seen(args)
            self._tracked()
            recorder = self.recorder or recorder
        if len(recorder.calls) % _OFTEN == _OFTEN - 1 and self._is_full(recorder):
            self._full()
            recorder = self.recorder or recorder
        try:
            if self.around is None:
                return recorder.__torch_dispatch__(func, types, args, kwargs)
            with self.around:
                return recorder.__torch_dispatch__(func, types, args, kwargs)
        except RecordingError as problem:
            self.recorder = None
            self._refused(problem)
            # What is refused after it ran returns tensors of a kind that cannot be recorded, and wrote to nothing.
            return func(*args, **(kwargs or {}))
        except Exception:
            self._raised(recorder, args)
            raise

    def use(self, recorder: Recorder) -> None:
        """Record into a new program from now on."""
        self.recorder, self.rejected, self._looked, self._bytes = recorder, None, 0, 0

    def _raised(self, recorder: Recorder, args: tuple[Any, ...]) -> None:
        """Remember what a call was given that raised an exception, by number: the tensors themselves may be what fills the memory."""
        given = [tensor for tensor in tensors(args) if tensor is not None]
        with contextlib.suppress(RecordingError):
            self.rejected = Look(len(recorder.calls), tuple([recorder.number(tensor) for tensor in given]))

    def working(self, stumbled: Callable[[RecordingError], object]) -> contextlib.AbstractContextManager[None, bool]:
        """Return the context for work of our own, which is not recorded; `stumbled` is told what cannot be recorded."""
        return _Working(self, stumbled)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Let calls only run for a while."""
        recorder, self.recorder = self.recorder, None
        try:
            yield
        finally:
            self.recorder = recorder

    def _is_full(self, recorder: Recorder) -> bool:
        placeholders = recorder.values.placeholders
        for placeholder in placeholders[self._looked :]:
            if placeholder.phase is Phase.INPUT:
                tensor = recorder.values.tensors[placeholder.value]
                self._bytes += tensor.numel() * tensor.element_size()
        self._looked = len(placeholders)
        times = _MOST if self.graphs.wait else _FEWEST
        return len(recorder.calls) > times * _CALLS or self._bytes > times * _BYTES

    # --- its place ------------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Become the outermost mode of this thread: those that the script is in, or will enter, come and go above it."""
        above = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
        self._entered = True
        self.__enter__()  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            _push_mode(mode)

    def leave(self) -> None:
        """Leave this thread's modes, wherever among them it stands.

        Within a backward pass these are a copy, which torch throws away at its end: there it has to be left once more.
        """
        modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
        for mode in reversed(modes):
            if mode is not self:
                _push_mode(mode)
            elif self._entered:
                _push_mode(self)
                self.__exit__(None, None, None)
                self._entered = False


class _Working:
    """The context of `Stream.working`."""

    def __init__(self, stream: Stream, stumbled: Callable[[RecordingError], object]) -> None:
        self._stream, self._stumbled, self._recorder = stream, stumbled, stream.recorder

    def __enter__(self) -> None:
        self._stream.recorder = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._stream.recorder = self._recorder
        if isinstance(error, RecordingError):
            self._stumbled(error)
            return True
        return False
