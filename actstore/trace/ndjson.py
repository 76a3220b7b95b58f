"""The file of a trace: a header line, then one line for each event, each a JSON object.

The first line has `format` ("actstore-trace"), `version` (1), `clock`, the number of `events` that follow and of those
`lost` before them. It also has the `device`, and the versions of actstore and torch that wrote it. An event's line
has the attributes of `Event`; those that are empty or 0 may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from actstore._version import __version__
from actstore.display.text import short
from actstore.errors import ConfigError, PayloadError
from actstore.trace.event import KINDS, Event

FORMAT = "actstore-trace"
VERSION = 1
CLOCK = "time.perf_counter_ns"
_INT_END = 2**63  # the end of the range of int64, which other programs read
_TYPES = {name: int if name.endswith("_ns") or name in ("step", "nbytes") else str for name in Event._fields}
_NEEDED = ("kind", "begin_ns", "end_ns")


class Header(NamedTuple):
    """The header line: the number of events that follow, the number lost before them, and the device."""

    events: int
    lost: int
    device: str


def is_trace(first_line: str) -> bool:
    """Return whether a file with this first line is meant as a trace."""
    try:
        header = json.loads(first_line)
    except (ValueError, RecursionError):
        return False
    return isinstance(header, dict) and header.get("format") == FORMAT


def write(path: Path, events: list[Event], *, device: str, lost: int) -> None:
    """Write a trace.

    Raises
    ------
    ConfigError : the file cannot be written
    """
    header = {
        "format": FORMAT,
        "version": VERSION,
        "clock": CLOCK,
        "events": len(events),
        "lost": lost,
        "device": device,
        "actstore": __version__,
        "torch": torch.__version__,
    }
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(header) + "\n")
            for event in events:
                file.write(json.dumps(_values(event)) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Choose a file that can be written.", path=path) from error


def _values(event: Event) -> dict[str, Any]:
    return {name: value for name, value in event._asdict().items() if value or name in _NEEDED}


def read(path: Path) -> tuple[Header, list[Event]]:
    """Read a trace.

    Raises
    ------
    ConfigError : the file cannot be opened
    PayloadError : the file is not a complete trace; `path` and `line` say where
    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = _objects(path, file)
            header = _header(path, next(lines, None))
            events = [_event(path, number, values) for number, values in lines]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give a file that Trace.write made.", path=path) from error
    except UnicodeDecodeError as error:
        raise _wrong(path, 1, "not text in UTF-8.") from error
    if len(events) != header.events:
        what = f"the first line promises {header.events} events and {len(events)} follow: the file was cut or edited."
        raise _wrong(path, len(events) + 1, what)
    return header, events


def _objects(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _wrong(path, number, f"not JSON: {error}") from error
        if not isinstance(values, dict):
            raise _wrong(path, number, f"{short(values)} is not a JSON object.")
        yield number, values


def _header(path: Path, first: tuple[int, dict[str, Any]] | None) -> Header:
    if first is None:
        raise _wrong(path, 1, "the file is empty.")
    values = first[1]
    if values.get("format") != FORMAT:
        raise _wrong(path, 1, f'no "format": "{FORMAT}"; Trace.write makes such files.')
    if values.get("version") != VERSION:
        wrote = short(values.get("actstore"))
        raise _wrong(
            path, 1, f"version {short(values.get('version'))}, and this is {VERSION}. Read it with actstore {wrote}."
        )
    for name, kind in (("events", int), ("lost", int), ("device", str)):
        _check(path, 1, name, values.get(name), kind)
    return Header(values["events"], values["lost"], values["device"])


def _event(path: Path, number: int, values: dict[str, Any]) -> Event:
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        raise _wrong(path, number, f"no {' and no '.join(missing)}.")
    unknown = [name for name in values if name not in _TYPES]
    if unknown:
        raise _wrong(path, number, f"an event has no {short(unknown[0])}.")
    for name, value in values.items():
        _check(path, number, name, value, _TYPES[name])
    if values["kind"] not in KINDS:
        raise _wrong(path, number, f"kind {short(values['kind'])} is not one of {', '.join(KINDS)}.")
    if values["end_ns"] < values["begin_ns"]:
        raise _wrong(path, number, f"end_ns {values['end_ns']} is before begin_ns {values['begin_ns']}.")
    return Event(**values)


def _check(path: Path, number: int, name: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        raise _wrong(path, number, f"{name} {short(value)} is not {'a whole number' if kind is int else 'text'}.")
    if isinstance(value, int) and not 0 <= value < _INT_END:
        raise _wrong(path, number, f"{name} {short(value)} is not from 0 to 2^63 - 1.")


def _wrong(path: Path, line: int, what: str) -> PayloadError:
    return PayloadError(f"{path}, line {line}: {what}", path=path, line=line)
