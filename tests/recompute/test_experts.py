"""Mixtures of experts in a recomputed region: no token takes another expert in the second run."""

import pytest

from actstore import ActivationStore
from actstore.errors import StateError
from tests.recompute.regions import (
    Mixture,
    batch,
    error_of,
    gradients,
    rerouted,
)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("by_index", [False, True], ids=["all tokens", "by index"])
def test_no_token_takes_another_expert(by_index, codec):
    x = batch(shape=(512, 16))
    model = Mixture(by_index)
    wanted = gradients(model, x)
    found = {}
    for policy in (codec, f"blocks.* : recompute({codec})", f"blocks.* : recompute({codec}, decisions=anew)"):
        for block in model.blocks:
            block.chosen.clear()
        try:
            found[policy] = error_of(gradients(model, x, ActivationStore(model, policy, min_bytes=0)), wanted)
        except StateError:
            continue
        if policy != codec:
            assert (rerouted(model) > 0) == ("anew" in policy)
    plain, kept, *anew = found.values()
    assert kept < 1.5 * plain
    assert len(anew) == (not by_index)
