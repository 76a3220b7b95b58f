"""Types of what the package's functions and methods return."""

from actstore.accuracy import ErrorFigures, GradientEffect, SiteEffect
from actstore.accuracy.bits.payloads import Choice
from actstore.check import Difference, GradientCheck, GradientDeviation
from actstore.compiled.budget.plan import GraphPlan, GraphUnit
from actstore.inspection import (
    BesideActivations,
    Fit,
    FitRow,
    InspectedTensor,
    Inspection,
    MemoryPoint,
    Suggestion,
    Timeline,
)
from actstore.plan.profile import Profile
from actstore.policy.encoded import Encoded
from actstore.session.job_report import JobReport, RankReport
from actstore.session.process import ProcessMemory
from actstore.session.report import ModuleReport, SiteReport

__all__ = [
    "BesideActivations",
    "Choice",
    "Difference",
    "Encoded",
    "ErrorFigures",
    "Fit",
    "FitRow",
    "GradientCheck",
    "GradientDeviation",
    "GradientEffect",
    "GraphPlan",
    "GraphUnit",
    "InspectedTensor",
    "Inspection",
    "JobReport",
    "MemoryPoint",
    "ModuleReport",
    "ProcessMemory",
    "Profile",
    "RankReport",
    "SiteEffect",
    "SiteReport",
    "Suggestion",
    "Timeline",
]
