"""Aliases find the parts of each family of models in Transformers, and training with them is exact."""

import pytest
import torch

import actstore
from actstore.policy import Rules
from actstore.policy.aliases import expand
from tests.integrations.conftest import quietly

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "use_cache": False}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
LAYERS = ["model.layers.*"], ["model.layers.*.self_attn"], ["model.layers.*.mlp"]

FAMILIES = {  # class, options of its config, and what @blocks, @attention and @mlp stand for
    "LlamaForCausalLM": (DECODER, *LAYERS),
    "MistralForCausalLM": (DECODER, *LAYERS),
    "Qwen2ForCausalLM": (DECODER, *LAYERS),
    "Qwen3ForCausalLM": ({**DECODER, "head_dim": 8}, *LAYERS),
    "MixtralForCausalLM": ({**DECODER, "num_local_experts": 4}, *LAYERS),
    "Qwen2MoeForCausalLM": ({**DECODER, **EXPERTS}, *LAYERS),
    "GPT2LMHeadModel": (
        {
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "vocab_size": 64,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        ["transformer.h.*"],
        ["transformer.h.*.attn"],
        ["transformer.h.*.mlp"],
    ),
    "BertForMaskedLM": (
        {**SIZES, "vocab_size": 64},
        ["bert.encoder.layer.*"],
        ["bert.encoder.layer.*.attention"],
        ["bert.encoder.layer.*.intermediate", *(f"bert.encoder.layer.{i}.output" for i in range(3))],
    ),
    "ViTForImageClassification": (
        {**SIZES, "image_size": 32, "patch_size": 8},
        ["vit.layers.*"],
        ["vit.layers.*.attention"],
        ["vit.layers.*.mlp"],
    ),
    "T5ForConditionalGeneration": (
        {
            "d_model": 32,
            "d_ff": 64,
            "d_kv": 8,
            "num_layers": 3,
            "num_heads": 4,
            "vocab_size": 64,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
        ["encoder.block.*", "decoder.block.*"],
        [
            *(f"{part}coder.block.*.layer.*.SelfAttention" for part in ("en", "de")),
            "decoder.block.*.layer.*.EncDecAttention",
        ],
        [f"{part}coder.block.*.layer.*.DenseReluDense" for part in ("en", "de")],
    ),
}


def build(family):
    (kind,) = quietly("transformers", family)
    torch.manual_seed(0)
    return kind(kind.config_class(**FAMILIES[family][0])).train()


def batch(family):
    torch.manual_seed(1)
    if family.startswith("ViT"):
        return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    rows = torch.randint(2, 64, (2, 32))
    return {"input_ids": rows, "labels": rows}


def step(family, policy):
    model = build(family)
    store = actstore.ActivationStore(model, policy, min_bytes=0)
    inputs = batch(family)
    with store:
        loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], store.report()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family):
    model = build(family)
    for alias, names in zip(("@blocks", "@attention", "@mlp"), FAMILIES[family][1:], strict=True):
        assert [pattern for pattern, _ in expand(Rules.parse(f"{alias} : int8"), model).rules] == names
    assert expand(Rules.parse("@norm : int8"), model).rules
    plain, kept = step(family, "keep")
    for policy in ("@blocks : recompute", "@mlp : recompute; @attention : expack; @norm : raw"):
        found, report = step(family, policy)
        assert all(map(torch.equal, found, plain)), policy
        assert report.saved_bytes == kept.saved_bytes
        assert report.held_bytes < kept.held_bytes
