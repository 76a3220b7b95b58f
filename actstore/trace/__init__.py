"""Events of a step in time: their files, their pictures, and figures from them."""

from actstore.trace.event import KINDS, Event, Kind
from actstore.trace.trace import LIMIT, Trace

__all__ = ["KINDS", "LIMIT", "Event", "Kind", "Trace"]
