"""The errors of lossy payloads, and their effect on gradients."""

from actstore.accuracy.figures import ErrorFigures, Total, measure
from actstore.accuracy.influence.effect import GradientEffect, SiteEffect
from actstore.accuracy.sampler import Sampler

__all__ = ["ErrorFigures", "GradientEffect", "Sampler", "SiteEffect", "Total", "measure"]
