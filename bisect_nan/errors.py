"""The exceptions of bisect_nan, and nothing else.

::

    BisectNanError
    ├── RecordingError      a step that cannot be recorded
    ├── ReplayError         a recorded node that cannot be executed here
    ├── SnapshotError       a file that is not a usable crash snapshot
    ├── TargetError         a model, loss or case named on the command line that cannot be used
    └── NonFiniteStep       raised by Guard into a training loop

Every message has three parts: what was got, what was expected, what to do.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from bisect_nan.finding import Symptom


class BisectNanError(Exception):
    """The root of all errors that this package raises on purpose."""

    def __init__(self, got: str, expected: str = "", do: str = "") -> None:
        """Join the three parts into one message, one part a line.

        Args:
            got: What was found, with the value that is wrong.
            expected: What would have been right.
            do: What the reader can do about it.
        """
        self.got, self.expected, self.do = got, expected, do
        lines = [got, f"expected: {expected}" if expected else "", f"do this: {do}" if do else ""]
        super().__init__("\n".join(line for line in lines if line))


class RecordingError(BisectNanError):
    """A step cannot be recorded: it returned no loss, or it uses tensors without memory of their own."""


class ReplayError(BisectNanError):
    """A recorded node cannot be executed here.

    Attributes:
        node: Index of the node that failed; everything before it has run.
    """

    def __init__(self, got: str, expected: str = "", do: str = "", *, node: int = -1) -> None:
        """Keep the index of the failing node beside the message."""
        super().__init__(got, expected, do)
        self.node = node


class SnapshotError(BisectNanError):
    """A file is no crash snapshot that this release can open (nothing of it was executed), or a snapshot cannot be saved or used."""


class TargetError(BisectNanError):
    """A model, loss, weights file or case file that the user named cannot be used."""


class NonFiniteStep(BisectNanError):  # noqa: N818  (reads as what happened; it is the public name of the event)
    """A training step came out non-finite; the crash snapshot is already on disk when this is raised.

    Attributes:
        path: The snapshot file, or None when there is none (the message says why).
        symptom: Where the failure shows.
        problem: Why there is no file, or what is odd about it; empty when all is well.
    """

    def __init__(self, path: Path | None, symptom: Symptom, problem: str = "") -> None:
        """Build the message.

        Args:
            path: The snapshot file.
            symptom: Where the failure shows.
            problem: Why there is no file, or what is odd about it; empty when all is well.
        """
        self.path, self.symptom, self.problem = path, symptom, problem
        got = symptom.describe()
        if path is None:
            got += f"; no snapshot was written: {problem}"
            do = (
                "model, optimizer and batch are as before the step: give them to Snapshot.capture and locate the result"
            )
        else:
            got += f" ({problem})" if problem else ""
            do = f"bisect-nan run {shlex.quote(str(path))}"
        super().__init__(got, "finite numbers", do)
