"""The commands that run a training step of the user: ``inspect``, ``verify``, ``plan`` and ``fit``."""

from __future__ import annotations

import json as json_format
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated

import torch
import typer

from actstore import (
    ActivationStore,
    Auto,
    Disk,
    Host,
    Plan,
    check_gradients,
    fit_step,
    inspect_step,
    make_plan,
    measure_gradient_error,
)
from actstore.bench.files import check_outputs
from actstore.errors import ConfigError
from actstore.inspection.fit.fit import POLICIES, log
from actstore.inspection.result import MAX_ROWS, GroupBy
from actstore.rerun.target import find_maker, load, users_code
from actstore.results import Profile
from actstore.session.activation_store import MIN_NBYTES
from actstore.session.planning import replan

Script = Annotated[
    str, typer.Argument(help="path.py:make_step or my_module:make_step; it returns (model, step).", metavar="SCRIPT")
]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, in sys.argv; options after --.", metavar="[ARGS]")
]


def tiers_of(host_budget: str | None, disk_budget: str | None, disk_path: str | None) -> list[Host | Disk]:
    """Return the tiers of a store, as a command's options describe them."""
    return [Host(host_budget), Disk(disk_path, disk_budget)]


def inspect(
    script: Script,
    arguments: Arguments = None,
    policy: Annotated[str, typer.Option(help="Policy of the store, as in ActivationStore(model, POLICY).")] = "keep",
    by: Annotated[GroupBy, typer.Option(help="Rows of the table: line, operator or module.")] = "line",
    try_policies: Annotated[bool, typer.Option("--try", help="Run each suggested policy, and measure it.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="Show every row.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the memory through the step into this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to hover and zoom into this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
) -> None:
    """Run a training step with and without a store, and show what fills the memory.

    The table has the lines of code whose operators save most in plain PyTorch.
    """
    check_outputs(plot=plot, html=html, json=json)
    with users_code(script, "the step was inspected"):
        target = load(script, arguments or [])
        with closing(ActivationStore(target.model, policy)) as store:
            found = inspect_step(target.step, store, stateful=target.others, try_policies=try_policies)
    typer.echo(found.text(by, None if all_rows else MAX_ROWS))
    if plot is not None:
        found.plot().savefig(plot)
    if html is not None:
        html.write_text(found.to_html(), encoding="utf-8")
    if json is not None:
        json.write_text(found.to_json() + "\n")


EXIT_CODES = {"equal": 0, "within tolerance": 0, "different": 1, "no verdict": 2}


def verify(
    script: Script,
    arguments: Arguments = None,
    policy: Annotated[
        str, typer.Option(help="Policy of the store, as in ActivationStore(model, POLICY).")
    ] = "raw @ host",
    tolerance: Annotated[float, typer.Option(help="Relative error of a gradient that passes; 0: bit for bit.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Runs with the store, each from the same state.")] = 2,
    lossy: Annotated[bool, typer.Option("--lossy", help="Measure bias and variance of the gradients instead.")] = False,
    draws: Annotated[int, typer.Option(help="With --lossy: number of runs, each with other random rounding.")] = 12,
    each_site: Annotated[bool, typer.Option("--each-site", help="With --lossy: measure each site alone, too.")] = False,
    min_bytes: Annotated[str, typer.Option(help="Smaller tensors are kept, and so not checked.")] = "0",
    host_budget: Annotated[str | None, typer.Option(help="Upper bound in host memory, such as 8GiB.")] = None,
    disk_budget: Annotated[str | None, typer.Option(help="Upper bound on the disk.")] = None,
    disk_path: Annotated[str | None, typer.Option(help="Folder of the disk tier.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
) -> None:
    """Run a training step with and without a store, and show the first difference.

    Exit code 0: equal, or within the tolerance; 1: different; 2: no verdict. With --lossy: measure how far a lossy
    policy moves the gradients, and whether at random; exit code 1 if by more than a tolerance above 0.
    """
    check_outputs(json=json)
    if not lossy and each_site:
        raise ConfigError("--each-site is for lossy policies. Give --lossy, too.")
    with users_code(script, "all was compared"):
        target = load(script, arguments or [])
        tiers = tiers_of(host_budget, disk_budget, disk_path)
        store = ActivationStore(target.model, policy, tiers=tiers, min_bytes=min_bytes)
        with closing(store):
            if lossy:
                error = measure_gradient_error(
                    target.step, store, draws=draws, others=target.others, each_site=each_site
                )
                text, values, code = str(error), error.to_dict(), int(0 < tolerance < error.error)
            else:
                result = check_gradients(target.step, store, tolerance=tolerance, steps=steps)
                text, values, code = str(result), result.to_dict(), EXIT_CODES[result.verdict]
    typer.echo(text)
    if json is not None:
        json.write_text(json_format.dumps(values, indent=2, allow_nan=False) + "\n")
    raise typer.Exit(code)


def plan(
    script: Annotated[
        str,
        typer.Argument(
            help="path.py:make_step or my_module:make_step, which returns (model, step); or a profile (JSON), "
            "without running anything.",
            metavar="SCRIPT",
        ),
    ],
    arguments: Arguments = None,
    budget: Annotated[
        str | None, typer.Option(help="Upper bound for activations on the compute device, such as 20GiB.")
    ] = None,
    total: Annotated[
        str | None, typer.Option(help="In its place a bound on all that the device's allocator holds.")
    ] = None,
    max_noise: Annotated[
        float,
        typer.Option(help="Share of the batch-to-batch noise of gradients that lossy payloads may add; 0: exact."),
    ] = 0.0,
    tiles: Annotated[bool, typer.Option("--tiles", help="Let MLPs run in tiles, whose gradients round.")] = False,
    host_budget: Annotated[str | None, typer.Option(help="Upper bound in host memory.")] = None,
    disk_budget: Annotated[
        str | None, typer.Option(help="Upper bound on the disk; without it no disk is used.")
    ] = None,
    disk_path: Annotated[str | None, typer.Option(help="Folder of the disk tier.")] = None,
    min_bytes: Annotated[str, typer.Option(help="Smaller tensors are kept.")] = str(MIN_NBYTES),
    output: Annotated[Path | None, typer.Option(help="Write the plan to this file (JSON).")] = None,
    profile: Annotated[Path | None, typer.Option(help="Write the measurements to this file (JSON).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the plan into this file.")] = None,
    against: Annotated[Path | None, typer.Option(help="An earlier plan; print the differences.")] = None,
) -> None:
    """Measure a training step, and find the fastest policy within a budget.

    Exit code 0: planned; 2: no plan fits, and the minimum is printed.
    """
    check_outputs(output=output, profile=profile, plot=plot)
    if (budget is None) == (total is None):
        raise ConfigError("--budget, --total: exactly one must be given. Write --budget 20GiB, or --total 24GiB.")
    policy = Auto(budget, max_noise, total=total, tiles=tiles)
    tiers = tiers_of(host_budget, disk_budget, disk_path)
    old = None if against is None else Plan.read(against)
    if script.endswith(".json"):
        if arguments or disk_path is not None:
            raise ConfigError(f"{script} is a profile, and nothing is run: leave out arguments and --disk-path.")
        made = replan(Profile.read(script), policy, tiers)
    else:
        with users_code(script, "there was a plan"):
            target = load(script, arguments or [])
            made = make_plan(target.model, target.step, policy, tiers=tiers, min_bytes=min_bytes)
    _print(made, old, against)
    if profile is not None:
        made.profile.write(profile)
    if output is not None:
        made.write(output)
        typer.echo(f'\nTo run it: ActivationStore(model, actstore.Plan.read("{output}"))')
    if plot is not None:
        from actstore.plan.plot import save

        save(made, plot)


def _print(made: Plan, old: Plan | None, against: Path | None) -> None:
    typer.echo(made.explain())
    if old is not None:
        typer.echo(f"\nAgainst {against}:\n{old.compare(made) or 'the same decisions'}")
    typer.echo(f"\nThe policy, for ActivationStore(model, POLICY):\n\n{made.text}")


SILENT_S = 2.0  # before the first line of progress


def fit(
    script: Script,
    arguments: Arguments = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of the device, such as 24GiB: which batch and context fit?")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Predict times, too: for cpu, or a GPU such as h100-sxm, by its data sheet.")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Argument of make_step; auto: the largest that fits.")] = None,
    context: Annotated[str | None, typer.Option(help="The same.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy of a store; may be repeated.", show_default="; ".join((*POLICIES, "with --memory: auto"))
        ),
    ] = None,
    optimizer: Annotated[
        bool, typer.Option(help="AdamW for a step that returns its loss; or none. Other steps have their own.")
    ] = True,
    fsdp: Annotated[
        int,
        typer.Option(
            help="Ranks that shard weights, gradients and optimizer, as FSDP2 does. All figures are per rank."
        ),
    ] = 1,
    tp: Annotated[int, typer.Option(help="Ranks that split the linear layers and heads of the blocks.")] = 1,
    min_bytes: Annotated[str, typer.Option(help="Smaller tensors are kept.")] = str(MIN_NBYTES),
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
) -> None:
    """Predict the memory of a training step under each policy, without needing it: nothing is computed."""
    check_outputs(json=json)
    given = {name: size for name, size in (("batch", batch), ("context", context)) if size is not None}
    sizes = {name: int(size) if size.isdecimal() else size for name, size in given.items()}
    make_optimizer = torch.optim.AdamW if optimizer else None
    with users_code(script, "the memory was known"), _progress():
        make_step = find_maker(script, arguments or [])
        found = fit_step(
            make_step,
            policy,
            memory=memory,
            device=device,
            make_optimizer=make_optimizer,
            min_bytes=min_bytes,
            fsdp=fsdp,
            tp=tp,
            **sizes,
        )
    typer.echo(str(found))
    if json is not None:
        json.write_text(found.to_json() + "\n", encoding="utf-8")


class _Lines(logging.Handler):
    """Lines on stderr, from a moment after the start on."""

    def __init__(self) -> None:
        super().__init__()
        self._begin_s = monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if monotonic() - self._begin_s > SILENT_S:
            typer.echo(f"actstore: {record.getMessage()}", err=True)


@contextmanager
def _progress() -> Iterator[None]:
    lines, level = _Lines(), log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(lines)
