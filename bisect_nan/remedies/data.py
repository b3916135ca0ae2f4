"""State, memory and batches that hold what they should not."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bisect_nan import finite
from bisect_nan.blaming.samples import Batch
from bisect_nan.finding import Phase
from bisect_nan.remedies.proposal import Proposal, Site
from bisect_nan.replaying.neutral import typical

ISOLATED = 0.01
"""Share of bad elements up to which replacing them by a number is offered: more of them means that something upstream is wrong."""


def replace_elements(site: Site) -> Iterator[Proposal]:
    """Replace the bad elements of a tensor from outside."""
    tensor = site.tensors.get(site.value)
    if tensor is None or not finite.probe([tensor]):
        return
    bad = finite.mask(tensor)
    phase, share = site.culprit.phase, float(bad.float().mean())
    if phase is Phase.INPUT and share > ISOLATED and site.culprit.samples:
        return
    repaired = torch.where(bad, torch.full_like(tensor, typical(tensor)), tensor)
    if phase is Phase.PARAMETER:
        name = "restore_parameter"
        text = f"load a checkpoint in which {site.culprit.name} is finite"
    elif phase is Phase.BUFFER:
        name = "restore_buffer"
        text = f"load a checkpoint in which {site.culprit.name} is finite, or reset it"
    else:
        name = "replace_elements"
        number = f"{typical(tensor):g}"
        where = f"repair what computes the {site.culprit.name}" if site.culprit.name.startswith("constant") else ""
        where = where or f"clean {site.culprit.name} in the data pipeline"
        text = f"{where}; until then replace its bad elements by {number}"
    yield Proposal(name, text, placeholders={site.value: repaired}, local=False)


def skip_samples(site: Site) -> Iterator[Proposal]:
    """Put a healthy row of the batch in the place of those that carry the fault."""
    rows = site.culprit.samples
    changed = Batch(site.program).without(rows, site.tensors) if rows else {}
    if not changed:
        return
    which = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")  # noqa: PLR2004
    yield Proposal(
        "skip_samples",
        f"leave out sample{'s' if len(rows) > 1 else ''} {which} of the batch; tried with another row in the place of each",
        placeholders=changed,
        local=False,
    )


def zeros_for_empty_memory(site: Site) -> Iterator[Proposal]:
    """Allocate memory that holds something."""
    if site.node is None or site.node.memory is None:
        return
    yield Proposal(
        "initialise",
        "allocate with torch.zeros in the place of torch.empty, or write every element before it is read",
        changes=site.everywhere(lambda target, arguments: target(**arguments).zero_()),
        local=False,
    )
