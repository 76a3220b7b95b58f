"""Mixtures of experts of Transformers in recomputed layers: no token takes another expert in the second run."""

import pytest
import torch

import actstore
from actstore.errors import StateError
from tests.integrations.conftest import quietly

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "use_cache": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES = {
    "MixtralForCausalLM": {**SIZES, "num_local_experts": 8},
    "Qwen2MoeForCausalLM": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3MoeForCausalLM": {**SIZES, **EXPERTS, "head_dim": 16},
    "DeepseekV2ForCausalLM": {**DEEPSEEK, "q_lora_rank": None, "head_dim": 8, "topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": DEEPSEEK,
}


class Training:
    """A tiny model, whose experts tell which tokens they were given in each run."""

    def __init__(self, family, dtype, experts):
        (kind,) = quietly("transformers", family)
        torch.manual_seed(0)
        self.model = kind(kind.config_class(**FAMILIES[family]))
        self.model.set_experts_implementation(experts)
        self.model.to(dtype).train()
        self.chosen = {}
        for name, module in self.model.named_modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(lambda _, args, name=name: self._see(name, args[1]))
        self.ids = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(1))

    def _see(self, name, chosen):
        self.chosen.setdefault(name, []).append(chosen.detach().clone())

    def gradients(self, policy=None):
        self.model.zero_grad()
        self.chosen.clear()
        if policy is None:
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        else:
            with actstore.ActivationStore(self.model, policy, min_bytes=0):
                loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return [p.grad.float() for p in self.model.parameters() if p.grad is not None]

    def rerouted(self):
        """Tokens whose experts differ between the two runs."""
        assert self.chosen
        return sum((first != second).any(-1).sum().item() for first, second in self.chosen.values())


def error_of(found, wanted):
    squares = [((a - b).square().sum(), b.square().sum()) for a, b in zip(found, wanted, strict=True)]
    return (sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt().item()


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_is_rerouted(family, dtype, experts):
    training = Training(family, dtype, experts)
    wanted = training.gradients()
    for codec in ("int8", "int4"):
        plain = error_of(training.gradients(codec), wanted)
        found = error_of(training.gradients(f"model.layers.* : recompute({codec})"), wanted)
        assert training.rerouted() == 0
        assert found < 1.5 * plain
    for exact in ("recompute", "recompute(raw)", "recompute(decisions=kept)"):
        found = training.gradients(f"model.layers.* : {exact}")
        assert training.rerouted() == 0
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_rerouted_where_decisions_are_made_anew(family):
    policy = "model.layers.* : recompute(int4, decisions=anew)"
    training = Training(family, torch.float32, "grouped_mm")  # whose shapes do not tell
    training.gradients(policy)
    assert training.rerouted() > 0
    with pytest.raises(StateError, match="goes another way than its first") as caught:
        Training(family, torch.float32, "eager").gradients(policy)
    assert len(str(caught.value).split("\n")) == 3
    assert "topk" in str(caught.value)
