"""Durations of the tests, and what `make test` runs of them: ``python -m tests.system.durations build/*.xml``.

`durations.txt` holds a line for each test function that takes a second or more in all: its seconds on one of two cores,
the number of its cases, and its name. From it follows which cases `make test` leaves to `make test-more`. The program
takes durations from JUnit files of both, drops functions that are gone, and puts the slowest into CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Collection
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests/durations.txt"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- durations: made by python -m tests.system.durations -->", "<!-- end of durations -->"

RECORDED_S = 1.0  # all cases of a function together; the file has those that take longer
CASES_S = 0.5  # `make test` runs as many cases of a function as take this long, but at least one
CASE_S = 4.0  # a function one case of which takes longer is left to `make test-more` as a whole
BOTH_S = 6.0  # both together run as many cases as take this long, but at least FEW, and all of a promise
FEW = 2
SLOW_S = 20.0  # a function one case of which takes longer is left to `make test-slow` as a whole
SLOWEST = 30  # rows of the table


class Duration(NamedTuple):
    """The seconds that all cases of a test function take, and their number."""

    seconds: float
    cases: int


def read(path: Path = FILE) -> dict[str, Duration]:
    """Read the durations, by names of functions as in ``tests/codecs/test_int8.py::test_codes``."""
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {name: Duration(float(seconds), int(cases)) for seconds, cases, name in rows}


def write(durations: dict[str, Duration], path: Path = FILE) -> None:
    """Write the durations in the order of names, so that a diff shows what has changed."""
    lines = (f"{each.seconds:8.1f} {each.cases:5d} {name}\n" for name, each in sorted(durations.items()))
    path.write_text("".join(lines), encoding="utf-8")


def function_of(nodeid: str) -> str:
    """Return the name of the function of a test: its node id without the case."""
    return nodeid.partition("[")[0]


def number_within(seconds: float, cases: int, duration: Duration | None) -> int:
    """Return how many of the cases of a function run within a time, at least one."""
    if duration is None:
        return cases
    return min(cases, max(1, int(seconds / max(_each(duration), 1e-9))))


def number_in_both(cases: int, duration: Duration | None) -> int:
    """Return how many of the cases of a function `make test` and `make test-more` run together."""
    if duration is not None and _each(duration) > SLOW_S:
        return 0
    return max(min(FEW, cases), number_within(BOTH_S, cases, duration))


def number_in_test(cases: int, duration: Duration | None) -> int:
    """Return how many of the cases of a function `make test` runs."""
    if duration is not None and _each(duration) > CASE_S:
        return 0
    return number_within(CASES_S, cases, duration)


def _each(duration: Duration) -> float:
    return duration.seconds / max(duration.cases, 1)


def choose(nodeids: list[str], number: int) -> set[str]:
    """Choose cases of one function: first those with a value that no earlier one has, then others.

    The values of a case are the words of its id. The order is drawn from the name of the function, so that a product of
    parameters gives mixed pairs.
    """
    drawn = sorted(nodeids)
    Random(function_of(drawn[0])).shuffle(drawn)
    seen: set[str] = set()
    first = []
    for nodeid in drawn:
        words = set(nodeid.partition("[")[2].rstrip("]").split("-"))
        if not words <= seen:
            first.append(nodeid)
            seen |= words
    return set([*first, *(nodeid for nodeid in drawn if nodeid not in set(first))][:number])


def left(
    nodeids: list[str], durations: dict[str, Duration], promises: Collection[str] = ()
) -> tuple[set[str], set[str]]:
    """Return the tests that `make test` leaves to `make test-more`, and those that both leave to `make test-slow`.

    Parameters
    ----------
    promises : tests of public promises: one case of a function runs in `make test`, however long it takes, and all
        in both together
    """
    promised = set(map(function_of, promises))
    functions: dict[str, list[str]] = defaultdict(list)
    for nodeid in nodeids:
        functions[function_of(nodeid)].append(nodeid)
    more, slow = set[str](), set[str]()
    for name, cases in functions.items():
        duration = durations.get(name)
        number = max(number_in_test(len(cases), duration), name in promised)
        both = len(cases) if name in promised else number_in_both(len(cases), duration)
        if number < len(cases):
            quick, run = choose(cases, number), choose(cases, both)
            more |= run - quick
            slow |= set(cases) - run - quick
    return more, slow


def measured(reports: list[Path]) -> dict[str, Duration]:
    """Add up the durations in JUnit files by function. Skipped tests count, as they are collected too."""
    found: dict[str, Duration] = defaultdict(lambda: Duration(0.0, 0))
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            place = re.fullmatch(r"([a-z_0-9.]+?)(?:\.([A-Z]\w*))?", case.get("classname", ""))
            if place is None:  # a module that was skipped as a whole
                continue
            file = f"{place[1].replace('.', '/')}.py"
            name = "::".join(filter(None, [file, place[2], function_of(case.get("name", ""))]))
            found[name] = Duration(found[name].seconds + float(case.get("time", 0)), found[name].cases + 1)
    return dict(found)


@cache
def _functions(file: Path) -> frozenset[str]:
    """Return the names of the functions of a file; none where the file is gone."""
    if not file.exists():
        return frozenset()
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def exists(name: str) -> bool:
    """Return whether a test function is there. One that a file takes from another module counts by its file."""
    file, *_, function = name.split("::")
    return function in _functions(ROOT / file)


def table_of(durations: dict[str, Duration]) -> str:
    """Return the slowest functions as a table."""
    slowest = sorted(durations.items(), key=lambda item: (-item[1].seconds, item[0]))[:SLOWEST]
    rows = (f"| {each.seconds:.0f} | {each.cases} | `{name}` |" for name, each in slowest)
    return "\n".join(["| seconds | cases | test |", "|--:|--:|---|", *rows])


def with_table(text: str, durations: dict[str, Duration]) -> str:
    """Return the text of CONTRIBUTING.md with the present table."""
    return re.sub(f"(?<={BEGIN}\n).*?(?={END})", lambda _: table_of(durations) + "\n", text, flags=re.DOTALL)


def main(arguments: list[str]) -> None:
    """Take over the durations in JUnit files, drop functions that are gone, and rewrite the table."""
    new = measured([Path(argument) for argument in arguments])
    kept = chain((item for item in read().items() if item[0] not in new), new.items())
    durations = {name: each for name, each in kept if each.seconds >= RECORDED_S and exists(name)}
    write(durations)
    CONTRIBUTING.write_text(with_table(CONTRIBUTING.read_text(encoding="utf-8"), read()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
