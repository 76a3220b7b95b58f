"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from actstore import Disk, Host

Script = Annotated[
    str, typer.Argument(help="path.py:make_step or my_module:make_step; it returns (model, step).", metavar="SCRIPT")
]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, in sys.argv; options after --.", metavar="[ARGS]")
]


def tiers_of(host_budget: str | None, disk_budget: str | None, disk_path: str | None) -> list[Host | Disk]:
    """Return the tiers of a store, as a command's options describe them."""
    return [Host(host_budget), Disk(disk_path, disk_budget)]
