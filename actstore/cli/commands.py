"""All commands: ``actstore run``, ``actstore bench``, ``actstore bench codecs``, ``actstore show``,
``actstore verify``, ``actstore plan``, ``actstore inspect``, ``actstore fit``, ``actstore doctor``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from actstore._version import __version__
from actstore.bench.codecs.command import codecs
from actstore.bench.compare import compare
from actstore.bench.files import check_outputs
from actstore.bench.peers import rows as bench_rows
from actstore.bench.peers.rows import Row
from actstore.bench.workloads import MODELS, check, kind, sized
from actstore.bench.workloads.user import is_users
from actstore.bench.workloads.workload import Workload
from actstore.cli.doctor import doctor
from actstore.cli.run import SETTINGS, run
from actstore.cli.show import show
from actstore.cli.steps import fit, inspect, plan, verify
from actstore.display.text import say
from actstore.errors import ConfigError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class _Bench(TyperGroup):
    """Command group: ``actstore bench my_module:make_step`` is ``actstore bench --model my_module:make_step``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        model = ["--model"] if args and not args[0].startswith("-") and is_users(args[0]) else []
        return super().parse_args(ctx, model + args)


bench_app = typer.Typer(cls=_Bench, pretty_exceptions_enable=False)
app.add_typer(bench_app, name="bench")
bench_app.command()(codecs)
bench_app.command()(compare)
app.command(context_settings=SETTINGS)(run)
app.command()(show)
app.command()(verify)
app.command()(plan)
app.command()(inspect)
app.command()(fit)
app.command()(doctor)
_DEFAULTS = Workload()


def _size(text: str) -> Any:
    return typer.Option(help=text, show_default="the model's")


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


_VERSION = typer.Option("--version", help="Print the version.", is_eager=True, callback=_say_version)


@app.callback()
def _top(version: Annotated[bool, _VERSION] = False) -> None:
    """Store training activations unchanged, quantized or offloaded, or recompute them."""


@bench_app.callback(invoke_without_command=True)
def bench(
    context_: typer.Context,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODELS)}; or your own, my_module:make_step.")
    ] = _DEFAULTS.model,
    layers: Annotated[int | None, _size("Blocks; of a ResNet, in a stage; of a U-Net, levels.")] = None,
    width: Annotated[int | None, _size("Width of the model; of images, channels at first.")] = None,
    heads: Annotated[int | None, _size("Attention heads; must divide the width.")] = None,
    context: Annotated[int | None, _size("Characters seen at once; of images, pixels of a side.")] = None,
    batch: Annotated[int | None, _size("Sequences or images in a step.")] = None,
    steps: Annotated[int, typer.Option(help="Timed training steps.")] = _DEFAULTS.steps,
    warmup: Annotated[int, typer.Option(help="Untimed training steps before them.")] = _DEFAULTS.warmup,
    dropout: Annotated[float | None, _size("Dropout probability.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 | float16 by autocast.")] = _DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = _DEFAULTS.device,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the batches.")] = _DEFAULTS.seed,
    threads: Annotated[
        int, typer.Option(help="Threads of torch on the CPU; 0: one for each core.")
    ] = _DEFAULTS.threads,
    policy: Annotated[list[str] | None, typer.Option(help="One more row, NAME=TEXT; may be repeated.")] = None,
    rows: Annotated[str, typer.Option(help="Only these rows, by name, separated by semicolons; or all.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every row, each time in a new order.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory against time into this file.")] = None,
    plot_memory: Annotated[str, typer.Option(help="Memory in the picture: held, or peak of the process.")] = "held",
    disk_path: Annotated[str | None, typer.Option(help="Folder of the disk tier.")] = None,
) -> None:
    """Train a model under every policy, and compare memory, time and gradient error.

    Your own model: actstore bench my_module:make_step [OPTIONS], where make_step() returns (model, step).
    """
    if context_.invoked_subcommand is not None:
        _refuse_options(context_)
        return
    work = sized(
        model, layers=layers, width=width, heads=heads, context=context, batch=batch, dropout=dropout,
        steps=steps, warmup=warmup, dtype=dtype, device=device, seed=seed, threads=threads,
    )  # fmt: skip
    work.check_device()
    check(work)
    chosen = _rows(work, policy or [], rows)
    check_outputs(json=json, plot=plot)
    if plot_memory not in ("held", "peak"):
        raise ConfigError(f"--plot-memory {plot_memory}: must be held or peak.")
    if disk_path is not None and not os.access(disk_path, os.W_OK | os.X_OK):
        raise ConfigError(f"--disk-path {disk_path}: not a folder that can be written. Create it or choose another.")
    from actstore.bench.progress import run_shown

    result = run_shown(work, chosen, disk_path, repeats, Console(stderr=True))
    if is_users(model) and result.rows[0].failed and len(result.rows) == 1:
        raise ConfigError(result.rows[0].failed.removeprefix("ConfigError: "))
    from actstore.bench.table import render

    say(render(result))
    if json is not None:
        result.write(json)
    if plot is not None:
        from actstore.bench.plot import save

        save(result, plot, "peak" if plot_memory == "peak" else "held")
    if result.failed:
        raise typer.Exit(1)


def _refuse_options(given: typer.Context) -> None:
    """Refuse options of the main benchmark before a subcommand, which ignores them."""
    for name in given.params:
        source = given.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            command, option = given.invoked_subcommand, name.replace("_", "-")
            raise ConfigError(f"--{option} does nothing before {command!r}. Give its options after it.")


def _rows(work: Workload, policies: list[str], names: str) -> list[Row]:
    rows = bench_rows.rows_for(kind(work.model).policies)
    mine = bench_rows.parse_policies(policies, rows)
    return bench_rows.select([*rows, *mine], [name.strip() for name in names.split(";") if name.strip()])
