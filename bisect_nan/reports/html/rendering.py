"""The templates, and how texts get into them: escaped, and without characters that are not seen."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from bisect_nan.errors import BisectNanError
from bisect_nan.reports import words

if TYPE_CHECKING:
    from jinja2 import Environment

_LONGEST = 1000
"""Characters of one text."""


def render(template: str, **values: Any) -> str:
    """Fill a template.

    Raises:
        BisectNanError: jinja2 is not installed.
    """
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415  (an extra)
        from markupsafe import Markup  # noqa: PLC0415
    except ImportError as problem:
        do = 'pip install "bisect_nan[report]"'
        raise BisectNanError(f"got no jinja2 to make HTML with ({problem})", "the extra `report`", do) from problem

    def visible(value: Any) -> Any:
        """Take out control characters and those that turn the direction of a text, and cut what no one reads."""
        if isinstance(value, Markup):
            return value
        text = str(value)
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        return "".join(char if char.isprintable() else " " for char in text)

    def code(text: str) -> Markup:
        """Escape a sentence and set what stands between backticks as code."""
        parts = [Markup.escape(visible(part)) for part in text.split("`")]
        if len(parts) % 2 == 0:  # one backtick without its partner
            return Markup.escape(visible(text))
        marked = [Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(parts)]
        return Markup().join(marked)

    environment = Environment(
        loader=PackageLoader("bisect_nan.reports.html"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(code=code, number=number, short=words.short)
    environment.globals.update(words=words)
    return environment


def number(value: float | None) -> str:
    """Return a number with five digits; a dash for none."""
    return "–" if value is None else f"{value:.5g}"  # noqa: RUF001  (a dash, not a minus)
