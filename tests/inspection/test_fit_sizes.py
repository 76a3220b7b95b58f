"""The largest batch and context of a fit, and the search for them."""

import logging
from itertools import product

import pytest
import torch
from torch import nn

from actstore import fit_step
from actstore.devices import cpu_memory
from actstore.inspection.fit.fit import largest
from tests.inspection.steps_to_fit import SIZES, Mlp, make_mlp, maker, measured

pytestmark = pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")


@pytest.mark.parametrize("policy", ["plain", "int8"])
def test_largest_batch_is_within_one_step_of_the_true_one(policy):
    make_step = maker("gpt", layers=1)
    limit = measured(make_step, policy, batch=7) + 100_000
    found = fit_step(make_step, [policy], memory=limit).largest[policy]["batch"]
    assert 6 <= found <= 8


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["plain", "keep", "recompute", "int8", "raw @ disk"])
@pytest.mark.parametrize("name", list(SIZES))
def test_largest_batch_of_each_model_is_within_one_step_of_the_true_one(name, policy):
    """The memory is that of a step which ran: a larger batch needs more."""
    make_step, batch = maker(name), SIZES[name]["batch"]
    limit = measured(make_step, policy, batch=batch, is_late=policy == "raw @ disk")
    found = fit_step(make_step, [policy], memory=limit, batch=batch // 2).largest[policy]["batch"]
    assert batch - 1 <= found <= batch + 1


def test_the_part_that_grows_too_large_is_named():
    found = fit_step(make_mlp, [], memory="200MiB", batch=1)
    assert found.rows[0].largest == "optimizer"
    assert found.parts["plain"] == {"batch": "activations", "context": "activations"}
    assert f"  {found.largest['plain']['batch']} (activations)  " in str(found)


def test_nothing_fits_into_a_memory_that_is_smaller_than_the_weights():
    found = fit_step(make_mlp, [], memory="1MiB")
    assert found.largest == {"plain": {"batch": 0, "context": 0}}
    assert " no " in str(found)
    assert str(found).splitlines()[-1] == (
        "fits: whether 1.0 MiB are enough; largest batch: with context=1; largest context: with batch=2048"
    )


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up = nn.MultiheadAttention(64, 2, dropout=0.1, batch_first=True), nn.Linear(64, 256)

    def forward(self, x):
        return self.up(self.attention(x, x, x)[0]).relu()


def make_attends(batch=8, context=128):
    model, x = Attends(), torch.ones(batch, context, 64)
    return model, lambda: model(x).mean()


@pytest.mark.parametrize(
    ("size", "tried", "start", "policies"),
    [
        ("batch", range(25, 28), 20, ["recompute"]),
        ("context", range(305, 308), 256, []),
        pytest.param("batch", range(8, 24), 3, ["keep", "int8", "recompute"], marks=pytest.mark.slow),
        pytest.param("context", range(295, 311), 64, ["keep", "int8", "recompute"], marks=pytest.mark.slow),
    ],
)
def test_largest_sizes_are_those_of_a_trial_of_each_size(size, tried, start, policies):
    """The bytes are linear in the batch, and quadratic in the context."""
    rows = {value: fit_step(make_attends, policies, **{size: value}).rows for value in tried}
    for i, policy in enumerate(["plain", *policies]):
        limit = rows[tried[len(tried) // 2]][i].most_bytes + 1
        fits = [value for value in tried if rows[value][i].most_bytes <= limit]
        assert 0 < len(fits) < len(tried)
        found = fit_step(make_attends, [policy], memory=limit, **{"batch": 8, "context": 128, size: start})
        assert found.largest[policy][size] == fits[-1]


SHAPES = {
    "linear, with noise": lambda size: 1_000_000 + 100 * size + 40 * (size % 2),
    "quadratic": lambda size: 1_000_000 + 1000 * size + 30 * size**2,
    "linear, then steeper": lambda size: 1_000_000 + max(100 * size, 5000 * size - 10_000_000),
    "cubic": lambda size: 1_000_000 + size**3,
    "in steps": lambda size: 1_000_000 + 1000 * -(-size // 64),
}


@pytest.mark.parametrize(("shape", "most"), list(zip(SHAPES, [8, 8, 12, 19, 42], strict=True)))
def test_search_finds_the_largest_size_in_few_steps(shape, most):
    needed = SHAPES[shape]
    for true, start, fixed in product([1, 2, 7, 64, 1000, 123_456], [1, 8, 512, 5000], [0, 1_000_000]):
        asked = []

        def count(size, asked=asked):
            asked.append(size)
            return needed(size)

        found = largest(count, needed(true), start, needed(start), fixed)
        assert needed(found) <= needed(true) < needed(found + 1)
        assert found >= true
        assert len(asked) <= most


class Placed(nn.Module):
    """Layer with a table of 100 places."""

    def __init__(self):
        super().__init__()
        self.places, self.up = nn.Parameter(torch.zeros(100, 256)), nn.Linear(256, 1024)

    def forward(self, x):
        return self.up(x + self.places[: x.shape[1]]).relu()


def test_an_error_of_the_step_ends_the_search_and_is_named(monkeypatch):
    contexts, logged = [], []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", logged.append)

    def make_step(context=50):
        contexts.append(context)
        model, x = Placed(), torch.ones(64, context, 256)
        return model, lambda: model(x).mean()

    found = fit_step(make_step, ["int8"], memory="1GiB")
    assert [sizes["context"] for sizes in found.largest.values()] == [100, 100]
    assert [contexts.count(each) for each in (100, 101)] == [2, 1]
    assert list(found.errors) == ["plain", "int8"]
    assert found.errors["int8"]["context"].startswith("RuntimeError: ")
    assert str(found).splitlines()[-2] == "fits: whether 1.0 GiB are enough; largest context"
    assert str(found).splitlines()[-1].startswith("plain, int8: the step fails at context=101: RuntimeError: ")
    assert logged == []
    assert fit_step(make_step, [], memory="24MiB").errors == {}


def test_an_error_under_one_policy_ends_its_search_alone():
    def make_step(batch=8):
        model, x = Mlp(), torch.ones(batch, 64, 512)

        def step(store):
            if batch > 20 and "int8" in str(getattr(store, "policy", "")):
                raise ValueError(batch)
            with store:
                return model(x).mean()

        return model, step

    found = fit_step(make_step, ["int8", "keep"], memory="256MiB")
    assert found.largest["int8"]["batch"] == 20
    assert found.errors == {"int8": {"batch": "ValueError: 21"}}
    assert found.largest["keep"] == found.largest["plain"]
    assert found.largest["keep"]["batch"] > 100


def test_context_is_found_in_few_dry_steps():
    """A search once went down by one size at a time, from a guess that was eight times too large."""
    asked = []

    def make_step(batch=8, context=64):
        asked.append(context)
        return make_attends(batch, context)

    fit_step(make_step, [], memory="2GiB")
    assert len(asked) <= 16
