"""Events: the intervals that a trace records."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kind = Literal["forward", "backward", "recompute", "encode", "decode", "offload", "fetch", "stall", "measure", "keep"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COPIES = ("offload", "fetch")
WORK = ("forward", "backward", "recompute", "encode", "decode", "measure")
COMPUTE = "compute"
HOST = "host"


class Event(NamedTuple):
    """One interval of work, waiting or copying, on the clock of `time.perf_counter_ns`.

    Attributes
    ----------
    kind : forward, backward : the whole pass, or a part of it; recompute, encode, decode, measure : work within these,
        where measure finds the loss of a lossy payload, and `note` has the figure; offload, fetch : bytes on their way
        to and from a tier; stall : compute waited for bytes or for room; keep : the store could not or would not move
        a tensor, of no duration
    begin_ns, end_ns : end is at or after begin
    site : the place in the model, as text; empty where it is not one place
    step : number of the training step that the event belongs to
    tier : the tier that the bytes went to or came from; empty where none did
    nbytes : bytes that were moved, kept or measured
    note : any other fact, such as why a tensor was kept
    """

    kind: Kind
    begin_ns: int
    end_ns: int
    site: str = ""
    step: int = 0
    tier: str = ""
    nbytes: int = 0
    note: str = ""

    @property
    def lane(self) -> str:
        """The resource at work: "compute", a link such as "offload host" or "fetch disk", or "host" for decisions."""
        if self.kind in COPIES:
            return f"{self.kind} {self.tier}".rstrip()
        return HOST if self.kind == "keep" else COMPUTE

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


def order_of(lane: str) -> tuple[int, str]:
    """Return a key that sorts lanes for display: compute, the links outwards, decisions."""
    for place, prefix in enumerate((COMPUTE, *COPIES)):
        if lane.startswith(prefix):
            return place, "" if lane.endswith(" host") else lane  # host memory before disk
    return 9, lane
