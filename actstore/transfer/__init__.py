"""Bytes in motion between the compute device and the tiers."""

from actstore.transfer.cells import Cell, Cells
from actstore.transfer.engine import Engine
from actstore.transfer.order import TransferRun
from actstore.transfer.parcel import Berth

__all__ = ["Berth", "Cell", "Cells", "Engine", "TransferRun"]
