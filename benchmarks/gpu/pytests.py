"""Test runner that writes each outcome: ``python -m benchmarks.gpu.pytests --json FILE -- PYTEST ARGUMENTS``.

The file is written every few seconds, so that it is there when the time ends; test files that have run to their end at
this commit do not run again. The options of pyproject.toml are left
out: the machine with the GPU may lack their plugins, and its packages are other versions than the pinned
ones, whose warnings do not count as failures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from benchmarks.gpu.place import COMMIT, read

WRITE_INTERVAL_S = 2.0
PYTEST = (
    "-q", "-rfE", "--continue-on-collection-errors", "-o", "addopts=", "-W", "default",
    "-W", "ignore::pytest.PytestConfigWarning", "-p", "no:cacheprovider",
)  # fmt: skip


class Record:
    """A pytest plugin that notes outcomes, and which files have run to their end.

    Attributes
    ----------
    found : names of tests by outcome, for each that did not pass the last line of its message, and the commit at which
        each file has run to its end
    """

    def __init__(self, path: Path, files: list[str]) -> None:
        self._path, self._written, self._commit = path, 0.0, os.environ.get(COMMIT, "")
        empty: dict[str, Any] = {"passed": [], "failed": {}, "skipped": {}, "files": {}}
        self.found: dict[str, Any] = empty | (read(path) or {}) | {"finished": False}
        self._files, self._begun = files, set[str]()
        self._left: Counter[str] = Counter()
        self.files = [file for file in files if not self._commit or self.found["files"].get(file) != self._commit]
        for file in self.files:
            self.found["files"].pop(file, None)
        for file in {_file(test) for kind in _KINDS for test in self.found[kind]} - set(files):
            self._forget(file)

    def _forget(self, file: str) -> None:
        """Drop the outcomes of an earlier run of a file."""
        for kind in _KINDS:
            old = self.found[kind]
            kept = [test for test in old if _file(test) != file]
            self.found[kind] = kept if isinstance(old, list) else {test: old[test] for test in kept}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._count([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._count(ids)

    def _count(self, tests: list[str]) -> None:
        if tests and not self._left:
            self._left = Counter(map(_file, tests))
            for file in set(self.files) - set(self._left):  # none of its tests is chosen
                self.found["files"][file] = self._commit

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = _file(report.nodeid)
        if file not in self._begun:
            self._begun.add(file)
            self._forget(file)
        if report.failed:
            self.found["failed"][report.nodeid] = _last(report.longreprtext)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.found["skipped"][report.nodeid] = reason.removeprefix("Skipped: ")
        elif report.when == "call":
            self.found["passed"].append(report.nodeid)
        if report.when == "teardown":
            self._left[file] -= 1
            if not self._left[file]:
                self.found["files"][file] = self._commit
        if monotonic() - self._written > WRITE_INTERVAL_S:
            self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.found["failed"][report.nodeid or "collection"] = _last(report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        """Write the file; a run is finished when each of its files is."""
        self._written = monotonic()
        self.found["finished"] = set(self._files) <= set(self.found["files"])
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")


_KINDS = ("passed", "failed", "skipped")


def _file(test: str) -> str:
    return test.partition("::")[0]


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
    several = ["-n", str(options.workers), "--dist", "worksteal"] if options.workers > 1 and find_spec("xdist") else []
    if options.device:
        os.environ["ACTSTORE_TEST_DEVICE"] = options.device
    files = [argument for argument in options.arguments if argument.endswith(".py")]
    record = Record(options.json, files)
    chosen = [argument for argument in options.arguments if argument not in files or argument in record.files]
    code = int(pytest.main([*PYTEST, *several, *chosen], plugins=[record])) if record.files else 0
    found = record.found
    said = ", ".join(f"{len(found[kind])} {kind}" for kind in ("passed", "failed", "skipped"))
    print(f"{said}{f' (pytest ended with {code})' if code > 1 else ''}")
    return code or int(bool(found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
