"""Architectures of Transformers, shrunk to a few thousand weights: how to build each model and its batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TOKENS, VOCABULARY, IMAGE = 32, 64, 32
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
OTHERS = {
    "image_size": IMAGE, "patch_size": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_kv": 8, "embedding_size": 16, "depths": [1, 1],
    "hidden_sizes": [16, 32], "embed_dim": 16, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_N4 = {"n_embd": 32, "n_layer": 4, "n_head": 4}
_MIXED = ["sliding_attention", "full_attention"] * 2
_USUAL = """
    Llama Mistral Mixtral Qwen2 Qwen3 Qwen2Moe Gemma Gemma2 Gemma3 Phi Phi3 Falcon GPTNeoX Cohere Cohere2 Olmo Olmo2
    StableLm Starcoder2 Granite GraniteMoe FalconMamba Mamba RecurrentGemma Lfm2 Nemotron Persimmon Glm Glm4 GptOss
    SmolLM3 Helium MiniMax Jetmoe Biogpt
""".split()  # noqa: SIM905
DECODERS: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in _USUAL},
    "GPT2": _N4, "OpenAIGPT": _N4, "GPTJ": _N4 | {"rotary_dim": 4}, "Codegen": _N4 | {"rotary_dim": 4},
    "CTRL": _N4 | {"dff": 64}, "Bloom": {"n_layer": 4, "n_head": 4},
    "GPTNeo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 64},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "XGLM": {"d_model": 32, "ffn_dim": 64, "num_layers": 4, "attention_heads": 4},
    "Llama4": {"num_local_experts": 2, "intermediate_size_mlp": 64},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "Qwen3Next": {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2,
    },
    "Gemma3n": {
        "num_kv_shared_layers": 2, "laurel_rank": 4, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4, "layer_types": _MIXED,
        "intermediate_size": [64] * 4,
    },
    "Gemma4": {
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
        "layer_types": _MIXED,
    },
    "Mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "Bamba": _MAMBA | {"attn_layer_indices": [1]}, "FalconH1": _MAMBA | {"mamba_d_ssm": 64},
    "GraniteMoeHybrid": _MAMBA | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "shared_intermediate_size": 64,
    },
    "Zamba2": {
        "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_mem_blocks": 1, "use_mem_rope": False, "mamba_d_state": 8,
    },
    "Jamba": {
        "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
        "use_mamba_kernels": False,
    },
}  # fmt: skip
ENCODERS = """
    Bert Roberta Albert Electra DebertaV2 Distilbert MPNet ConvBert BigBird Longformer Nystromformer RoFormer
    Splinter MobileBert Ernie Camembert XLMRoberta ModernBert FNet Ibert LayoutLM MegatronBert RemBert Yoso Mra
    Data2VecText Esm EuroBert
""".split()  # noqa: SIM905
IMAGES = """
    ViT DeiT Beit ConvNext ConvNextV2 ResNet MobileNetV1 MobileNetV2 Segformer Dinov2 FocalNet VitMae ViTMSN
    SwiftFormer Dinov3ViT IJepa
""".split()  # noqa: SIM905
BOTH = """
    T5 MT5 Bart MBart Pegasus Marian Blenderbot BlenderbotSmall LED M2M100 LongT5 UMT5 SwitchTransformers PLBart Mvp
    NllbMoe BigBirdPegasus
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Architecture:
    """A model of Transformers: `make` builds it in training mode, and `loss` is that of one batch."""

    name: str
    endings: tuple[str, ...]
    options: Mapping[str, Any]
    batch: Callable[[Any, torch.Generator], dict[str, Tensor]]

    def make(self) -> nn.Module:
        """Build the model with weights from seed 0."""
        kind = _class_of(self.name, self.endings)
        torch.manual_seed(0)
        model: nn.Module = kind(_config_of(kind.config_class, self.options))
        return model.train()

    def loss(self, model: nn.Module) -> Tensor:
        """Run forward on a batch of seed 0. Its loss is the model's own, or the mean square of what it returns."""
        found: Any = model(**self.batch(model.config, torch.Generator().manual_seed(0)))
        if getattr(found, "loss", None) is not None:
            loss: Tensor = found.loss
            return loss
        tensors = [each for each in found.values() if isinstance(each, Tensor) and each.is_floating_point()]
        return torch.stack([each.float().square().mean() for each in tensors]).sum()


def _class_of(name: str, endings: tuple[str, ...]) -> Any:
    import transformers

    known = {each.lower(): each for each in dir(transformers)}
    return next(getattr(transformers, known[key]) for end in endings if (key := name.lower() + end) in known)


def _config_of(kind: Any, options: Mapping[str, Any]) -> Any:
    """Return a configuration with the sizes that its class takes."""
    for left_out in (
        (),
        ("head_dim",),
        tuple(SMALL.keys() - {"vocab_size", "pad_token_id", "use_cache", "num_hidden_layers"}),
    ):
        try:
            return kind(**{key: value for key, value in options.items() if key not in left_out})
        except Exception as error:  # each class has its own kind of error for a size that it does not take
            last = error
    raise last


def _ids(generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY - 4, (2, TOKENS), generator=generator)


def _labelled(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    ids = _ids(generator)
    return {"input_ids": ids, "labels": ids}


def _images(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    side = config.image_size if isinstance(getattr(config, "image_size", None), int) else IMAGE
    return {"pixel_values": torch.randn(2, 3, side, side, generator=generator)}


def architectures() -> Iterator[Architecture]:
    """Yield all architectures, always in the same order."""
    endings = ("forcausallm", "lmheadmodel", "modelwithlmhead")
    for name, options in DECODERS.items():
        yield Architecture(name, endings, SMALL | options, _labelled)
    two = SMALL | OTHERS | {"num_hidden_layers": 2}
    two = {key: value for key, value in two.items() if key not in ("head_dim", "bos_token_id", "eos_token_id")}
    for name in ENCODERS:
        yield Architecture(name, ("model",), two, lambda config, generator: {"input_ids": _ids(generator)})
    for name in IMAGES:
        yield Architecture(name, ("model",), two, _images)
    for name in BOTH:
        yield Architecture(
            name,
            ("forconditionalgeneration", "mtmodel"),
            two,
            lambda config, generator: {"input_ids": _ids(generator), "decoder_input_ids": _ids(generator)},
        )
