"""Bytes in motion between the compute device and the tiers."""

from actstore.transfer.engine import Engine
from actstore.transfer.order import TransferRun
from actstore.transfer.parcel import Berth
from actstore.transfer.readback import Readback, Readbacks

__all__ = ["Berth", "Engine", "Readback", "Readbacks", "TransferRun"]
