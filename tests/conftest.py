"""Settings of every test: hypothesis repeats the same examples, tests for a GPU are skipped where there is none.

With ACTSTORE_TEST_GC=1 in the environment the collector runs at every chance (`make test-debug`).
"""

import gc
import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("deterministic")


def pytest_configure() -> None:
    threshold = os.environ.get("ACTSTORE_TEST_GC")
    if threshold is not None:
        gc.set_threshold(*[int(threshold)] * 3)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
