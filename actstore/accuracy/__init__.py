"""What lossy payloads lose."""

from actstore.accuracy.effect import GradientEffect, SiteEffect
from actstore.accuracy.figures import ErrorFigures, Total, measure
from actstore.accuracy.payloads import Choice
from actstore.accuracy.sampler import Sampler

__all__ = ["Choice", "ErrorFigures", "GradientEffect", "Sampler", "SiteEffect", "Total", "measure"]
