"""A finding as people and programs read it; nothing here looks at live values.

Programs read `Finding.to_dict`, which is the JSON form already.
"""

from bisect_nan.reports.annotations import to_annotations
from bisect_nan.reports.markdown import to_markdown
from bisect_nan.reports.sarif import to_sarif
from bisect_nan.reports.schema import to_schema
from bisect_nan.reports.terminal import to_renderable, to_text

__all__ = ["to_annotations", "to_markdown", "to_renderable", "to_sarif", "to_schema", "to_text"]
