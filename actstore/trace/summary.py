"""Figures from events: how long each lane was busy, and how long compute waited for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actstore.trace.event import COMPUTE, COPIES, WORK, Event, order_of

Spans = list[tuple[int, int]]


def union(spans: Iterable[tuple[int, int]], gap: int = 0) -> Spans:
    """Return all moments in any of the spans. Spans at most `gap` apart merge; empty spans hold no moment."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1] + gap:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(left: Spans, right: Spans) -> Spans:
    """Return the moments in both."""
    both: Spans = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            both.append((begin, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return both


def difference(left: Spans, right: Spans) -> Spans:
    """Return the moments in `left` that are not in `right`."""
    if not left:
        return []
    edges = [left[0][0], *(edge for span in right for edge in span), left[-1][1]]
    return intersection(left, list(zip(edges[::2], edges[1::2], strict=True)))


def total(spans: Spans) -> int:
    """Return the total length in nanoseconds."""
    return sum(end - begin for begin, end in spans)


@dataclass(frozen=True)
class Lane:
    """The figures of one lane. Events that overlap count once in each duration.

    Attributes
    ----------
    name : as in `Event.lane`
    events : number of events
    nbytes : bytes that they moved; without meaning for compute
    busy_ns : time at work; for compute without stalls
    overlap_ns : part of `busy_ns` while compute was at work
    exposed_ns : part of `busy_ns` while compute stalled
    """

    name: str
    events: int
    nbytes: int
    busy_ns: int
    overlap_ns: int
    exposed_ns: int

    @property
    def is_link(self) -> bool:
        return self.name.startswith(COPIES)

    @property
    def gbps(self) -> float | None:
        """Rate in 10^9 bytes a second while busy; None for a lane that moves no bytes."""
        return self.nbytes / self.busy_ns if self.is_link and self.busy_ns else None


@dataclass(frozen=True)
class Summary:
    """The figures of one step, or of a whole trace.

    Attributes
    ----------
    steps : number of steps
    begin_ns, end_ns : from the first event of compute to its last; of all events where compute has none
    compute_ns : time that compute was at work
    stall_ns, stalls : time that compute waited, and number of waits
    copy_ns : time that any link was busy
    exposed_ns : part of `copy_ns` while compute stalled
    kept_nbytes : bytes that the store could not or would not move
    lanes : compute first, then the links
    """

    steps: int
    begin_ns: int
    end_ns: int
    compute_ns: int
    stall_ns: int
    stalls: int
    copy_ns: int
    exposed_ns: int
    kept_nbytes: int
    lanes: tuple[Lane, ...]

    @property
    def span_ns(self) -> int:
        return self.end_ns - self.begin_ns

    @property
    def hidden(self) -> float | None:
        """Part of the copies' time in which compute did not wait, 0 to 1; None where nothing was copied."""
        return 1 - self.exposed_ns / self.copy_ns if self.copy_ns else None

    @property
    def bound(self) -> str:
        """Limit of the step, compute or the links, as words: "links 81 % busy"."""
        if self.span_ns <= 0:
            return ""
        name, busy_ns = max(("compute", self.compute_ns), ("links", self.copy_ns), key=lambda pair: pair[1])
        return f"{name} {format_percent(min(1.0, busy_ns / self.span_ns))} busy"

    @property
    def words(self) -> str:
        """Summary as a line: "copies hidden: 97 %, stall 1.2 ms of 85.0 ms"."""
        stall = f"stall {format_ms(self.stall_ns)} of {format_ms(self.span_ns)}"
        return (
            f"nothing copied, {stall}"
            if self.hidden is None
            else f"copies hidden: {format_percent(self.hidden)}, {stall}"
        )

    @classmethod
    def of(cls, events: Iterable[Event]) -> Summary:
        lanes: dict[str, list[Event]] = {}
        for event in events:
            lanes.setdefault(event.lane, []).append(event)
        everything = [event for lane in lanes.values() for event in lane]
        compute = lanes.get(COMPUTE, [])
        waits = [event for event in compute if event.kind == "stall"]
        waiting = union((event.begin_ns, event.end_ns) for event in waits)
        working = difference(_spans(event for event in compute if event.kind in WORK), waiting)
        copying = _spans(event for event in everything if event.kind in COPIES)
        window = compute or everything
        return cls(
            steps=len({event.step for event in everything}),
            begin_ns=min((event.begin_ns for event in window), default=0),
            end_ns=max((event.end_ns for event in window), default=0),
            compute_ns=total(working),
            stall_ns=total(waiting),
            stalls=len(waits),
            copy_ns=total(copying),
            exposed_ns=total(intersection(copying, waiting)),
            kept_nbytes=sum(event.nbytes for event in everything if event.kind == "keep"),
            lanes=tuple(_lane(name, lanes[name], working, waiting) for name in sorted(lanes, key=order_of)),
        )


def _lane(name: str, events: list[Event], working: Spans, waiting: Spans) -> Lane:
    busy = working if name == COMPUTE else _spans(events)
    return Lane(
        name=name,
        events=len(events),
        nbytes=sum(event.nbytes for event in events),
        busy_ns=total(busy),
        overlap_ns=total(intersection(busy, working)),
        exposed_ns=total(intersection(busy, waiting)),
    )


def _spans(events: Iterable[Event]) -> Spans:
    return union((event.begin_ns, event.end_ns) for event in events)


def format_percent(part: float) -> str:
    """Format a part of 1 as a percentage. Only exactly 1 is "100 %", and only exactly 0 is "0 %"."""
    whole = round(100 * part)
    if whole == 100 and part < 1:
        return "> 99 %"
    return "< 1 %" if whole == 0 and part > 0 else f"{whole} %"


def format_ms(ns: float) -> str:
    """Format nanoseconds as milliseconds with one decimal, or with two significant digits below 1 ms."""
    ms = ns / 1e6
    return f"{ms:.1f} ms" if ms >= 1 or ms == 0 else f"{ms:.2g} ms"
