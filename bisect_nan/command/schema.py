"""`bisect-nan schema`: prints the JSON Schema of what `--json` prints."""

from __future__ import annotations

import json

from bisect_nan.command.printing import tell


def schema() -> None:
    """Print the JSON Schema (draft 2020-12) of what `run --json` prints."""
    from bisect_nan.reports import to_schema  # noqa: PLC0415  (a finding's parts import torch)

    tell(json.dumps(to_schema(), indent=2) + "\n")
