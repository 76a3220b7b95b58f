"""The command ``actstore doctor``."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from actstore.bench.files import check_writable
from actstore.cli.machine.machine import machine
from actstore.cli.machine.table import render
from actstore.display.text import TABLE_WIDTH


def doctor(
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the disk tier.", show_default="the system's temporary folder")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the facts to this file.")] = None,
) -> None:
    """Report what actstore finds on this machine: versions, kernels and caches, allocator, disk, memory, GPU.

    For each feature that is not installed it prints the command that installs it. Exit code 1: something is installed
    and does not work, or the folder cannot be written.
    """
    check_writable(json, "--json")
    found = machine(folder)
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    console.print(render(found))
    if json is not None:
        json.write_text(json_format.dumps(found.to_dict(), indent=2) + "\n")
    raise typer.Exit(int(bool(found.broken)))
