"""A simulated accelerator for the whole store: any legal order of events, and a checker for those that are missing."""

from tests.simulation.agents import Stream
from tests.simulation.clocks import Race
from tests.simulation.device import Link, SimDevice, SimTicket
from tests.simulation.heap import POISON
from tests.simulation.install import here, install, simulation, use
from tests.simulation.tracing import TraceOperators

__all__ = [
    "POISON",
    "Link",
    "Race",
    "SimDevice",
    "SimTicket",
    "Stream",
    "TraceOperators",
    "here",
    "install",
    "simulation",
    "use",
]
