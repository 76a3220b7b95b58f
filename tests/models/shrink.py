"""Configurations of Transformers, shrunk to a few thousand weights by the names of their sizes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

VOCABULARY, POSITIONS, IMAGE, MOST_WEIGHTS = 64, 128, 32, 5_000_000
LAST_TOKEN = VOCABULARY - 4  # special tokens end here: ids of batches are smaller
# the first pattern that matches the name of a size says the most that it may be
SIZES = [(re.compile(names), most) for names, most in (
    (r".*vocab_sizes?|vocabulary.*|.*codebook_size", VOCABULARY),
    (r"(.*_)?(num_)?(key_value|kv)_heads|num_query_groups|multi_query_group_num", 2),
    (r"(.*_)?(num_|n_)?heads?|.*attention_heads", 4),
    (r".*head_dim|.*_d_head|d_kv|d_head|attention_head_size|head_size|.*headdim", 8),
    (r"(.*_)?((num|n)_)?(hidden_)?(layers?|depth)|(num|n)_(.*_)?blocks", 2),
    (r".*(intermediate|ffn|ff|mlp|inner|feed_?forward)_?(size|dim|hidden_size|hidden)?|d_ff|n_inner", 64),
    (r".*intermediate_size.*|dim_feedforward", 64),
    (r".*(max_position|max_.*positions|n_positions|n_ctx|seq_len|max_seq|max_source|max_target).*", POSITIONS),
    (r".*position_embed.*", POSITIONS),
    (r".*(num_experts_per_tok|top_?k|num_selected.*|moe_k|k_experts)", 2),
    (r".*experts", 4),
    (r".*n_group|topk_group|num_groups|n_groups|first_k_dense_replace", 1),
    (r".*rank", 8),
    (r".*(state_size|d_state)", 8),
    (r".*(image_size|img_size|input_size)", IMAGE),
    (r".*patch_size", 8),
    (r".*(hidden|_size|d_model|n_embd|_dim|^dim|width|_channels|_features)", 32),
)]  # fmt: skip
AS_THEY_ARE = re.compile(
    r".*(token|_id|index|idx|kernel|stride|window|padding|num_channels|in_channels|in_chans|num_labels|version|seed|"
    r"bits|feat_extract|scales|factor|interval|freq|period|offset|ratio|chunk|type_vocab_size|bins|groups|conv_).*"
)
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "decoder_start_token_id": 1}
KINDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
# sizes that depend on others in some classes: tried one after the other
VARIANTS: tuple[Mapping[str, Any], ...] = (
    {}, {"num_key_value_heads": 4}, {"head_dim": 16}, {"rotary_dim": 4}, {"is_decoder": True},
    {"prediction_length": 4, "context_length": 16}, {"num_key_value_heads": 4, "head_dim": 16}, {"hidden_size": 64},
    {"num_hidden_layers": 4}, {"pad_token_id": 0, "head_dim": 8}, {"attention_window": 8},
    {"mamba_n_heads": 8, "mamba_d_head": 8},
    {"num_attention_heads": 2, "num_key_value_heads": 2}, {"mrope_section": [2, 1, 1]},
    {"depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 4]}, {"d_head": 8, "n_head": 4, "d_model": 32},
    {"num_attention_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8},
    {"backbone": "test_resnet", "use_timm_backbone": True, "use_pretrained_backbone": False},
)  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"] * 2
_GEMMA = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _MIXED, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}  # fmt: skip
RELATED: Mapping[str, Mapping[str, Any]] = {  # classes with sizes that follow from others
    "Gemma3nForCausalLM": _GEMMA | {
        "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [64] * 4,
    },
    "Gemma4ForCausalLM": _GEMMA,
    "GPTNeoForCausalLM": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "FalconH1ForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 64},
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 4, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"] * 2, "use_mem_rope": False, "mamba_d_state": 8, "head_dim": 8,
    },
    "GraniteMoeHybridForCausalLM": {
        "num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "mamba_n_heads": 8,
        "mamba_d_head": 8, "mamba_d_state": 8, "shared_intermediate_size": 64,
    },
}  # fmt: skip
TASKS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING", "MASKED_LM", "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION", "CTC", "AUDIO_CLASSIFICATION", "OBJECT_DETECTION", "DEPTH_ESTIMATION",
    "TIME_SERIES_PREDICTION", "VIDEO_CLASSIFICATION", "",
)  # fmt: skip


def classes() -> Iterator[str]:
    """Yield a class for each configuration that Transformers maps to a model: the first of `TASKS` that it has."""
    from transformers.models.auto import configuration_auto, modeling_auto

    found: dict[str, None] = {}
    for kind in configuration_auto.CONFIG_MAPPING_NAMES:
        names = (
            getattr(modeling_auto, f"MODEL_{f'FOR_{task}_' if task and task != 'PRETRAINING' else ''}MAPPING_NAMES")
            if task != "PRETRAINING"
            else modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES
            for task in TASKS
        )
        name = next((each[kind] for each in names if kind in each), None)
        if name is not None:
            found[name if isinstance(name, str) else name[0]] = None
    yield from found


def models(name: str) -> Iterator[nn.Module]:
    """Yield models of a class in training mode, with weights from seed 0, for each of `VARIANTS` that it takes.

    Raises
    ------
    ValueError : it takes none; the message is that of the first
    """
    import transformers

    kind = getattr(transformers, name)
    default, last, built = kind.config_class(), "", False
    for variant in (RELATED[name],) if name in RELATED else VARIANTS:
        try:
            model = _built(kind, kind.config_class(**shrunk(default, variant)))
        except Exception as error:  # each class has its own kind of error for sizes that do not fit
            last = last or f"{type(error).__name__}: {error}"
            continue
        built = True
        yield model
    if not built:
        raise ValueError(last.replace("\n", " "))


def _built(kind: Any, config: Any) -> nn.Module:
    for each in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        each.use_cache = False
    try:
        with torch.device("meta"):
            weights = sum(each.numel() for each in kind(copy.deepcopy(config)).parameters())
    except (NotImplementedError, RuntimeError):  # it reads a value while it is built
        weights = 0
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{weights:,} weights remain")
    torch.manual_seed(0)
    model: nn.Module = kind(config).train()
    return model


def shrunk(config: Any, variant: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a configuration that differ from its defaults, those of configurations in it, too."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if hasattr(value, "to_dict"):
            found[name] = shrunk(value, variant) | {"model_type": value.model_type}
        elif name in variant:
            found[name] = variant[name]
        elif name in SPECIAL:
            found[name] = SPECIAL[name]
        elif re.fullmatch(r".*token_(id|index)", name):
            found |= {name: min(value, LAST_TOKEN)} if isinstance(value, int) and value >= 0 else {}
        elif name in KINDS and isinstance(value, list) and value:
            each = list(dict.fromkeys(value))
            layers = variant.get("num_hidden_layers", 2)
            found[name] = (each * layers)[: max(layers, len(each) if layers > 2 else 0)]
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            if "mrope_section" in value or "mrope_section" in variant:
                found[name] = value | {"mrope_section": [2, 1, 1]}
        elif not AS_THEY_ARE.fullmatch(name):
            smaller = _smaller(name, value)
            if smaller != value:
                found[name] = smaller
    return found


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
        if re.fullmatch(r".*(sizes|dims|channels|dim|width|embed.*|hidden.*)", name):
            by = max(1, max(value) // 64)
            return [max(8, each // by // 8 * 8) for each in value]
        if re.fullmatch(r".*(depths?|layers|blocks)", name):
            return [1] * len(value)
        if re.fullmatch(r".*image_size", name):
            return [IMAGE] * len(value)
        return [64] * 2 if "intermediate" in name else value
    if type(value) is not int or value <= 1:
        return value
    return next((min(value, most) for names, most in SIZES if names.fullmatch(name)), value)
