"""The command line: ``actstore bench``, ``actstore bench codecs``, ``actstore show``, ``actstore verify``,
``actstore plan``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as missing:
    raise SystemExit(f"actstore's command line needs {missing.name}: pip install 'actstore[bench]'") from missing

from actstore._version import __version__
from actstore.bench import rows as bench_rows
from actstore.bench.codecs.command import codecs
from actstore.bench.files import check_plot, check_writable
from actstore.bench.plan import plan
from actstore.bench.result import Result
from actstore.bench.rows import Row
from actstore.bench.show import show
from actstore.bench.verify import verify
from actstore.bench.workload import Workload
from actstore.errors import ActstoreError, ConfigError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
bench_app = typer.Typer(pretty_exceptions_enable=False)
app.add_typer(bench_app, name="bench")
bench_app.command()(codecs)
app.command()(show)
app.command()(verify)
app.command()(plan)
WIDTH = 100  # of the table, where there is no terminal
_D = Workload()


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


_VERSION = typer.Option("--version", help="Print the version.", is_eager=True, callback=_say_version)


@app.callback()
def _top(version: Annotated[bool, _VERSION] = False) -> None:
    """Store training activations kept, quantized, offloaded, on disk or recomputed."""


@bench_app.callback(invoke_without_command=True)
def bench(
    context_: typer.Context,
    layers: Annotated[int, typer.Option(help="Blocks of the GPT.")] = _D.layers,
    width: Annotated[int, typer.Option(help="Width of the GPT.")] = _D.width,
    heads: Annotated[int, typer.Option(help="Attention heads; must divide the width.")] = _D.heads,
    context: Annotated[int, typer.Option(help="Characters that the GPT sees at once.")] = _D.context,
    batch: Annotated[int, typer.Option(help="Sequences in a step.")] = _D.batch,
    steps: Annotated[int, typer.Option(help="Timed training steps.")] = _D.steps,
    warmup: Annotated[int, typer.Option(help="Training steps before them, not timed.")] = _D.warmup,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = _D.dropout,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 | float16 by autocast.")] = _D.dtype,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = _D.device,
    seed: Annotated[int, typer.Option(help="Of the weights and the batches.")] = _D.seed,
    threads: Annotated[int, typer.Option(help="Of torch on the CPU; 0: one for each core.")] = _D.threads,
    policy: Annotated[list[str] | None, typer.Option(help="One more row, NAME=TEXT; may be repeated.")] = None,
    rows: Annotated[str, typer.Option(help="Only these rows, by name, between semicolons; plain always runs.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory against time into this file.")] = None,
    disk_path: Annotated[str | None, typer.Option(help="Folder of the disk tier.")] = None,
) -> None:
    """Train a small GPT on English text with every store, and compare memory, time and gradient error."""
    if context_.invoked_subcommand is not None:
        _refuse_options(context_)
        return
    work = Workload(
        layers, width, heads, context, batch, steps, warmup, dropout, dtype, device, seed, threads
    )  # fmt: skip
    work.check_device()
    chosen = _rows(policy or [], rows)
    for path, option in ((json, "--json"), (plot, "--plot")):
        check_writable(path, option)
    check_plot(plot)
    if disk_path is not None and not os.access(disk_path, os.W_OK | os.X_OK):
        raise ConfigError(f"--disk-path {disk_path}: not a folder that can be written; create it or choose another")
    result = _run(work, chosen, disk_path)
    _show(result)
    if json is not None:
        result.write(json)
    if plot is not None:
        from actstore.bench.plot import save

        save(result, plot)
    if result.failed:
        raise typer.Exit(1)


def _refuse_options(given: typer.Context) -> None:
    """Options of the main benchmark do nothing to another one."""
    for name in given.params:
        source = given.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            command, option = given.invoked_subcommand, name.replace("_", "-")
            raise ConfigError(f"--{option} does nothing before {command!r}; give its options after it")


def _rows(policies: list[str], names: str) -> list[Row]:
    every = [*bench_rows.ROWS, *bench_rows.parse_policies(policies)]
    return bench_rows.select(every, [name.strip() for name in names.split(";") if name.strip()])


def _run(work: Workload, chosen: list[Row], disk_path: str | None) -> Result:
    from actstore.bench.runner import run, steps_of

    console = Console(stderr=True)
    if not console.is_terminal:
        return run(work, chosen, disk_path)
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("plain", total=steps_of(work, chosen))

        def progress(name: str) -> None:
            bar.update(task, advance=1, description=name)

        return run(work, chosen, disk_path, progress)


def _show(result: Result) -> None:
    from actstore.bench.table import render

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(render(result))


def main() -> None:
    """Run the command line. A mistake of the user is one line and exit code 2; a failed row is exit code 1."""
    try:
        app()
    except ActstoreError as error:
        typer.echo(f"actstore: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("actstore: stopped", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
