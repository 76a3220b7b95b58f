"""The command ``actstore inspect``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from actstore import ActivationStore, inspect_step
from actstore.bench.files import check_plot, check_writable
from actstore.cli.options import Arguments, Script
from actstore.inspection.result import MAX_ROWS, GroupBy
from actstore.rerun.target import load, users_code


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
    for path, option in ((plot, "--plot"), (html, "--html"), (json, "--json")):
        check_writable(path, option)
    check_plot(plot)
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
