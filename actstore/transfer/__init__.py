"""Bytes in motion between the compute device and the tiers."""

from actstore.transfer.engine import Transfer
from actstore.transfer.length import Length

__all__ = ["Length", "Transfer"]
