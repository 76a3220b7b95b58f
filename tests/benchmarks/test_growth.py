"""The work for a tensor and the memory of a step do not depend on how many there are: counted, not timed."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from actstore import ActivationStore
from benchmarks.hotpath import growth
from benchmarks.hotpath import paths as hotpath_paths
from benchmarks.hotpath import peers as hotpath_peers
from benchmarks.hotpath import profiled as hotpath_profile

POLICIES = ("keep", "int8", "raw @ host", "recompute")


def calls_of(kind: str, count: int, policy: str) -> int:
    """How many functions, of Python and of C, a step calls beyond one without a store."""
    model, x = growth.MODELS[kind](count), torch.ones(8, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=0)
    found = []
    for context in (nullcontext(), store):
        for _ in range(3):  # first uses are over
            growth.step(model, x, context)
        counter = [0]

        def count_call(_frame: Any, event: str, _arg: Any, counter: list[int] = counter) -> None:
            counter[0] += event in ("call", "c_call")

        gc.collect()
        gc.disable()
        sys.setprofile(count_call)
        try:
            growth.step(model, x, context)
        finally:
            sys.setprofile(None)
            gc.enable()
        found.append(counter[0])
    store.close()
    return found[1] - found[0]


@pytest.mark.parametrize(
    ("kind", "counts", "policy"),
    [
        *(("tensors", (64, 128, 512), policy) for policy in POLICIES if policy != "recompute"),
        *(pytest.param("modules", (8, 16, 64), policy, marks=pytest.mark.slow) for policy in POLICIES),
    ],
)
def test_the_work_for_each_is_the_same(kind: str, counts: tuple[int, int, int], policy: str) -> None:
    few, some, many = (calls_of(kind, count, policy) for count in counts)
    each = (some - few) / (counts[1] - counts[0])
    assert (many - some) / (counts[2] - counts[1]) == pytest.approx(each, rel=0.02)
    assert each > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_leave_nothing_behind(policy: str) -> None:
    model, x = growth.modules_of(4), torch.ones(8, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=0)
    held = []
    for steps in (200, 40, 40):  # what is learned in the first ones is kept
        for _ in range(steps):
            growth.step(model, x, store)
        gc.collect()
        held.append(sys.getallocatedblocks())
    store.close()
    assert held[2] - held[1] < 20, held  # one block for each step, and this would be 40


def test_slopes() -> None:
    counts = [10.0, 100.0, 1000.0]
    assert growth.slope(counts, [3.0, 3.0, 3.0]) == pytest.approx(0)
    assert growth.slope(counts, counts) == pytest.approx(1)


def test_growth_shows_every_row() -> None:
    rows = growth.measure(30, lambda _: None)
    assert {(row["of"], row["policy"]) for row in rows} == {
        (kind, policy) for kind in ("modules", "steps") for policy in growth.POLICIES
    }
    assert growth.render(rows).row_count == len(rows)
    assert len(growth.draw(rows).axes) == 4
    assert growth._row("steps", "keep", "ms", [1.0, 10.0], [1.0, 5.0])["flat"] is False


def test_every_path_has_its_figures() -> None:
    paths = hotpath_paths.measure("cpu", length=4, rounds=2)
    assert {*hotpath_paths.PATHS, "a parameter", "a mask", "recompute, a block"} < set(paths)
    assert hotpath_paths.render({"device": "cpu", "paths": paths}).row_count == len(paths)


def test_a_peer_that_fails_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_device: str) -> Any:
        raise ImportError("no such package")

    monkeypatch.setitem(hotpath_peers.PEERS, "TRL", broken)
    found, left_out = hotpath_peers.find("cpu")
    assert "save_on_cpu" in found
    assert left_out["TRL"] == "ImportError: no such package"


def test_samples_are_given_to_the_innermost_function() -> None:
    inside = "main (a.py:1);time_direct (h.py:9);pack (hooks.py:"
    samples = f"{inside}12) 3\n{inside}40) 2\nmain (a.py:2) 7"
    assert hotpath_profile.fold(samples) == [("pack (hooks.py)", 5)]
