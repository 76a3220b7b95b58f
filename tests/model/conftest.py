"""The same promise as in tests/autograd: after each test every store that it made is empty again."""

from tests.autograd.conftest import drained, frozen

__all__ = ["drained", "frozen"]
