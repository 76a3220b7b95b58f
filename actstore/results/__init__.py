"""Types of what the package's functions and methods return."""

from actstore.accuracy import ErrorFigures, GradientEffect, SiteEffect
from actstore.accuracy.bits.payloads import Choice
from actstore.check import Difference, GradientCheck, GradientDeviation
from actstore.plan.profile import Profile
from actstore.policy.encoded import Encoded
from actstore.session.process import ProcessMemory
from actstore.session.report import SiteReport

__all__ = [
    "Choice",
    "Difference",
    "Encoded",
    "ErrorFigures",
    "GradientCheck",
    "GradientDeviation",
    "GradientEffect",
    "ProcessMemory",
    "Profile",
    "SiteEffect",
    "SiteReport",
]
