"""Comparison of a training step with and without a store."""

from actstore.check.gradients import check_gradients
from actstore.check.lossy import GradientDeviation, SiteDeviation, WeightDeviation, measure_gradient_error
from actstore.check.result import Difference, GradientCheck, TensorComparison

__all__ = [
    "Difference",
    "GradientCheck",
    "GradientDeviation",
    "SiteDeviation",
    "TensorComparison",
    "WeightDeviation",
    "check_gradients",
    "measure_gradient_error",
]
