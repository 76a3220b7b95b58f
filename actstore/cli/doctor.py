"""The command ``actstore doctor``."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actstore._version import __version__
from actstore.base.units import format_nbytes
from actstore.bench.files import check_outputs
from actstore.cli.machine import PINNED_NBYTES, Allocator, Cuda, Disk, Kernels, Machine, Memory, machine
from actstore.devices import cpu_memory
from actstore.display.text import say

Row = tuple[str, RenderableType]

NAMES_WIDTH = 12  # columns


def doctor(
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the disk tier.", show_default="the system's temporary folder")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the facts to this file.")] = None,
) -> None:
    """Report what actstore finds on this machine: versions, kernels and caches, allocator, disk, memory, GPU.

    For each missing feature it prints the command that installs it. Exit code 1: something that is installed does not
    work, or the folder cannot be written.
    """
    check_outputs(json=json)
    found = machine(folder)
    say(render(found))
    if json is not None:
        json.write_text(json_format.dumps(found.to_dict(), indent=2) + "\n")
    raise typer.Exit(int(bool(found.broken)))


def render(found: Machine) -> RenderableType:
    """Return a section for each kind of facts, then what is missing and what is broken."""
    parts: list[RenderableType] = [
        _section("Versions", [("", _versions(found))]),
        *(_section(f"Codecs on the {each.device}", _kernels(each)) for each in found.kernels),
        _section("Allocator of CPU tensors", _allocator(found.allocator)),
        _section("Disk tier", _disk(found.disk)),
        _section("Memory", _memory(found.memory)),
        _section("GPU", _cuda(found.cuda)),
    ]
    if found.missing:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="yellow")
        table.add_column(overflow="fold")
        for each in found.missing:
            table.add_row(each.feature, Text(each.command))
        parts += [Text("\nNot installed", style="bold"), table]
    if found.broken:
        parts += [Text("\nBroken", style="bold red"), *map(Text, found.broken)]
    else:
        parts.append(Text("\nEverything checked works.", style="green"))
    return Group(*parts)


def _section(title: str, rows: list[Row]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    named = any(name for name, _ in rows)
    table.add_column(style="dim", min_width=NAMES_WIDTH if named else 0, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value) if isinstance(value, str) else value)
    return Group(Text(f"\n{title}", style="bold"), table)


def _versions(found: Machine) -> RenderableType:
    known = [f"actstore {__version__}", f"python {found.python}"]
    for each in found.packages.values():
        version = "-" if each.state == "missing" else each.version or "of unknown version"
        known.append(f"{each.name} {version}{' (broken)' if each.state == 'broken' else ''}")
    return Columns([Text(each, no_wrap=True) for each in known], column_first=True, padding=(0, 3))


def _kernels(found: Kernels) -> list[Row]:
    slow = " (slower)" if found.back_end.startswith("PyTorch") else ""
    rows: list[Row] = [("run by", f"{found.back_end}{slow}: {', '.join(found.codecs)}")]
    rows += found.others.items()
    if found.folder:
        rows.append(("cache", found.folder))
    if found.cached:
        warm = [f"{source} ({count})" for source, count in found.cached.items() if count]
        cold = [source for source, count in found.cached.items() if not count]
        rows.append(("compiled", ", ".join(warm) or "nothing yet"))
        if cold:
            rows.append(("at first use", f"{', '.join(cold)}; takes seconds, once"))
    if found.variable:
        rows.append(("variable", f"{found.variable} moves the cache"))
    return rows


def _allocator(found: Allocator) -> list[Row]:
    reason = f": {found.reason}" if found.reason else ""
    return [
        ("choice", f"{found.choice}{reason}"),
        ("library", found.library or "-"),
        ("compiler", found.compiler or "-"),
        ("variables", f"{cpu_memory.VARIABLE} chooses; XDG_CACHE_HOME moves the library"),
    ]


def _disk(found: Disk) -> list[Row]:
    rows: list[Row] = [("folder", found.folder)]
    if found.error:
        return rows
    memory = ": memory, not a disk; give Disk(path) another folder" if found.in_memory else ""
    rows += [
        ("file system", f"{found.file_system or 'unknown'}{memory}"),
        ("free", format_nbytes(found.free_bytes or 0)),
    ]
    if found.write_bytes_per_s is None or found.read_bytes_per_s is None:
        return [*rows, ("speed", "not measured: the disk is full")]
    cached = "" if found.is_direct or found.in_memory else "; through the page cache: O_DIRECT is refused here"
    speeds = f"write {found.write_bytes_per_s / 1e9:.2f} GB/s, read {found.read_bytes_per_s / 1e9:.2f} GB/s"
    return [*rows, ("speed", f"{speeds}{cached}")]


def _memory(found: Memory) -> list[Row]:
    def size(nbytes: int | None, otherwise: str) -> str:
        return otherwise if nbytes is None else format_nbytes(nbytes)

    return [
        ("machine", f"{size(found.total_bytes, 'unknown')}, {size(found.available_bytes, 'unknown')} available"),
        ("cgroup limit", size(found.cgroup_bytes, "none")),
        ("locked limit", f"{size(found.locked_bytes, 'none')} (ulimit -l)"),
    ]


def _cuda(found: Cuda) -> list[Row]:
    if not found.devices:
        if found.runtime is None and found.driver is not None:
            why = "none: there is a driver, but this PyTorch is built without CUDA"
        else:
            why = "none that PyTorch finds"
    else:
        why = ""
    rows: list[Row] = [
        ("device", f"{each.name}, {format_nbytes(each.memory_bytes)}, capability {each.capability}")
        for each in found.devices
    ] or [("device", why)]
    rows += [("PyTorch for", found.runtime or "CPU only"), ("driver", found.driver or "-")]
    if found.pinned_bytes is not None:
        pinned = "can be pinned" if found.pinned_bytes else "cannot be pinned: raise the limit of locked memory"
        rows.append(("pinned", f"{format_nbytes(PINNED_NBYTES)} {pinned}"))
    return rows
