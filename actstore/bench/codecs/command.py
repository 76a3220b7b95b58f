"""The command ``actstore bench codecs``, and the speeds and errors that it measures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor

from actstore.bench import data
from actstore.bench.codecs.contenders import DEFAULT, Contender, Trip, select
from actstore.bench.codecs.result import CodecResult, CodecRow, Speed
from actstore.bench.environment import environment
from actstore.bench.files import check_outputs
from actstore.bench.trainer import cores, relative_error
from actstore.devices import cpu_memory
from actstore.display.text import say
from actstore.errors import ConfigError, KernelUnavailable

ERROR_DATA = ("gaussian", "student_t3", "hidden", "gelu", "relu", "softmax")
COLUMNS = 1024
MIN_REPEATS = 3
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

RowDone = Callable[[CodecRow], None]


@dataclass(frozen=True)
class Setting:
    """Settings of a run of the benchmark of codecs.

    Attributes
    ----------
    size_mb : size of the tensor whose encoding is timed, in 10^6 bytes
    error_rows : rows of 1024 elements in the tensors whose error is taken
    repeats : timed calls each way, at least three
    limit_s : seconds after which no further repeat begins
    dtypes : float32, bfloat16, float16
    threads : of torch; 0: one for each core
    """

    size_mb: float = 64.0
    error_rows: int = 1024
    repeats: int = 9
    limit_s: float = 6.0
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.size_mb > 0:
            raise ConfigError(f"--size {self.size_mb}: must be more than 0 megabytes.")
        if self.repeats < MIN_REPEATS:
            raise ConfigError(f"--repeats {self.repeats}: must be {MIN_REPEATS} or more.")
        for dtype in self.dtypes:
            if dtype not in _DTYPES:
                raise ConfigError(f"--dtype {dtype!r}: must be one of {', '.join(_DTYPES)}.")


def run(setting: Setting, texts: list[str], row_done: RowDone | None = None) -> CodecResult:
    """Measure the codecs that `texts` names, or the default ones.

    Raises
    ------
    ConfigError : a text does not name a codec
    """
    contenders, missing = select(texts)
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads or cores())
    told = asdict(setting) | {"dtypes": list(setting.dtypes), "threads": torch.get_num_threads()}
    result = CodecResult(environment(), told)
    try:
        for contender in contenders:
            for row in _rows(contender, setting):
                result.rows.append(row)
                if row_done is not None:
                    row_done(row)
    finally:
        torch.set_num_threads(before)
        _source.cache_clear()
    result.rows += [CodecRow(name, "", failed=reason, missing=True) for name, reason in missing.items()]
    return result


@lru_cache(maxsize=20)
def _source(name: str, rows: int, dtype: torch.dtype, seed: int) -> Tensor:
    return data.make(name, (rows, COLUMNS), dtype, seed)


def _rows(contender: Contender, setting: Setting) -> list[CodecRow]:
    inputs = contender.inputs([_DTYPES[dtype] for dtype in setting.dtypes])
    if not inputs:
        dtypes = ", ".join(setting.dtypes)
        return [CodecRow(contender.name, contender.family, failed=f"takes none of {dtypes}, int64, bool")]
    return [_row(contender, dtype, name, setting) for dtype, name in inputs]


def _row(contender: Contender, dtype: torch.dtype, name: str, setting: Setting) -> CodecRow:
    row = CodecRow(contender.name, contender.family, str(dtype).removeprefix("torch."), name, contender.lossless)
    try:
        _measure_speed(row, contender, setting)
        if dtype.is_floating_point:
            _measure_errors(row, contender, dtype, setting)
    except KernelUnavailable as error:
        row.failed, row.missing = str(error), True
    except Exception as error:  # the remaining rows run; the command ends with exit code 1
        row.failed = f"{type(error).__name__}: {error}".splitlines()[0]
    return row


def _measure_speed(row: CodecRow, contender: Contender, setting: Setting) -> None:
    dtype: torch.dtype = getattr(torch, row.dtype)
    rows = max(1, round(setting.size_mb * 1e6 / dtype.itemsize / COLUMNS))
    source = _source(row.data, rows, dtype, setting.seed)
    row.nbytes = source.nbytes
    trip = contender.public_trip(source)
    row.fixed = trip.fixed
    row.encode, row.decode = time_trip(trip, source, setting.repeats, setting.limit_s)
    row.payload_nbytes = trip.payload_nbytes()


def time_trip(trip: Trip, source: Tensor, repeats: int, limit_s: float) -> tuple[Speed, Speed]:
    """Time both directions, each call right after a copy of `source`, which leaves the caches in the same state.

    On a CPU, calls in reused memory alternate with calls in fresh memory from the system. actstore and the other
    libraries share the one allocator of the process.
    """
    if source.is_cpu:
        cpu_memory.install()
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    calls: tuple[Callable[[], object], ...] = (copy, trip.encode, copy, trip.decode)
    times: list[list[float]] = [[], [], [], []]
    fresh: tuple[list[float], list[float]] = [], []
    for call in (*calls, *calls):  # compiles kernels, and touches the pages
        call()
    start = perf_counter()
    for done in range(repeats):
        if done >= MIN_REPEATS and perf_counter() - start > limit_s:
            break
        for call, samples in zip(calls, times, strict=True):
            samples.append(_ms(call))
        if source.is_cpu:
            for call, samples in zip((trip.encode, trip.decode), fresh, strict=True):
                cpu_memory.trim()
                samples.append(_ms(call))
            for call in (trip.encode, trip.decode):
                call()
    return Speed(times[1], times[0], fresh[0]), Speed(times[3], times[2], fresh[1])


def _ms(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return (perf_counter() - start) * 1e3


def _measure_errors(row: CodecRow, contender: Contender, dtype: torch.dtype, setting: Setting) -> None:
    for name in ERROR_DATA:
        source = _source(name, setting.error_rows, dtype, setting.seed)
        trip = contender.trip(source)
        trip.encode()
        row.error[name] = relative_error([trip.decode()], [source])
        row.ratio_by_data[name] = source.nbytes / trip.payload_nbytes()


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
    check_outputs(json=json, plot=plot)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a missing package for 4-bit products
    result = _run(setting, texts)
    from actstore.bench.codecs.table import render

    say(render(result))
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
