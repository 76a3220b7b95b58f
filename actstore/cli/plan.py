"""The command ``actstore plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actstore import Auto, Plan, make_plan
from actstore.bench.files import check_plot, check_writable
from actstore.cli.options import Arguments, tiers_of
from actstore.errors import ConfigError
from actstore.rerun.target import load, users_code
from actstore.results import Profile
from actstore.session.activation_store import MIN_NBYTES
from actstore.session.planning import replan


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
        str, typer.Option(help="Upper bound for activations on the compute device, such as 20GiB.", show_default=False)
    ] = ...,  # type: ignore[assignment]  # required, and after arguments that are not
    max_noise: Annotated[
        float,
        typer.Option(help="Share of the batch-to-batch noise of gradients that lossy payloads may add; 0: exact."),
    ] = 0.0,
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
    for path, option in ((output, "--output"), (profile, "--profile"), (plot, "--plot")):
        check_writable(path, option)
    check_plot(plot)
    policy, tiers = Auto(budget, max_noise), tiers_of(host_budget, disk_budget, disk_path)
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
