"""What codecs and tiers promise, as checks for the tests of whoever writes one."""

from actstore.testing.codecs import check_codec
from actstore.testing.tiers import check_tier

__all__ = ["check_codec", "check_tier"]
