"""Settings of every test: hypothesis repeats the same examples, tests for a GPU are skipped where there is none.

`make test` runs some cases of each test function, `make test-more` others, `make test-slow` the rest:
`tests/system/durations.py`.

Warnings are errors, save those that a folder of `EXPECTED_WARNINGS` causes on purpose.

With ACTSTORE_TEST_GC=1 in the environment the collector runs at every chance (`make test-debug`). The device that
ACTSTORE_TEST_DEVICE names is the default one of all tests (`make gpu`).
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch._C._autograd import _pop_saved_tensors_default_hooks, _top_saved_tensors_default_hooks

from tests.system import durations

RECORDED = durations.read()

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("deterministic")

EXPECTED_WARNINGS = {
    Path(__file__).parent / "operators": "ignore",  # samples of a database, not of a store
    Path(__file__).parent / "autograd": "ignore:the disk tier's folder:RuntimeWarning",  # a temporary folder in memory
}


def pytest_configure() -> None:
    threshold = os.environ.get("ACTSTORE_TEST_GC")
    if threshold is not None:
        gc.set_threshold(*[int(threshold)] * 3)
    device = os.environ.get("ACTSTORE_TEST_DEVICE")
    if device is not None:
        torch.set_default_device(device)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    quick = [item for item in items if not item.get_closest_marker("slow")]
    promises = [item.nodeid for item in quick if item.get_closest_marker("promise")]
    more, slow = durations.left([item.nodeid for item in quick], RECORDED, promises)
    for item in items:
        if item.nodeid in slow and not item.get_closest_marker("more"):
            item.add_marker("slow")
        if item.nodeid in more:
            item.add_marker("more")
        for folder, expected in EXPECTED_WARNINGS.items():
            if folder in item.path.parents:
                item.add_marker(pytest.mark.filterwarnings(expected))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """Let `gc.collect` look at what the tests of a module make, and not at what thousands before them have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail where a test leaves saved-tensor hooks or another number of threads behind, which later tests would meet."""
    threads = torch.get_num_threads()
    yield
    left = []
    while (hooks := _top_saved_tensors_default_hooks(True)) is not None:
        left.append(hooks[0])
        _pop_saved_tensors_default_hooks()
    assert not left, f"saved-tensor hooks were left entered: {left}"
    assert torch.get_num_threads() == threads


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small work on a machine that others use too is faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
