"""Inspection of one training step: what autograd saves, from which line, and the memory at each moment."""

from actstore.inspection.beside import BesideActivations
from actstore.inspection.fit.fit import fit_step
from actstore.inspection.fit.result import Fit, FitRow
from actstore.inspection.inspect import inspect_step
from actstore.inspection.result import Inspection
from actstore.inspection.saved import InspectedTensor
from actstore.inspection.suggestions import Suggestion
from actstore.inspection.timeline import MemoryPoint, Timeline

__all__ = [
    "BesideActivations",
    "Fit",
    "FitRow",
    "InspectedTensor",
    "Inspection",
    "MemoryPoint",
    "Suggestion",
    "Timeline",
    "fit_step",
    "inspect_step",
]
