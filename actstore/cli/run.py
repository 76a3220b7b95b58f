"""The command ``actstore run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actstore.bench.files import check_outputs
from actstore.errors import ConfigError
from actstore.session.activation_store import MIN_NBYTES

SETTINGS = {
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
}  # SCRIPT may be -m


def run(
    script: Annotated[
        str | None,
        typer.Argument(
            help="train.py, or -m NAME for a module, or a command such as torchrun; its own arguments follow.",
            metavar="SCRIPT",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.", metavar="[ARGS]")] = None,
    policy: Annotated[str, typer.Option(help="Policy of each store, as in ActivationStore(model, POLICY).")] = "keep",
    budget: Annotated[
        str | None, typer.Option(help="Peak of activations to plan for, such as 20GiB, in place of a policy.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Store models of this class only; may be repeated.")] = None,
    min_bytes: Annotated[str, typer.Option(help="Smaller tensors are kept.")] = str(MIN_NBYTES),
    host_budget: Annotated[str | None, typer.Option(help="Limit of host memory, such as 64GiB.")] = None,
    disk_budget: Annotated[str | None, typer.Option(help="Limit of disk space.")] = None,
    disk_path: Annotated[str | None, typer.Option(help="Folder of the disk tier.")] = None,
    every: Annotated[int, typer.Option(help="Print a line of figures every N steps; 0 for none.", metavar="N")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write the reports to this file (JSON).")] = None,
    replace_checkpointing: Annotated[
        bool, typer.Option("--replace-checkpointing", help="Switch off the gradient checkpointing of Transformers.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="First run one step plainly and with the store, and compare all bits.")
    ] = False,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="Show which lines of code fill the memory in the first step, and stop.")
    ] = False,
) -> None:
    """Run a training script unchanged, with a store around the forwards of each model that it trains.

    Without a policy nothing changes, and the report says what would save how much. The script keeps its output and its
    exit code; lines of actstore go to stderr. Processes that the script starts, as torchrun does, get stores, too.
    """
    from actstore.run.script import run_script
    from actstore.run.settings import Settings

    is_module, target, others = _read_words([*([] if script is None else [script]), *(arguments or [])])
    if budget is not None and policy != "keep":
        raise ConfigError(f"--budget {budget} and --policy {policy}: a budget chooses the policy. Give one of them.")
    if verify and inspect:
        raise ConfigError("--verify and --inspect: each runs the first step for itself. Give one of them.")
    check_outputs(report=report)
    settings = Settings(
        policy=policy if budget is None else f"auto({budget})",
        models=tuple(model or ()),
        min_bytes=min_bytes,
        host_budget=host_budget,
        disk_budget=disk_budget,
        disk_path=disk_path,
        report="" if report is None else str(report.absolute()),
        every=every,
        replace_checkpointing=replace_checkpointing,
        first_step="verify" if verify else "inspect" if inspect else "",
    )
    code = run_script(settings, target, others, is_module=is_module)
    if code:
        raise typer.Exit(code)


def _read_words(words: list[str]) -> tuple[bool, str, list[str]]:
    """Return whether a module runs, its name or that of the script, and its arguments."""
    match words:
        case ["-m", target, *others]:
            return True, target, others
        case [target, *others] if not target.startswith("-"):
            return False, target, others
        case [option, *_] if option != "-m":
            raise ConfigError(f"{option}: unknown option. Options of the script stand after the script.")
    raise ConfigError("no script was given. Write actstore run --policy '@blocks : recompute' train.py, or -m NAME.")
