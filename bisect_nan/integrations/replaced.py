"""Attributes that are something else for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object or a class; afterwards they are as before, those of its own as those of its class."""
    before = {name: vars(target)[name] for name in attributes if name in vars(target)}
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)
