"""The command ``actstore bench compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actstore.bench.comparison import Change, changes, differences, only, packages
from actstore.bench.files import reading
from actstore.bench.result import Result
from actstore.bench.table import mib, number
from actstore.display.text import say
from actstore.errors import MALFORMED, ConfigError

_MARKED_CHANGE = 0.05  # changes above this fraction are marked where no limit is given


def compare(
    old: Annotated[Path, typer.Argument(help="The baseline: a result of actstore bench (--json).")],
    new: Annotated[Path, typer.Argument(help="The result to compare with it.")],
    fail_above: Annotated[
        str, typer.Option(help="Exit with 1 if time or held bytes of a row grew by more than this, such as 5%.")
    ] = "",
    anyway: Annotated[bool, typer.Option(help="Compare results of different machines or jobs, too.")] = False,
) -> None:
    """Compare two results row by row: time and held bytes, and whether a difference is more than noise."""
    limit = parse_limit(fail_above)
    before, after = read(old), read(new)
    with reading(old, new):
        unlike = differences(before, after)
        if unlike and not anyway:
            raise ConfigError(
                f"{old} and {new} cannot be compared: {'; '.join(unlike)}. Measure both alike, or give --anyway."
            )
        found = changes(before, after)
        say(render(before, after, found, unlike, limit))
    if limit is not None and any(list(change.complaints(limit)) for change in found):
        raise typer.Exit(1)


def parse_limit(text: str) -> float | None:
    """Return a fraction from text such as "5%" or "0.05"; None from an empty text.

    Raises
    ------
    ConfigError : the text is neither
    """
    if not text.strip():
        return None
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"--fail-above {text!r}: must be a share >= 0. Write for example 5% or 0.05.")
    return value


def read(file: Path) -> Result:
    """Read a result of the main benchmark.

    Raises
    ------
    ConfigError : the file cannot be read, or has another format
    """
    try:
        return Result.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}. Give a file that can be read.") from error
    except MALFORMED as error:
        raise ConfigError(
            f"{file}: not a result of the benchmark. Give a file that actstore bench --json made."
        ) from error


def render(
    before: Result, after: Result, found: list[Change], unlike: list[str], limit: float | None
) -> RenderableType:
    """Return the table and its notes; readable in 100 columns."""
    mark = _MARKED_CHANGE if limit is None else limit
    table = Table(
        title=Text(f"{after.subject}\n{after.place}"), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("row", max_width=28)
    for column in ("times plain", "change", "95 % of it", "held MiB", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for change in found:
        verdict, style = _verdict(change, mark)
        table.add_row(Text(change.new.name), *_cells(change), verdict, style=style)
    notes = [Text(f"{change.new.name} {text}", style="red") for change in found for text in change.complaints(mark)]
    for one, other, which in ((before, after, "old"), (after, before, "new")):
        notes += [Text(f"{name} is in the {which} result only", style="yellow") for name in only(one, other)]
        if one.busy:
            notes.append(Text(f"the {which} result was measured on a busy machine", style="yellow"))
    notes += [Text(f"unlike: {line}", style="yellow") for line in unlike]
    versions = packages(before, after)
    notes += [Text(f"versions, old and new: {'; '.join(versions)}", style="dim")] if versions else []
    return Group(table, *notes, Text(_legend(mark), style="dim"))


def _verdict(change: Change, limit: float) -> tuple[str, str | None]:
    if next(change.complaints(limit), ""):
        return "worse", "red"
    growths = [growth for growth in (change.time, change.held) if growth is not None]
    if any(growth.middle > 1 + limit for growth in growths):
        return "noise?", "yellow"
    if any(growth.high < 1 - limit for growth in growths):
        return "better", "green"
    return "", None


def _cells(change: Change) -> list[str]:
    old, new, time, held = change.old, change.new, change.time, change.held
    return [
        f"{number(old.ratio, '.2f')} → {number(new.ratio, '.2f')}",
        "-" if time is None else f"{time.middle - 1:+.1%}",
        "-" if time is None else f"{100 * (time.low - 1):+.0f} .. {time.high - 1:+.0%}",
        f"{mib(old.held_bytes)} → {mib(new.held_bytes)}",
        "-" if held is None else f"{held.middle - 1:+.1%}",
    ]


def _legend(limit: float) -> str:
    return (
        "times plain: median over pairs of neighboring steps. 95 % of it: of the changes of resampled pairs.\n"
        f"worse: all these are above {_percent(limit)}, held grew by as much, a row lost exactness, or it fails.\n"
        "noise?: the middle is above, not all. What happens to be on its way to a tier, up to 10 % of what is\n"
        "saved, does not count as held."
    )


def _percent(part: float) -> str:
    return f"{100 * part:g} %"
