"""Rows of measurements in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actstore.bench.environment import environment


def write_rows(path: Path, rows: list[dict[str, Any]], key: Sequence[str]) -> None:
    """Write rows beside those that the file has already. A row takes the place of one with equal values of `key`."""
    keys = [[row.get(name) for name in key] for row in rows]
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in old if [row.get(name) for name in key] not in keys]
    path.write_text(json.dumps({"environment": environment(), "rows": [*kept, *rows]}, indent=1) + "\n")
