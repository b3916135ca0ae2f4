"""What a step is judged by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

KINDS = "loss", "gradient", "buffer", "parameter", "optimizer", "value"
"""The kinds of symptom."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The values that a step is judged by, as they are when the program ends.

    Attributes:
        loss: Value number of the loss; None for an optimizer's step, and for a step that raised before.
        gradients: Value numbers by parameter path; empty when the backward pass was not recorded.
        buffers: Value numbers of the buffers that the step wrote to.
        parameters: Value numbers of the parameters that the optimizer's step wrote to.
        optimizer: Value numbers of the optimizer's own tensors after its step.
        values: Value numbers of what was looked at before the step raised.
        hooked: Whether gradients of the step pass through hooks, or through Python code that no recorded call tells of.
    """

    loss: int | None = None
    gradients: Mapping[str, int] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    optimizer: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    hooked: bool = False

    def of(self, kind: str) -> Mapping[str, int]:
        """Return the targets of one of the `KINDS` by name."""
        losses = {} if self.loss is None else {"loss": self.loss}
        tables = losses, self.gradients, self.buffers, self.parameters, self.optimizer, self.values
        return dict(zip(KINDS, tables, strict=True))[kind]

    def all(self) -> Iterator[int]:
        """Yield the value numbers of all targets."""
        for kind in KINDS:
            yield from self.of(kind).values()
