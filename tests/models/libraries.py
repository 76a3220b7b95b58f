"""Models of torchvision, timm and diffusers, as small as their options allow, each with a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

Model = tuple[str, Callable[[], nn.Module], Callable[[], dict[str, Any]]]
SIDE, CLASSES = 64, 10
TORCHVISION = """
    alexnet convnext_tiny deeplabv3_mobilenet_v3_large densenet121 efficientnet_b0 fcn_resnet50 googlenet
    lraspp_mobilenet_v3_large mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18
    resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t wide_resnet50_2
""".split()  # noqa: SIM905
VIDEOS = ("mc3_18", "r2plus1d_18", "r3d_18", "swin3d_t")
TIMM = """
    eca_botnext26ts_256 test_byobnet cait_xxs24_224 coat_tiny convit_tiny test_convnext test_convnext2
    test_convnext3 cpubone_nano csatv2 cs3darknet_focus_s cspnext_tiny deit_tiny_patch16_224 dla34 dpn68
    edgenext_xx_small efficientformerv2_s0 test_efficientnet test_efficientnet_evos test_efficientnet_gn
    test_efficientnet_ln efficientvim_m1 efficientvit_b0 efficientvit_m0 vit_tiny_patch16_dinov3_qkvb
    fasternet_t0 fastvit_t8 gcvit_xxtiny ghostnet_050 hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_t
    inception_next_atto lcnetv2_small levit_128 lowformer_b0 test_mambaout test_coatnet poolformer_s12
    gmlp_ti16_224 mixer_s32_224 mobilenetv3_small_050 mobilevit_xxs test_nfnet pit_ti_224 pvt_v2_b0
    regnetx_004_tv repghostnet_050 repvit_m1 resnest14d test_resnet resnetv2_18 rexnet_100 legacy_seresnet18
    shvit_s1 skresnet18 starnet_s050 swiftformer_xs tiny_vit_5m_224 visformer_tiny test_vit test_vit2 test_vit3
    test_vit4 vit_tiny_r_s16_p8_224 test_vit_relpos ese_vovnet19b_slim_dw xcit_nano_12_p8_224
""".split()  # noqa: SIM905


def torchvision() -> Iterator[Model]:
    """Yield models of torchvision for images and videos."""

    def named(name: str) -> nn.Module:
        models = import_torchvision().models
        weights = (
            {"weights_backbone": None}
            if models.get_model_builder(name).__module__.split(".")[2] == "segmentation"
            else {}
        )
        model: nn.Module = models.get_model(name, weights=None, num_classes=CLASSES, **weights)
        return model

    for name in TORCHVISION:
        yield name, partial(named, name), partial(_image, "input" if name.startswith("lraspp") else "x", SIDE)
    for name in VIDEOS:
        yield name, partial(named, name), lambda: {"x": torch.randn(2, 3, 16, 32, 32)}


def _image(name: str, side: int) -> dict[str, Any]:
    return {name: torch.randn(2, 3, side, side)}


def import_torchvision() -> Any:
    """Import torchvision, if it is installed; where its operators are for another PyTorch, without them."""
    try:
        import torchvision
    except ModuleNotFoundError:
        return None
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision


def timm() -> Iterator[Model]:
    """Yield models of timm, for images of 64 pixels where the model lets its user choose."""

    def named(name: str) -> nn.Module:
        import timm

        try:
            model: nn.Module = timm.create_model(name, num_classes=CLASSES, img_size=SIDE)
        except TypeError:  # it takes images of any size
            model = timm.create_model(name, num_classes=CLASSES)
        return model

    for name in TIMM:
        yield name, partial(named, name), partial(_image, "x", SIDE)


_UNET = {"block_out_channels": (32, 64), "norm_num_groups": 8, "sample_size": 16}
_CROSS = _UNET | {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 32, "attention_head_dim": 8,
}  # fmt: skip
_DIT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_VAE = {
    "in_channels": 3, "out_channels": 3, "down_block_types": ["DownEncoderBlock2D"] * 2, "norm_num_groups": 8,
    "up_block_types": ["UpDecoderBlock2D"] * 2, "block_out_channels": [16, 32], "latent_channels": 4,
}  # fmt: skip


def _noisy(*shape: int, name: str = "sample", text: tuple[int, ...] = (), pooled: int = 0, **others: Any) -> Any:
    """Return a function that makes a batch of a denoiser: noise, a time, and the states of a text."""

    def batch() -> dict[str, Any]:
        made: dict[str, Any] = {name: torch.randn(2, *shape), "timestep": torch.tensor([10, 20])}
        if text:
            made["encoder_hidden_states"] = torch.randn(2, *text)
        if pooled:
            made["pooled_projections"] = torch.randn(2, pooled)
        return made | {key: each() if callable(each) else each for key, each in others.items()}

    return batch


def diffusers() -> Iterator[Model]:
    """Yield denoisers and autoencoders of diffusers."""
    cross = _noisy(4, 16, 16, text=(4, 32))
    up = {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "in_channels": 4, "out_channels": 4}
    image = _noisy(3, 16, 16)
    rows: list[tuple[str, dict[str, Any], Any]] = [
        ("UNet2DConditionModel", _CROSS | up, cross),
        (
            "UNet2DModel",
            _UNET
            | {
                "in_channels": 3,
                "out_channels": 3,
                "attention_head_dim": 8,
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            },
            image,
        ),
        (
            "ControlNetModel",
            {key: value for key, value in _CROSS.items() if key != "sample_size"}
            | {"in_channels": 4, "conditioning_embedding_out_channels": (16, 32)},
            _noisy(4, 16, 16, text=(4, 32), controlnet_cond=lambda: torch.randn(2, 3, 32, 32)),
        ),
        (
            "UNet3DConditionModel",
            {
                "block_out_channels": (4, 8),
                "norm_num_groups": 4,
                "cross_attention_dim": 8,
                "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                "attention_head_dim": 2,
                "in_channels": 4,
                "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
                "out_channels": 4,
                "layers_per_block": 1,
            },
            _noisy(4, 4, 16, 16, text=(4, 8)),
        ),
        (
            "DiTTransformer2DModel",
            _DIT
            | {
                "in_channels": 4,
                "out_channels": 8,
                "patch_size": 2,
                "sample_size": 8,
                "norm_type": "ada_norm_zero",
                "num_embeds_ada_norm": 8,
                "norm_elementwise_affine": False,
            },
            _noisy(4, 8, 8, name="hidden_states", class_labels=lambda: torch.tensor([1, 2])),
        ),
        (
            "PixArtTransformer2DModel",
            _DIT
            | {
                "in_channels": 4,
                "out_channels": 8,
                "patch_size": 2,
                "sample_size": 8,
                "cross_attention_dim": 32,
                "caption_channels": 16,
                "use_additional_conditions": False,
                "norm_type": "ada_norm_single",
            },
            _noisy(
                4,
                8,
                8,
                name="hidden_states",
                text=(4, 16),
                added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None},
            ),
        ),
        (
            "SD3Transformer2DModel",
            _DIT
            | {
                "sample_size": 16,
                "patch_size": 2,
                "joint_attention_dim": 32,
                "caption_projection_dim": 32,
                "pooled_projection_dim": 64,
                "out_channels": 4,
                "in_channels": 4,
            },
            _noisy(4, 16, 16, name="hidden_states", text=(8, 32), pooled=64),
        ),
        (
            "FluxTransformer2DModel",
            _DIT
            | {
                "in_channels": 4,
                "num_layers": 1,
                "num_single_layers": 1,
                "patch_size": 1,
                "joint_attention_dim": 32,
                "pooled_projection_dim": 32,
                "axes_dims_rope": [4, 4, 8],
            },
            _noisy(
                16,
                4,
                name="hidden_states",
                text=(8, 32),
                pooled=32,
                img_ids=lambda: torch.randn(16, 3),
                txt_ids=lambda: torch.randn(8, 3),
            ),
        ),
        (
            "AuraFlowTransformer2DModel",
            {
                "sample_size": 32,
                "patch_size": 2,
                "in_channels": 4,
                "num_mmdit_layers": 1,
                "num_single_dit_layers": 1,
                "attention_head_dim": 8,
                "num_attention_heads": 4,
                "joint_attention_dim": 32,
                "caption_projection_dim": 32,
                "out_channels": 4,
                "pos_embed_max_size": 256,
            },
            _noisy(4, 32, 32, name="hidden_states", text=(8, 32)),
        ),
        (
            "CogVideoXTransformer3DModel",
            _DIT
            | {
                "in_channels": 4,
                "out_channels": 4,
                "time_embed_dim": 2,
                "text_embed_dim": 8,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 8,
                "patch_size": 2,
                "max_text_seq_length": 8,
            },
            _noisy(2, 4, 8, 8, name="hidden_states", text=(8, 8)),
        ),
        (
            "LatteTransformer3DModel",
            _DIT
            | {
                "sample_size": 8,
                "patch_size": 2,
                "in_channels": 4,
                "caption_channels": 8,
                "out_channels": 8,
                "cross_attention_dim": 32,
                "video_length": 1,
                "num_embeds_ada_norm": 1000,
                "norm_type": "ada_norm_single",
            },
            _noisy(4, 1, 8, 8, name="hidden_states", text=(8, 8), enable_temporal_attentions=True),
        ),
        (
            "SanaTransformer2DModel",
            _DIT
            | {
                "patch_size": 1,
                "in_channels": 4,
                "out_channels": 4,
                "sample_size": 32,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 16,
                "cross_attention_dim": 32,
                "caption_channels": 8,
            },
            _noisy(4, 32, 32, name="hidden_states", text=(8, 8)),
        ),
        (
            "LTXVideoTransformer3DModel",
            _DIT | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": 16},
            _noisy(
                128,
                4,
                name="hidden_states",
                text=(8, 16),
                encoder_attention_mask=lambda: torch.ones(2, 8).bool(),
                num_frames=2,
                height=8,
                width=8,
            ),
        ),
        (
            "WanTransformer3DModel",
            _DIT
            | {
                "patch_size": (1, 2, 2),
                "in_channels": 4,
                "out_channels": 4,
                "text_dim": 16,
                "freq_dim": 256,
                "ffn_dim": 32,
                "cross_attn_norm": True,
                "qk_norm": "rms_norm_across_heads",
                "rope_max_seq_len": 32,
            },
            _noisy(4, 2, 16, 16, name="hidden_states", text=(8, 16)),
        ),
        (
            "MochiTransformer3DModel",
            {
                "patch_size": 2,
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "num_layers": 2,
                "pooled_projection_dim": 16,
                "in_channels": 4,
                "out_channels": None,
                "qk_norm": "rms_norm",
                "text_embed_dim": 16,
                "time_embed_dim": 4,
                "activation_fn": "swiglu",
                "max_sequence_length": 8,
            },
            _noisy(
                4, 2, 16, 16, name="hidden_states", text=(8, 16), encoder_attention_mask=lambda: torch.ones(2, 8).bool()
            ),
        ),
        (
            "StableAudioDiTModel",
            {
                "sample_size": 4,
                "in_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 4,
                "num_key_value_attention_heads": 2,
                "out_channels": 4,
                "cross_attention_dim": 4,
                "time_proj_dim": 8,
                "global_states_input_dim": 8,
                "cross_attention_input_dim": 4,
                "num_attention_heads": 2,
            },
            _noisy(4, 8, name="hidden_states", text=(8, 4), global_hidden_states=lambda: torch.randn(2, 1, 8)),
        ),
        (
            "QwenImageTransformer2DModel",
            _DIT
            | {
                "patch_size": 2,
                "in_channels": 16,
                "out_channels": 4,
                "joint_attention_dim": 16,
                "guidance_embeds": False,
                "axes_dims_rope": (8, 4, 4),
            },
            _noisy(
                16,
                16,
                name="hidden_states",
                text=(7, 16),
                encoder_hidden_states_mask=lambda: torch.ones(2, 7).bool(),
                img_shapes=[(1, 4, 4)] * 2,
            ),
        ),
        (
            "PriorTransformer",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 4,
                "num_layers": 2,
                "embedding_dim": 8,
                "num_embeddings": 7,
                "additional_embeddings": 4,
            },
            _noisy(8, name="hidden_states", text=(7, 8), proj_embedding=lambda: torch.randn(2, 8)),
        ),
        (
            "Transformer2DModel",
            _UNET.__class__(
                in_channels=32,
                norm_num_groups=8,
                cross_attention_dim=16,
                num_layers=2,
                num_attention_heads=2,
                attention_head_dim=16,
            ),
            lambda: {"hidden_states": torch.randn(2, 32, 8, 8), "encoder_hidden_states": torch.randn(2, 4, 16)},
        ),
        ("AutoencoderKL", _VAE, lambda: {"sample": torch.randn(2, 3, 32, 32)}),
        (
            "VQModel",
            {key: value for key, value in _VAE.items() if key != "latent_channels"} | {"latent_channels": 3},
            lambda: {"sample": torch.randn(2, 3, 32, 32)},
        ),
        (
            "AutoencoderTiny",
            {
                "encoder_block_out_channels": (32, 32),
                "decoder_block_out_channels": (32, 32),
                "num_encoder_blocks": (1, 2),
                "num_decoder_blocks": (2, 1),
            },
            lambda: {"sample": torch.rand(2, 3, 32, 32)},
        ),
        (
            "AsymmetricAutoencoderKL",
            {
                "down_block_out_channels": [32, 64],
                "layers_per_down_block": 1,
                "norm_num_groups": 16,
                "down_block_types": ["DownEncoderBlock2D"] * 2,
                "up_block_types": ["UpDecoderBlock2D"] * 2,
                "up_block_out_channels": [32, 64],
                "layers_per_up_block": 1,
            },
            lambda: {"sample": torch.randn(2, 3, 32, 32)},
        ),
        (
            "AutoencoderDC",
            {
                "attention_head_dim": 2,
                "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
                "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
                "encoder_block_out_channels": (8, 8),
                "decoder_block_out_channels": (8, 8),
                "encoder_qkv_multiscales": ((), (5,)),
                "decoder_qkv_multiscales": ((), (5,)),
                "encoder_layers_per_block": (1, 1),
                "decoder_layers_per_block": (1, 1),
                "latent_channels": 4,
            },
            lambda: {"sample": torch.randn(2, 3, 32, 32)},
        ),
        (
            "AutoencoderKLCogVideoX",
            {
                "down_block_types": ("CogVideoXDownBlock3D",) * 4,
                "up_block_types": ("CogVideoXUpBlock3D",) * 4,
                "block_out_channels": (8, 8, 8, 8),
                "latent_channels": 4,
                "layers_per_block": 1,
                "norm_num_groups": 2,
            },
            lambda: {"sample": torch.randn(1, 3, 8, 16, 16)},
        ),
        (
            "AutoencoderKLWan",
            {
                "base_dim": 16,
                "z_dim": 16,
                "dim_mult": [1, 1, 1, 1],
                "num_res_blocks": 1,
                "temperal_downsample": [False, True, True],
            },
            lambda: {"sample": torch.randn(1, 3, 9, 16, 16)},
        ),
    ]

    def named(name: str, options: dict[str, Any]) -> nn.Module:
        import diffusers as library

        model: nn.Module = getattr(library, name)(**options)
        return model

    for name, options, batch in rows:
        yield name, partial(named, name, options), batch


LIBRARIES = (torchvision, timm, diffusers)
