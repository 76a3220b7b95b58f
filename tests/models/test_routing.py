"""Routers of models with experts: the second run of a block routes each token as the first."""

import copy
from math import inf

import pytest
import torch

from actstore import ActivationStore, make_plan
from tests.models.architectures import architectures

STEPS = 1000
MODELS = (
    "MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "GraniteMoeForCausalLM",
    "Llama4ForCausalLM", "JambaForCausalLM",
)  # fmt: skip


def policy_of(text, model, batch):
    """Return a policy; for "plan" a plan for three quarters of what plain training saves."""
    if text != "plan":
        return text
    store = ActivationStore(copy.deepcopy(model), "keep", min_bytes=0)
    with store:
        loss = store.model(**batch).loss
    loss.backward()
    return make_plan(model, lambda: model(**batch).loss, store.report().saved_bytes * 3 // 4, min_bytes=0)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["recompute", "recompute(int8)", "plan"])
@pytest.mark.parametrize("name", MODELS)
def test_no_token_goes_to_another_expert(name, text, monkeypatch):
    model, batch = next(each for each in architectures() if each.name == name).make()
    routed = []

    def topk(x, *args, **options):
        found = original(x, *args, **options)
        routed.append(found.indices.clone())
        return found

    original = torch.topk
    policy = policy_of(text, model, batch)
    monkeypatch.setattr(torch, "topk", topk)
    monkeypatch.setattr(torch.Tensor, "topk", topk)
    store = ActivationStore(model, policy, min_bytes=0)
    optimizer, generator = torch.optim.AdamW(model.parameters(), 1e-2), torch.Generator().manual_seed(0)
    again, budget = 0, policy.budget if text == "plan" else inf
    for _ in range(STEPS):
        ids = torch.randint(3, 58, batch["input_ids"].shape, generator=generator)
        routed.clear()
        with store:
            loss = model(input_ids=ids, labels=ids).loss
        first = list(routed)
        loss.backward()
        assert store.report().peak_held_bytes <= 1.02 * budget
        second = routed[len(first) :]
        again += len(second)
        assert all(any(torch.equal(each, one) for one in first) for each in second)
        optimizer.step()
        optimizer.zero_grad()
    assert again or text == "plan"  # a plan may keep the router
    assert loss.isfinite()
