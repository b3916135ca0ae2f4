"""How findings show themselves: methods that hand over to the reports, which are loaded when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bisect_nan.errors import BisectNanError

if TYPE_CHECKING:
    from bisect_nan.finding import Culprit, Finding
    from bisect_nan.pictures import Picture


class InNotebooks:
    """Shows itself in a notebook."""

    __slots__ = ()

    def _repr_html_(self: Finding | Culprit) -> str | None:  # type: ignore[misc]
        """Return the report for a notebook; None without the extra `report`, for which notebooks show the text."""
        from bisect_nan.reports.html.notebook import to_fragment  # noqa: PLC0415  (it stands above)

        try:
            return to_fragment(self)
        except BisectNanError:
            return None


class AsPage(InNotebooks):
    """Makes a page of itself, or a text for a pull request."""

    __slots__ = ()

    def to_html(self: Finding, picture: Picture | None = None) -> str:  # type: ignore[misc]
        """Return the finding as one page of HTML, which works offline, prints, and runs no script.

        Args:
            picture: What is drawn of live values, from `bisect_nan.picture(snapshot, finding)`; without it the page has no
                magnitudes, no bad elements and no history.

        Raises:
            BisectNanError: jinja2 is not installed; `pip install "bisect_nan[report]"` brings it.
        """
        from bisect_nan.reports.html import to_html  # noqa: PLC0415  (it stands above)

        return to_html(self, picture)

    def to_markdown(self: Finding) -> str:  # type: ignore[misc]
        """Return the report as Markdown, for a pull request or an issue."""
        from bisect_nan.reports.markdown import to_markdown  # noqa: PLC0415  (it stands above)

        return to_markdown(self)
