"""Bytes in motion between the compute device and the tiers."""

from actstore.transfer.engine import Engine
from actstore.transfer.length import Length, Lengths
from actstore.transfer.order import Run
from actstore.transfer.parcel import Berth

__all__ = ["Berth", "Engine", "Length", "Lengths", "Run"]
