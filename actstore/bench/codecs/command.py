"""The command ``actstore bench codecs``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from actstore.bench.codecs.contenders import DEFAULT, select
from actstore.bench.codecs.measure import Setting, run
from actstore.bench.codecs.result import CodecResult
from actstore.bench.files import check_plot, check_writable
from actstore.display.text import TABLE_WIDTH

_DEFAULTS = Setting()


def codecs(
    codec: Annotated[
        list[str] | None, typer.Argument(help="Policy texts such as 'int4(group=64)'. Left out: a list of all.")
    ] = None,
    size: Annotated[float, typer.Option(help="Size of the timed tensors, in 10^6 bytes.")] = _DEFAULTS.size_mb,
    error_rows: Annotated[
        int, typer.Option(help="Rows of 1024 elements whose error is measured.")
    ] = _DEFAULTS.error_rows,
    repeats: Annotated[int, typer.Option(help="Timed calls each way.")] = _DEFAULTS.repeats,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16, float16; may be repeated.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0: one for each core.")] = _DEFAULTS.threads,
    seed: Annotated[int, typer.Option(help="Seed of the data.")] = _DEFAULTS.seed,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw error against bits, and speeds, into this file.")] = None,
) -> None:
    """Compare ratio, speed and error of the codecs on the CPU, beside Tensor.copy_ and bitsandbytes."""
    texts = codec or []
    setting = Setting(
        size, error_rows, repeats, dtypes=tuple(dtype) if dtype else _DEFAULTS.dtypes, threads=threads, seed=seed
    )  # fmt: skip
    select(texts)
    for path, option in ((json, "--json"), (plot, "--plot")):
        check_writable(path, option)
    check_plot(plot)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a missing package for 4-bit products
    result = _run(setting, texts)
    _show(result)
    if json is not None:
        result.write(json)
    if plot is not None:
        from actstore.bench.codecs.plot import save

        save(result, plot)
    if any(not row.missing for row in result.failed):
        raise typer.Exit(1)


def _run(setting: Setting, texts: list[str]) -> CodecResult:
    console = Console(stderr=True)
    if not console.is_terminal:
        return run(setting, texts)
    total = len(texts or DEFAULT)
    with console.status("starting") as status:
        return run(setting, texts, lambda row: status.update(f"{row.codec} {row.dtype} is done; {total} codecs in all"))


def _show(result: CodecResult) -> None:
    from actstore.bench.codecs.table import render

    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    console.print(render(result))
