"""The tutorial as a notebook: ``python -m docs.notebook`` writes it again after a change of the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "guide" / "tutorial.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> str:
    """Return a page as a Jupyter notebook (format 4.5): a cell for each Python block, and for the words between two."""
    cells: list[dict[str, Any]] = []
    for at, text in enumerate(PYTHON.split(page)):
        code: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
        kind = code if at % 2 else {"cell_type": "markdown"}
        cells.append({"id": f"cell-{at}", "metadata": {}, "source": text.strip(), **kind})
    values = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
