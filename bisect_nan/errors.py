"""The exceptions of bisect_nan, and nothing else.

::

    BisectNanError
    ├── RecordingError      a step that cannot be recorded
    ├── ReplayError         a recorded node that cannot be executed here
    ├── SnapshotError       a file that is not a usable crash snapshot
    ├── FindingError        a dictionary that is not the JSON form of a finding
    ├── TargetError         a model, loss or case named on the command line that cannot be used
    │   └── CodeError       its own code raised
    ├── ReproductionError   a fault that no short script shows
    ├── NonFiniteValues     a batch, a model, a tensor or a checkpoint with NaN or Inf, found by a check
    ├── NonFiniteStep       raised by Guard into a training loop
    └── StressFailure       an input that stress found to make a loss non-finite

Every message has three parts: what was got, what was expected, what to do.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bisect_nan.finding import Finding, Symptom
    from bisect_nan.prevention.check import Check


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


class FindingError(BisectNanError, ValueError):
    """A dictionary is not the JSON form of a finding that this release reads."""


class SnapshotError(BisectNanError):
    """A file is no crash snapshot that this release can open (nothing of it was executed), or a snapshot cannot be saved or used."""


class TargetError(BisectNanError):
    """A model, loss, weights file or case file that the user named cannot be used."""

    @classmethod
    def refused(cls, problem: OSError) -> TargetError:
        """Return the error for a path that the system does not even look at: no right to, or a name too long to be one."""
        got = (
            f"got {problem.filename}, which cannot be used: {problem.strerror}"
            if problem.filename
            else f"got {problem}"
        )
        return cls(got, "a path that can be read", "check the path, and who may read it")


class CodeError(TargetError):
    """Code that the user named raised while it was imported or called, so that nothing can be told about its numbers."""


class ReproductionError(BisectNanError):
    """There is no short script of torch calls that shows a fault: no operation makes it, or it needs more of the step."""


class NonFiniteValues(BisectNanError):  # noqa: N818  (as NonFiniteStep)
    """A check found NaN or Inf where finite numbers were asked for.

    Attributes:
        check: What it found; None where the error came out of a worker process of a `DataLoader`, which carries only its message.
    """

    def __init__(self, got: str, expected: str = "", do: str = "", *, check: Check | None = None) -> None:
        """Keep the check beside the message."""
        super().__init__(got, expected, do)
        self.check = check


class NonFiniteStep(BisectNanError):  # noqa: N818  (reads as what happened; it is the public name of the event)
    """A training step came out non-finite; the crash snapshot is already on disk when this is raised.

    Attributes:
        path: The snapshot file, or None when there is none (the message says why).
        symptom: Where the failure shows.
    """

    def __init__(self, path: Path | None, symptom: Symptom, problem: str = "") -> None:
        """Build the message.

        Args:
            path: The snapshot file.
            symptom: Where the failure shows.
            problem: Why there is no file, or what is odd about it; empty when all is well.
        """
        self.path, self.symptom = path, symptom
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


class StressFailure(BisectNanError):  # noqa: N818  (as above)
    """A legal input makes a loss or one of its gradients non-finite; the message is the report.

    Attributes:
        finding: What `locate` says about the smallest such input.
        example: That input: the arguments of the function by name.
        case: The file that `bisect-nan run` takes, or None when none was asked for.
    """

    def __init__(self, got: str, finding: Finding, example: Mapping[str, Any], case: Path | None) -> None:
        """Build the message.

        Args:
            got: The input and its report.
            finding: What was found.
            example: The input.
            case: The file with it.
        """
        self.finding, self.example, self.case = finding, example, case
        super().__init__(got, do=f"bisect-nan run {shlex.quote(str(case))}" if case else "")
