"""Folders of a machine's results: ``results/<name>/``, with the page ``results/<name>.md``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_EMPTY = re.compile(r"\((R|TM)\)|\b(CPU|Processor|\d+-Core)\b|@.*", re.IGNORECASE)


def name_of(environment: Mapping[str, Any]) -> str:
    """Return the kind of machine, such as "intel-xeon-2-cores"; never one machine's own name."""
    words = _EMPTY.sub(" ", str(environment["processor"]))
    return re.sub(r"[^a-z0-9]+", "-", f"{words} {environment['cores']} cores".lower()).strip("-")


def write(path: Path, values: Any) -> None:
    """Write JSON, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def read(path: Path) -> Any:
    """Read the JSON that `write` wrote; None where the file is missing."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
