"""Compares a training step with and without a store."""

from actstore.check.gradients import check_gradients
from actstore.check.result import Difference, GradientCheck, Row

__all__ = ["Difference", "GradientCheck", "Row", "check_gradients"]
