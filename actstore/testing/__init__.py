"""Contract checks for codecs and tiers, for the tests of their authors."""

from actstore.testing.codecs import check_codec
from actstore.testing.tiers import check_tier

__all__ = ["check_codec", "check_tier"]
