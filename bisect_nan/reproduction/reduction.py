"""Delta debugging: what is left of a list when whatever is not needed is taken away.

After Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE Transactions on Software Engineering 28 (2002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def ddmin(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Return a part of a list that still fails, of which no single item can be left out.

    Args:
        items: A list that fails.
        fails: Whether a part of it, in its order, fails; asked for each part at most once in a row.
    """
    kept, parts = list(items), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        chunks = [kept[start : start + size] for start in range(0, len(kept), size)]
        rests = [[item for j, chunk in enumerate(chunks) if j != i for item in chunk] for i in range(len(chunks))]
        tried = [(chunk, 2) for chunk in chunks] if len(chunks) > 1 else []
        tried += [(rest, max(parts - 1, 2)) for rest in rests] if len(chunks) > 2 else []  # noqa: PLR2004  (else the same halves)
        found = next(((part, then) for part, then in tried if fails(part)), None)
        if found is not None:
            kept, parts = found
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept
