"""The scripts in benchmarks/: what can be tested of them without a GPU."""

from __future__ import annotations

import torch

from benchmarks.hotpath import peers as hotpath_peers
from benchmarks.hotpath import run as hotpath


def test_hotpath_measures_every_variant() -> None:
    found = hotpath.measure("cpu", length=4, rounds=3)
    assert set(found["rows"]) | set(found["left_out"]) == {
        "identity hooks", "kept", "int8", "raw @ device", "a parameter", *hotpath_peers.PEERS
    }  # fmt: skip
    assert {name for name, row in found["rows"].items() if "limit" in row} == set(hotpath.LIMITS)
    assert found["rows"]["identity hooks"]["chain"] == 1.0
    assert found["rows"]["identity hooks"]["direct"] == 1.0
    assert hotpath.render(found).row_count == len(found["rows"])


def test_the_chain_saves_one_tensor_of_4_kb_for_each_operator() -> None:
    sizes: list[int] = []
    for of_parameters in (False, True):
        sizes.clear()
        chain = hotpath.Chain(5, of_parameters, "cpu")
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            chain()
        assert sizes == [4096] * 5
