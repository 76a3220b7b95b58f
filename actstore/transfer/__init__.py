"""Bytes in motion between the compute device and the tiers."""

from actstore.transfer.engine import Transfer

__all__ = ["Transfer"]
