"""Test runner that writes each outcome: ``python -m benchmarks.gpu.pytests --json FILE -- PYTEST ARGUMENTS``.

The file is written every few seconds, so that it is there when the time ends. The options of pyproject.toml are left
out: the machine with the GPU may lack the plugins behind them, and its packages are other versions than the pinned
ones, whose warnings do not count as failures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

WRITE_INTERVAL_S = 2.0
PYTEST = (
    "-q", "-rfE", "--continue-on-collection-errors", "-o", "addopts=", "-W", "default",
    "-W", "ignore::pytest.PytestConfigWarning", "-p", "no:cacheprovider",
)  # fmt: skip


class Record:
    """A pytest plugin that counts outcomes.

    Attributes
    ----------
    found : counts, and for each test that did not pass its name and the last line of its message
    """

    def __init__(self, path: Path) -> None:
        self._path, self._written = path, 0.0
        self.found: dict[str, Any] = {"passed": [], "failed": {}, "skipped": {}, "finished": False}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.found["failed"][report.nodeid] = _last(report.longreprtext)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.found["skipped"][report.nodeid] = reason.removeprefix("Skipped: ")
        elif report.when == "call":
            self.found["passed"].append(report.nodeid)
        if monotonic() - self._written > WRITE_INTERVAL_S:
            self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.found["failed"][report.nodeid or "collection"] = _last(report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        self.found["finished"] = True
        self.write()

    def write(self) -> None:
        self._written = monotonic()
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E  ")]
    return (errors or lines or [""])[-1].removeprefix("E").strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="write the outcomes to this file")
    parser.add_argument("--workers", type=int, default=1, help="processes, where pytest-xdist is installed")
    parser.add_argument("--device", help="make it the default device of the tests, in every process")
    parser.add_argument("arguments", nargs="*", help="of pytest")
    options = parser.parse_args()
    several = ["-n", str(options.workers)] if options.workers > 1 and find_spec("xdist") else []
    if options.device:
        os.environ["ACTSTORE_TEST_DEVICE"] = options.device
    record = Record(options.json)
    code = int(pytest.main([*PYTEST, *several, *options.arguments], plugins=[record]))
    found = record.found
    said = ", ".join(f"{len(found[kind])} {kind}" for kind in ("passed", "failed", "skipped"))
    print(f"{said}{f' (pytest ended with {code})' if code > 1 else ''}")
    return code


if __name__ == "__main__":
    sys.exit(main())
