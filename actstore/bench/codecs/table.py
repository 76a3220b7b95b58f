"""Tables of a result, readable in 100 columns."""

from __future__ import annotations

import math
from statistics import median

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actstore.bench.codecs.result import CodecResult, CodecRow, Speed

_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_LEGEND = """\
bits: of the payload for one element.
of copy: the rate, in bytes of the tensor, over that of Tensor.copy_ of the same tensor right
before, into memory that was written; the median of the pairs, ± half the distance between their
quartiles. Calls allocate what they return: in memory that is used again; fresh: from the system.
GB/s: 10^9 bytes of the tensor a second. error: |x - decode(encode(x))| / |x|."""


def render(result: CodecResult) -> RenderableType:
    """Return the tables with their legend."""
    parts: list[RenderableType] = [Text(_title(result), style="bold"), _speeds(result)]
    lossy = [row for row in result.good if row.error and not row.lossless]
    if lossy:
        parts.append(Text("Relative error in %, by data", style="bold"))
        errors = [(row, {name: _percent(error) for name, error in row.error.items()}) for row in lossy]
        parts.append(_by_data(errors))
    variable = [row for row in result.good if row.ratio_by_data and not row.fixed]
    if variable:
        parts.append(Text("Ratio where the size is not fixed, by data", style="bold"))
        ratios = [(row, {name: f"{ratio:.2f}" for name, ratio in row.ratio_by_data.items()}) for row in variable]
        parts.append(_by_data(ratios))
    parts += [Text(f"{row.codec}: {row.failed}", style="yellow" if row.missing else "red") for row in result.failed]
    return Group(*parts, Text(_LEGEND, style="dim"))


def _title(result: CodecResult) -> str:
    env, setting = result.environment, result.setting
    copies = [ms for row in result.good for ms in (row.encode.copy_ms if row.encode else [])]
    rate = f"; copy_: {setting['size_mb'] / median(copies):.1f} GB/s" if copies else ""
    size = f"Tensors of {setting['size_mb']:g} MB"
    return f"{size}; {env['processor']}, {setting['threads']} threads, torch {env['torch']}{rate}"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _speeds(result: CodecResult) -> Table:
    table = _table()
    table.add_column("\ncodec", no_wrap=True)
    table.add_column("\ndtype")
    table.add_column("\ndata")
    for name in ("\nbits", "encode\nof copy", "\nfresh", "\nGB/s", "decode\nof copy", "\nfresh", "\nGB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.good:
        table.add_row(
            Text(row.codec), _SHORT.get(row.dtype, row.dtype), row.data, f"{row.bits:.2f}",
            *_speed(row, row.encode), *_speed(row, row.decode),
        )  # fmt: skip
    return table


def _speed(row: CodecRow, speed: Speed | None) -> tuple[str, str, str]:
    if speed is None:
        return "-", "-", "-"
    low, middle, high = speed.quartiles
    fresh = "" if speed.fresh_of_copy is None else f"{speed.fresh_of_copy:.2f}"
    return f"{middle:.2f} ±{(high - low) / 2:.2f}", fresh, f"{speed.gbps(row.nbytes):.2f}"


def _by_data(rows: list[tuple[CodecRow, dict[str, str]]]) -> Table:
    table = _table()
    table.add_column("codec", no_wrap=True)
    table.add_column("dtype")
    for name in rows[0][1]:
        table.add_column(name, justify="right", no_wrap=True)
    for row, cells in rows:
        table.add_row(Text(row.codec), _SHORT.get(row.dtype, row.dtype), *cells.values())
    return table


def _percent(error: float | None) -> str:
    if error is None or not math.isfinite(error):
        return "not finite"
    return "0 (exact)" if error == 0 else f"{100 * error:.2f}"
