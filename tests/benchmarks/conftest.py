"""The results and the workload that the tests of the bench share."""

from tests.bench.conftest import result, tiny

__all__ = ["result", "tiny"]
