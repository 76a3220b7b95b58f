"""Random models under random policies, trained in random ways: all that training leaves is that of plain training.

``python -m tests.autograd.test_random_models --examples N`` draws N others at random.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

from actstore import ActivationStore
from actstore.errors import PolicyError
from actstore.model.generators import GeneratorStates
from actstore.model.weights import Weights
from actstore.recompute import replay
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.autograd.random_models import Tree, build, trees
from tests.autograd.random_training import WAYS, arguments_of, policies, train

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning"),
]


def check(
    forest: list[Tree], data: st.DataObject, way: str, dtype: torch.dtype, autocast: bool, options: dict[str, Any]
) -> None:
    try:
        wanted = train(build(forest, dtype), None, way, dtype, autocast)
    except (RuntimeError, UserWarning):  # no model that can be trained so
        reject()
    model = build(forest, dtype)
    policy = data.draw(policies(model))
    try:
        store = ActivationStore(model, policy, **arguments_of(options))
    except PolicyError:
        reject()
    with gc_off():
        check_same(train(model, store, way, dtype, autocast), wanted)
        check_drained(store)
    store.close()


ARGUMENTS = {
    "forest": st.lists(trees(), min_size=1, max_size=6),
    "data": st.data(),
    "way": st.sampled_from(WAYS),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "autocast": st.booleans(),
    "options": st.fixed_dictionaries(
        {"min_bytes": st.sampled_from([0, 200])},
        optional={
            "window": st.sampled_from([1, 8192]),
            "host_budget": st.sampled_from([0, 4096]),
            "when_full": st.sampled_from(["keep", "spill"]),
            "verify": st.just(True),
        },
    ),
}


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(**ARGUMENTS)
def test_all_that_training_leaves_is_that_of_plain_training(**arguments: Any) -> None:
    check(**arguments)


def loses(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    patch.setattr(owner, name, lambda *_: None)


def loses_history(patch: pytest.MonkeyPatch) -> None:
    """Inputs that required a gradient come back without."""
    patch.setattr(replay, "_fresh", lambda tensor, **_: tensor.detach())


PLANTED = {
    "random numbers go on": lambda patch: loses(patch, GeneratorStates, "rewind"),
    "random numbers stay back": lambda patch: loses(patch, GeneratorStates, "resume"),
    "buffers are updated twice": lambda patch: loses(patch, Weights, "rewind"),
    "buffers stay back": lambda patch: loses(patch, Weights, "resume"),
    "inputs without history": loses_history,
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = settings(max_examples=200, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    with monkeypatch.context() as patch:
        PLANTED[bug](patch)
        with pytest.raises((AssertionError, RuntimeError)):
            draw(given(**ARGUMENTS)(check))()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="how many models (1000)")
    warnings.simplefilter("error", UserWarning)
    importlib.import_module("torch._dynamo")  # on its first use it would be imported, and keep frames for the collector
    torch.set_num_threads(1)
    drawn = settings(
        max_examples=parser.parse_args().examples, derandomize=False, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=True,
    )  # fmt: skip
    drawn(given(**ARGUMENTS)(check))()


if __name__ == "__main__":
    main()
