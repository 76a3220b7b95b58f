"""The page about models, from what a sweep found: ``python -m tests.models.page [build/models.jsonl]``.

With a file, that becomes the result that the page shows.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.markdown import table
from tests.models.sweep import EXACT, LOSSY, PLAN, WITHOUT_CACHE, outcomes, read

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = Path(__file__).parent / "results.jsonl", ROOT / "docs/models.md"
KEPT = "@attention : keep; @blocks : recompute"
NO_ATTENTION = "'@attention' finds nothing"
HELD = ("recompute", KEPT, "derive", PLAN, "int8")  # columns of the table of models
MARK = "<!-- models: made by python -m tests.models.page -->"
Found = dict[str, dict[str, Any]]


def written(text: str, found: Found) -> str:
    """Return a page whose text above the mark is as it was, and below it what was found."""
    return text.partition(MARK)[0] + "\n\n".join([MARK, *_parts(found)]) + "\n"


def _parts(found: Found) -> list[str]:
    trained = {name: each for name, each in found.items() if "float32" in each}
    return [
        "\n".join(_libraries(found)),
        "## Each policy\n\n" + "\n".join(_policies(trained)),
        "## What is refused, and why\n\n" + "\n".join(_refusals(trained)),
        "## Gradient error\n\n" + "\n".join(_errors(trained)),
        "## Predictions\n\n" + "\n".join(_predictions(trained)),
        "## Each model\n\n" + "\n".join(_models(trained)),
    ]


def _libraries(found: Found) -> list[str]:
    rows = []
    for library in dict.fromkeys(name.partition("/")[0] for name in found):
        mine = [each for name, each in found.items() if name.startswith(f"{library}/")]
        counts = (sum(kind in each for each in mine) for kind in ("float32", "compiled", "left out"))
        rows.append([f"`{library}`", *map(str, counts)])
    rows.append(["**all**", *(f"**{sum(int(row[i]) for row in rows)}**" for i in (1, 2, 3))])
    return table(["library", "models trained", "of them also compiled", "not shrunk, or no batch known"], rows)


def _policies(trained: Found) -> list[str]:
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    held: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in trained.values():
        for kind, policy, what in outcomes(each):
            counts[kind, policy][_kind(what)] += 1
            held[kind, policy] += [] if isinstance(what, str) else [what[0]]
    rows = []
    for (kind, policy), count in sorted(counts.items(), key=lambda each: (_order(each[0][1]), each[0][0])):
        lossless = policy not in LOSSY
        share = "in transit" if "disk" in policy else f"{median(held[kind, policy]):.0%}"
        rows.append([
            f"`{policy}`" if policy != PLAN else "a plan for 75 %", kind, str(count["trained"]),
            str(count["DIFFERS"]) if lossless else "", str(count["NAN"]), str(count["refused"]),
            str(count["none"] or ""), str(count["cache"] or ""), share,
        ])  # fmt: skip
    header = [
        "policy",
        "run",
        "trained",
        "other bits",
        "NaN",
        "refused",
        "no attention",
        "cache left out",
        "held, median",
    ]
    return table(header, rows)


def _order(policy: str) -> int:
    return [*EXACT, PLAN, *LOSSY].index(policy)


def _kind(what: Any) -> str:
    if not isinstance(what, str):
        return "trained"
    if what.startswith(WITHOUT_CACHE):
        return "cache"
    return "none" if NO_ATTENTION in what else what.partition(":")[0].partition(" ")[0]


def _refusals(trained: Found) -> list[str]:
    models: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for name, each in trained.items():
        for _, policy, what in outcomes(each):
            if _kind(what) == "refused":
                reason = re.sub(r"\d[\d.,]*", "N", re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", what.partition(": ")[2]))
                models[reason[:160], policy][name.partition("/")[2]] = None
    rows = [
        [
            reason.replace("|", "/"),
            f"`{policy}`" if policy != PLAN else "a plan",
            ", ".join(list(names)[:6]),
            str(len(names)),
        ]
        for (reason, policy), names in sorted(models.items(), key=lambda each: -len(each[1]))
    ]
    return table(["reason", "policy", "models, at most six named", "count"], rows) if rows else ["Nothing."]


def _errors(trained: Found) -> list[str]:
    pairs = {
        name: (each["float32"]["int8"][1], each["autocast"])
        for name, each in trained.items()
        if "autocast" in each and isinstance(each["float32"], dict) and isinstance(each["float32"]["int8"], list)
    }
    ours, plain = ([pair[i] for pair in pairs.values()] for i in (0, 1))
    above = sorted(((x, y, name) for name, (x, y) in pairs.items() if x > 0.05 and y < 0.02), reverse=True)
    rows = [
        ["median of all models", f"{median(ours):.2%}", f"{median(plain):.2%}"],
        ["nine of ten models below", *(f"{sorted(each)[int(0.9 * (len(each) - 1))]:.2%}" for each in (ours, plain))],
        ["models above 5 % where plain bfloat16 is below 2 %", str(len(above)), ""],
        *([f"`{name}`", f"{x:.2%}", f"{y:.2%}"] for x, y, name in above),
    ]
    return table(["", "`int8`", "plain bfloat16 autocast"], rows)


def _predictions(trained: Found) -> list[str]:
    """Return the table of the errors that the report of `int8` predicts, and of the budgets that steps keep."""
    outcomes = [each["float32"] for each in trained.values() if isinstance(each["float32"], dict)]
    errors = [each["int8"] for each in outcomes if isinstance(each.get("int8"), list)]
    ratios = [each[2] / each[1] for each in errors if len(each) > 2 and each[1]]
    peaks = [each[PLAN][2] for each in outcomes if isinstance(each.get(PLAN), list) and len(each[PLAN]) > 2]
    rows = [
        ["the predicted error of `int8` is within a factor of 2 of the true one", len(ratios), _within(ratios, 0.5, 2)],
        ["it is not below a tenth of the true one", len(ratios), _within(ratios, 0.1, inf)],
        [
            "no step that looks for a plan, or runs it, exceeds the budget by more than 2 %",
            len(peaks),
            _within(peaks, 0, 1.02),
        ],
    ]
    shown = f"The report shows no predicted error for {sum(len(each) == 2 for each in errors)} of {len(errors)} models."
    return [*table(["", "models", "share"], [[text, str(count), share] for text, count, share in rows]), "", shown]


def _within(figures: list[float], low: float, high: float) -> str:
    return f"{sum(low <= each <= high for each in figures) / max(1, len(figures)):.1%}"


def _models(trained: Found) -> list[str]:
    rows = []
    for name, each in sorted(trained.items()):
        float32 = each["float32"]
        if isinstance(float32, str):
            rows.append([f"`{name}`", float32, *[""] * 6])
            continue
        error = float32["int8"][1] if isinstance(float32["int8"], list) else None
        rows.append([
            f"`{name}`", *(_share(float32[policy]) for policy in HELD), "" if error is None else f"{error:.2%}",
            f"{each['autocast']:.2%}" if "autocast" in each else "",
        ])  # fmt: skip
    header = ["model", "`recompute`", "attention kept", "`derive`", "a plan for 75 %", "`int8`"]
    return table([*header, "error of `int8`", "error of bfloat16"], rows)


def _share(what: Any) -> str:
    if isinstance(what, list):
        return f"{what[0]:.0%}"
    return {"none": "no attention", "cache": "cache left out"}.get(_kind(what), _kind(what))


def main() -> int:
    if len(sys.argv) > 1:
        RESULTS.write_bytes(Path(sys.argv[1]).read_bytes())
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), read(RESULTS)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
