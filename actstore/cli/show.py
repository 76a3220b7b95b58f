"""The command ``actstore show``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actstore import Plan
from actstore.base.units import format_nbytes
from actstore.bench.codecs.result import CodecResult
from actstore.bench.files import check_outputs, reading
from actstore.bench.result import Result
from actstore.display.text import say
from actstore.errors import MALFORMED, ConfigError
from actstore.results import Profile
from actstore.trace import Trace
from actstore.trace.ndjson import is_trace
from actstore.trace.summary import Lane, Summary, format_percent

LISTED_STEPS = 12  # the last steps, in the table of steps
_LANE_COLUMNS = ("\nevents", "\nbytes", "busy\nms", "busy\n%", "\nGB/s", "beside\ncompute", "in stalls\nms")
_STEP_COLUMNS = ("ms", "compute ms", "stall ms", "stalls", "hidden", "offloaded", "fetched", "kept")


def show(
    file: Annotated[
        Path, typer.Argument(help="A trace (NDJSON), a result of a benchmark, a plan or a profile (JSON).")
    ],
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write the trace for ui.perfetto.dev into this file.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of the trace; by default the last complete one.")] = None,
) -> None:
    """Show a trace, a result of `actstore bench`, a plan or a profile, as tables and pictures."""
    check_outputs(plot=plot, chrome=chrome)
    for path, option in ((plot, "--plot"), (chrome, "--chrome")):
        if path is not None and path.exists() and file.exists() and path.samefile(file):
            raise ConfigError(f"{option} {path} is the file to show. Choose another.")
    if is_trace(_first_line(file)):
        _show_trace(Trace.read(file), plot, chrome, step)
        return
    planned = _read_planned(file)
    result = planned or _read_result(file)
    kind = "result" if planned is None else "plan" if isinstance(planned, Plan) else "profile"
    for option, value in (("--chrome", chrome), ("--step", step)):
        if value is not None:
            raise ConfigError(f"{option} does nothing to {file}, which is a {kind} and not a trace. Leave it out.")
    if isinstance(result, Plan | Profile):
        _show_planned(result, plot)
    else:
        with reading(file):
            _show_result(result, plot)


def _read_planned(file: Path) -> Plan | Profile | None:
    """Read a plan or a profile, by the field "format"; return None for another file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    said = str(values.get("format", "")) if isinstance(values, dict) else ""
    for name, kind in (("actstore plan ", Plan), ("actstore profile ", Profile)):
        if said.startswith(name):
            return kind.read(file)
    return None


def _show_planned(planned: Plan | Profile, plot: Path | None) -> None:
    if isinstance(planned, Profile):
        if plot is not None:
            raise ConfigError(
                "--plot draws plans, and this is a profile: actstore plan PROFILE --budget 20GiB --plot FILE."
            )
        typer.echo(str(planned))
        return
    typer.echo(planned.explain())
    if plot is not None:
        from actstore.plan.plot import save

        save(planned, plot)


def _first_line(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return lines.readline(1 << 16)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}. Give a file that can be read.") from error


def _show_trace(trace: Trace, plot: Path | None, chrome: Path | None, step: int | None) -> None:
    steps = trace.steps()
    if step is not None and step not in steps:
        have = f"has steps {steps[0]} to {steps[-1]}" if steps else "has no events"
        raise ConfigError(f"--step {step} is not in the trace, which {have}.")
    step = trace.last_step() if step is None else step
    say(render(trace, step))
    if plot is not None:
        from actstore.trace.picture import save

        save(trace, plot, step)
    if chrome is not None:
        trace.to_chrome(chrome)


def render(trace: Trace, step: int | None) -> RenderableType:
    """Return a table of one step's lanes, and one of the last steps; readable in 100 columns."""
    if step is None:
        return Text("The trace has no events.")
    summary = trace.summary(step)
    title = f"step {step}{f' on {trace.device}' if trace.device else ''}: {summary.words}"
    parts: list[RenderableType] = [_lanes(summary, title)]
    steps = trace.steps()
    if len(steps) > 1:
        parts.append(_steps(trace, steps))
    if trace.lost:
        words = f"{trace.lost} older events were lost; give the trace a larger limit, or trace fewer steps."
        parts.append(Text(words, style="yellow"))
    legend = (
        "busy: of compute without stalls; of a link while any of its copies ran. GB/s: bytes over that.\n"
        "beside compute: the part of the busy time in which compute worked; hidden: did not wait."
    )
    return Group(*parts, Text(legend, style="dim"))


def _lanes(summary: Summary, title: str) -> Table:
    table = _table(title, "\nlane", _LANE_COLUMNS)
    for lane in summary.lanes:
        table.add_row(lane.name, *_lane_cells(lane, summary.span_ns))
    return table


def _lane_cells(lane: Lane, span_ns: int) -> list[str]:
    link = lane.is_link
    return [
        str(lane.events),
        format_nbytes(lane.nbytes) if link else "-",
        _ms(lane.busy_ns),
        f"{100 * lane.busy_ns / span_ns:.1f}" if span_ns else "-",
        f"{lane.gbps:.2f}" if lane.gbps is not None else "-",
        format_percent(lane.overlap_ns / lane.busy_ns) if link and lane.busy_ns else "-",
        _ms(lane.exposed_ns) if link else "-",
    ]


def _steps(trace: Trace, steps: list[int]) -> Table:
    shown = steps[-LISTED_STEPS:]
    first = f" of {len(steps)}, the last {len(shown)}" if len(shown) < len(steps) else ""
    table = _table(f"steps{first}", "step", _STEP_COLUMNS)
    for step in shown:
        summary = trace.summary(step)
        moved = [
            sum(lane.nbytes for lane in summary.lanes if lane.name.startswith(kind)) for kind in ("offload", "fetch")
        ]
        table.add_row(
            str(step),
            _ms(summary.span_ns),
            _ms(summary.compute_ns),
            _ms(summary.stall_ns),
            str(summary.stalls),
            "-" if summary.hidden is None else format_percent(summary.hidden),
            *(format_nbytes(nbytes) for nbytes in (*moved, summary.kept_nbytes)),
        )
    return table


def _table(title: str, first: str, columns: tuple[str, ...]) -> Table:
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f}"


def _read_result(file: Path) -> Result | CodecResult:
    for kind in (Result, CodecResult):
        try:
            return kind.from_json(file.read_text(encoding="utf-8"))
        except MALFORMED:
            continue  # another kind, or none
    raise ConfigError(
        f"{file} is neither a trace nor a result of a benchmark, a plan or a profile. Give a file that Trace.write "
        "made, --json of actstore bench or actstore bench codecs, or --output or --profile of actstore plan."
    )


def _show_result(result: Result | CodecResult, plot: Path | None) -> None:
    if isinstance(result, Result):
        from actstore.bench.table import render

        say(render(result))
        if plot is not None:
            from actstore.bench.plot import save

            save(result, plot)
    else:
        from actstore.bench.codecs.table import render as render_codecs

        say(render_codecs(result))
        if plot is not None:
            from actstore.bench.codecs.plot import save as save_codecs

            save_codecs(result, plot)
