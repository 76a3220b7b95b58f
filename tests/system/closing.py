"""The sum of pytest's closing lines. ``python -m tests.system.closing LOG ...`` prints it as pytest would."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

LINE = re.compile(r"^=+ ((?:\d+ \w+(?:, )?)+) in ([0-9.]+)s.* =+$", re.MULTILINE)


def closing_line(logs: list[str]) -> str:
    """Return one closing line for several runs.

    Raises
    ------
    ValueError : a log without a closing line
    """
    counts: Counter[str] = Counter()
    seconds = 0.0
    for number, log in enumerate(logs):
        found = LINE.findall(log)
        if not found:
            raise ValueError(f"log {number}: pytest printed no closing line.")
        parts, took = found[-1]
        for part in parts.split(", "):
            count, outcome = part.split()
            counts[outcome] += int(count)
        seconds += float(took)
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    whole = f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
    return f" {text} in {seconds:.2f}s ({whole}) ".center(120, "=")


if __name__ == "__main__":
    print(closing_line([Path(argument).read_text(encoding="utf-8") for argument in sys.argv[1:]]))
