"""Simulated steps on machines that are not available: ``python -m benchmarks.simulator.run`` (a minute and a half).

Writes benchmarks/results/planner-scale.json and, from it, the tables of docs/planner-simulation.md. All of it is
simulated; only the run times of simulator and planner are measured.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from actstore.bench.environment import environment
from actstore.errors import CapacityError
from actstore.plan.hardware import A100_PCIE, A100_SXM, PRESETS, Hardware
from actstore.plan.solver.chain import LayerChain, Limits, Links
from actstore.plan.solver.solve import Solution, solve
from benchmarks.markdown import table
from benchmarks.simulator import jobs, published
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import Block, chosen, equal, options, transformer

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "planner-scale.json"
PAGE = ROOT / "docs" / "planner-simulation.md"

BLOCK = Block(hidden=4096, heads=32, sequence=4096)
MFU = 0.5
GIB = 2**30
Rows = list[dict[str, Any]]


def plan(chain: LayerChain, share: float, time_limit: float = 10.0) -> tuple[Solution, Limits]:
    """Solve a plan for that share of all activations, plus two layers."""
    nbytes = chain.layers[0].options[0].held
    limits = Limits(share * len(chain.layers) * nbytes + 2 * nbytes)
    return solve(chain, limits, gap=0.005, time_limit=time_limit), limits


def mix(chain: LayerChain, choice: tuple[int, ...]) -> str:
    """Count the layers of each option."""
    names = Counter(layer.options[o].decision for layer, o in zip(chain.layers, choice, strict=True))
    return ", ".join(f"{count} {name}" for name, count in names.most_common())


def rows_of_published() -> Rows:
    return [asdict(row) for row in published.rows()]


def rows_of_chunks() -> Rows:
    """Compare the end of a step with the timeline's, over plans of the prototype's chain."""
    late: dict[int, list[float]] = {chunks: [] for chunks in (1, 2, 4, 8, 16)}
    for rate in (10, 25, 50, 100):
        chain = equal(32, 14, 28, options(900, 33, 14), Hardware(Links(rate, rate)))
        for budget in (2700, 4500, 7200, 9000, 12000, 18000):
            found = solve(chain, Limits(budget), gap=0.005, time_limit=10)
            for chunks, percents in late.items():
                step = simulate(chain, found.choice, limits=Limits(budget), chunks=chunks, drain=True)
                percents.append(100 * (step.ms / found.evaluation.total - 1))
    return [{"chunks": chunks, "most": max(p), "mean": sum(p) / len(p), "plans": len(p)} for chunks, p in late.items()]


def rows_of_budgets() -> Rows:
    found = []
    for layers in (32, 64, 128, 256, 512, 1024):
        chain = transformer(BLOCK, layers, A100_PCIE, MFU)
        for share in (0.1, 0.25, 0.5):
            begin = perf_counter()
            solution, limits = plan(chain, share)
            planned = perf_counter()
            step = simulate(chain, solution.choice, A100_PCIE, limits)
            found.append(
                {
                    "layers": layers, "share": share, "device": limits.device, "plain_ms": chain.plain,
                    "predicted_ms": solution.evaluation.total, "ms": step.ms, "stalled_ms": step.stalled,
                    "host": step.host, "mix": mix(chain, solution.choice),
                    "planner_s": planned - begin, "simulator_s": perf_counter() - planned,
                }
            )  # fmt: skip
    return found


def rows_of_ranks() -> Rows:
    """Compare a plan made for a device alone with one for its share of the node."""
    found = []
    chain = transformer(BLOCK, 32, A100_SXM, MFU)
    alone, limits = plan(chain, 0.25)
    for ranks in (1, 2, 4, 8):
        node, links = A100_SXM.node, A100_SXM.links
        share = replace(links, out=min(links.out, node.out / ranks), back=min(links.back, node.back / ranks))
        shared, _ = plan(replace(chain, links=share), 0.25)
        for name, solution in (("for one", alone), ("for all", shared)):
            step = simulate(chain, solution.choice, A100_SXM, limits, ranks=ranks)
            found.append(
                {
                    "ranks": ranks, "plan": name, "ms": step.ms, "plain_ms": chain.plain, "stalled_ms": step.stalled,
                    "host": step.host, "mix": mix(chain, solution.choice),
                }
            )  # fmt: skip
    return found


def rows_of_windows() -> Rows:
    """Compare the plan, whose whole budget may be in transit, with a store that has a window."""
    chain = transformer(BLOCK, 32, A100_PCIE, MFU)
    solution, limits = plan(chain, 0.25)
    found = []
    for window in (256 * 2**20, 512 * 2**20, GIB, 2 * GIB, 4 * GIB, inf):
        step = simulate(chain, solution.choice, A100_PCIE, limits, window=window)
        nbytes = None if window == inf else window
        found.append({"window": nbytes, "ms": step.ms, "plain_ms": chain.plain, "device": step.device})
    return found


def rows_of_stages() -> Rows:
    found = []
    chain = transformer(BLOCK, 32, A100_PCIE, MFU)
    window = 2 * chain.layers[0].options[0].held
    for stages in (1, 2, 4, 8):
        for name in ("keep", "recompute", "raw @ host"):
            choice = chosen(chain, [name] * 31 + ["keep"])
            step = simulate(chain, choice, A100_PCIE, window=window, stages=stages, microbatches=16)
            peaks = [stage.device for stage in step.stages]
            found.append(
                {
                    "stages": stages, "all": name, "ms": step.ms, "first": peaks[0], "last": peaks[-1],
                    "stalled_ms": step.stalled, "bubble_ms": step.stages[0].stalls.get("pipeline", 0.0),
                    "host": step.host,
                }
            )  # fmt: skip
    return found


def rows_of_machines() -> Rows:
    found = []
    for name, hardware in PRESETS.items():
        chain = transformer(BLOCK, 32, hardware, MFU)
        row: dict[str, Any] = {
            "machine": name,
            "plain_ms": chain.plain,
            "saved": sum(x.options[0].held for x in chain.layers),
        }
        for share in (0.1, 0.25):
            solution, limits = plan(chain, share)
            row[f"{share:.0%}"] = simulate(chain, solution.choice, hardware, limits).ms / chain.plain
        recompute = simulate(chain, chosen(chain, ["recompute"] * 32), hardware)
        try:
            offload = simulate(chain, chosen(chain, ["raw @ host"] * 32), hardware, Limits(row["saved"] / 10))
            row["raw @ host"] = offload.ms / chain.plain
        except CapacityError:
            row["raw @ host"] = None
        found.append({**row, "recompute": recompute.ms / chain.plain})
    return found


def rows_of_speed() -> Rows:
    found = []
    for layers, ranks in ((32, 1), (128, 1), (1024, 1), (1024, 2), (1024, 4), (1024, 8)):
        chain = transformer(BLOCK, layers, A100_SXM, MFU)
        choice = chosen(chain, ["raw @ host", "recompute"] * (layers // 2))
        begin = perf_counter()
        step = simulate(chain, choice, A100_SXM, ranks=ranks)
        found.append({"layers": layers, "ranks": ranks, "events": step.events, "seconds": perf_counter() - begin})
    return found


def percent(part: float) -> str:
    return f"{100 * part:+.1f} %" if abs(part) >= 0.0005 else "0.0 %"


def times(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:.3f}"


def tables(found: dict[str, Rows]) -> dict[str, list[str]]:
    """Return the lines of each table of the page."""

    def of(name: str, columns: dict[str, Any]) -> list[str]:
        return table(list(columns), [[cell(row) for cell in columns.values()] for row in found[name]])

    return {
        "published": of("published", {
            "source": lambda r: r["source"], "figure": lambda r: r["what"], "unit": lambda r: r["unit"],
            "published": lambda r: f"{r['published']:g}", "ours": lambda r: f"{r['ours']:.4g}",
            "difference": lambda r: "fitted" if r["fitted"] else percent(r["ours"] / r["published"] - 1),
            "assumed": lambda r: r["assumed"],
        }),
        "missing": [f"* {what}: {why}." for what, why in published.MISSING.items()],
        "chunks": of("chunks", {
            "chunks of a layer": lambda r: str(r["chunks"]), "late at most": lambda r: f"{r['most']:.2f} %",
            "on average": lambda r: f"{r['mean']:.2f} %",
        }),
        "budgets": of("budgets", {
            "layers": lambda r: f"{r['layers']:,}",
            "budget": lambda r: f"{r['share']:.0%}, {r['device'] / GIB:.0f} GiB",
            "plain": lambda r: f"{r['plain_ms']:,.0f} ms",
            "planned": lambda r: times(r["predicted_ms"] / r["plain_ms"]),
            "simulated": lambda r: times(r["ms"] / r["plain_ms"]), "stalls": lambda r: f"{r['stalled_ms']:,.0f} ms",
            "host": lambda r: f"{r['host'] / GIB:.0f} GiB", "layers that": lambda r: r["mix"],
            "planner": lambda r: f"{r['planner_s']:.1f} s", "simulator": lambda r: f"{r['simulator_s']:.2f} s",
        }),
        "ranks": of("ranks", {
            "ranks": lambda r: str(r["ranks"]), "plan": lambda r: r["plan"],
            "times plain": lambda r: times(r["ms"] / r["plain_ms"]), "stalls": lambda r: f"{r['stalled_ms']:,.0f} ms",
            "host": lambda r: f"{r['host'] / GIB:.0f} GiB", "layers that": lambda r: r["mix"],
        }),
        "windows": of("windows", {
            "window": lambda r: "as large as the budget" if r["window"] is None else f"{r['window'] / 2**20:,.0f} MiB",
            "times plain": lambda r: times(r["ms"] / r["plain_ms"]),
            "device": lambda r: f"{r['device'] / GIB:.1f} GiB",
        }),
        "stages": of("stages", {
            "stages": lambda r: str(r["stages"]), "all layers": lambda r: r["all"],
            "step": lambda r: f"{r['ms']:,.0f} ms",
            "first stage's peak": lambda r: f"{r['first'] / GIB:.1f} GiB",
            "last stage's": lambda r: f"{r['last'] / GIB:.1f} GiB", "bubble": lambda r: f"{r['bubble_ms']:,.0f} ms",
            "stalls": lambda r: f"{r['stalled_ms']:,.0f} ms", "host, a node": lambda r: f"{r['host'] / GIB:.1f} GiB",
        }),
        "machines": of("machines", {
            "machine": lambda r: r["machine"], "plain": lambda r: f"{r['plain_ms']:,.0f} ms",
            "all recompute": lambda r: times(r["recompute"]), "all raw @ host": lambda r: times(r["raw @ host"]),
            "planned, 25 %": lambda r: times(r["25%"]), "planned, 10 %": lambda r: times(r["10%"]),
        }),
        "groups": of("groups", {
            "ranks": lambda r: str(r["ranks"]), "read over": lambda r: r["link"],
            "device, `recompute`": lambda r: f"{r['whole'] / GIB:.2f} GiB",
            "device": lambda r: f"{r['device'] / GIB:.2f} GiB", "host, a node": lambda r: f"{r['host'] / GIB:.1f} GiB",
            "times `recompute`": lambda r: times(r["times"]),
        }),
        "jobs": of("jobs", {
            "ranks": lambda r: f"{r['ranks']:,}", "stages": lambda r: str(r["stages"]),
            "replicas": lambda r: str(r["replicas"]), "all layers": lambda r: r["all"],
            "step": lambda r: f"{r['ms']:,.0f} ms", "first stage's peak": lambda r: f"{r['first'] / GIB:.1f} GiB",
            "last stage's": lambda r: f"{r['last'] / GIB:.1f} GiB", "bubble": lambda r: f"{r['bubble_ms']:,.0f} ms",
            "stalls": lambda r: f"{r['stalled_ms']:,.0f} ms", "host, a node": lambda r: f"{r['host'] / GIB:.0f} GiB",
        }),
        "slowest": of("slowest", {
            "spread of links": lambda r: f"{r['spread']:.0%}", "ranks": lambda r: f"{r['ranks']:,}",
            "slowest link": lambda r: f"{r['share']:.2f} of the usual one",
            "plan for the usual node": lambda r: times(r["usual"]),
            "plan for the slowest": lambda r: times(r["agreed"]),
        }),
        "speed": of("speed", {
            "layers": lambda r: f"{r['layers']:,}", "ranks": lambda r: str(r["ranks"]),
            "events": lambda r: f"{r['events']:,}", "simulator": lambda r: f"{r['seconds']:.2f} s",
        }),
    }  # fmt: skip


def filled(page: str, found: dict[str, Rows]) -> str:
    """Return the page with its tables between their markers."""
    for name, lines in tables(found).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        page, count = re.subn(
            f"{begin}.*?{end}", lambda _, b=begin, e=end, t=lines: b + "\n".join(t) + f"\n{e}", page, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"{PAGE.name} has {count} places for the table {name}; it needs one")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--page", action="store_true", help="write the page from the stored result, and simulate nothing"
    )
    if not parser.parse_args().page:
        here = globals() | vars(jobs)
        makers = {name.removeprefix("rows_of_"): make for name, make in here.items() if name.startswith("rows_of_")}
        found = {name: make() for name, make in makers.items()}
        RESULT.write_text(json.dumps({"environment": environment(), "simulated": found}, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULT.read_text())["simulated"]))


if __name__ == "__main__":
    main()
