"""The Chrome trace format, which ui.perfetto.dev and chrome://tracing show.

One process stands for the device, and each thread of it for a lane. The format wants the events of a thread to nest:
a lane whose events overlap otherwise, as several writes to a disk do, gets more threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from actstore.errors import ConfigError
from actstore.trace.event import HOST, Event, order_of

PID = 1


def write(path: Path, events: list[Event], *, device: str) -> None:
    """Write the events.

    Raises
    ------
    ConfigError : the file cannot be written
    """
    name = f"actstore on {device}" if device else "actstore"
    separator = ""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for record in _records(events, name):
                file.write(f"{separator}\n{json.dumps(record)}")
                separator = ","
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Choose a file that can be written.", path=path) from error


def _records(events: list[Event], name: str) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", 0, {"name": name})
    zero = min((event.begin_ns for event in events), default=0)
    lanes: dict[str, list[Event]] = {}
    for event in events:
        lanes.setdefault(event.lane, []).append(event)
    tid = 1
    for lane in sorted(lanes, key=order_of):
        for row, nested in enumerate(rows(lanes[lane]), 1):
            yield _metadata("thread_name", tid, {"name": f"{lane} {row}" if row > 1 else lane})
            yield _metadata("thread_sort_index", tid, {"sort_index": tid})
            for event in nested:
                yield _record(event, tid, zero)
            tid += 1


def rows(events: Iterable[Event]) -> list[list[Event]]:
    """Return the events in rows that nest: in a row, two events are disjoint or one contains the other."""
    filled: list[tuple[list[Event], list[int]]] = []  # each row with the ends of its open events, the innermost last
    for event in sorted(events, key=lambda event: (event.begin_ns, -event.end_ns)):
        for _, ends in filled:
            while ends and ends[-1] <= event.begin_ns:
                ends.pop()
        place = next((place for place in filled if not place[1] or event.end_ns <= place[1][-1]), None)
        if place is None:
            place = ([], [])
            filled.append(place)
        place[0].append(event)
        place[1].append(event.end_ns)
    return [row for row, _ in filled]


def _metadata(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": PID, "tid": tid, "args": args}


def _record(event: Event, tid: int, zero_ns: int) -> dict[str, Any]:
    """Return one event as the format writes it, with times in microseconds from the first event on."""
    args: dict[str, Any] = {"step": event.step}
    args.update({name: value for name in ("site", "tier", "note") if (value := getattr(event, name))})
    if event.nbytes:
        args["bytes"] = event.nbytes
        if event.duration_ns:
            args["GB/s"] = round(event.nbytes / event.duration_ns, 3)
    record: dict[str, Any] = {
        "name": f"{event.kind} {event.site}".rstrip(),
        "cat": event.kind,
        "pid": PID,
        "tid": tid,
        "ts": (event.begin_ns - zero_ns) / 1000,
        "args": args,
    }
    if event.lane == HOST:
        return record | {"ph": "i", "s": "t"}  # an instant event of its thread
    return record | {"ph": "X", "dur": event.duration_ns / 1000}
