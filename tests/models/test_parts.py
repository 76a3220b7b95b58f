"""`@blocks` and `@attention` of models that others wrote: a table by hand. A shrunk model has few layers."""

from importlib.util import find_spec

import pytest

from actstore import Rules
from actstore.errors import PolicyError
from actstore.policy.aliases import expand
from tests.models.architectures import architectures

# class: blocks; attention, whose names go on after those of the block where they begin with a dot
PARTS = {
    "transformers": """
        GPT2LMHeadModel: transformer.h.*; .attn
        LlamaForCausalLM: model.layers.*; .self_attn
        MixtralForCausalLM: model.layers.*; .self_attn
        Qwen3MoeForCausalLM: model.layers.*; .self_attn
        DeepseekV3ForCausalLM: model.layers.*; .self_attn
        GptOssForCausalLM: model.layers.*; .self_attn
        GraniteMoeForCausalLM: model.layers.*; .self_attn
        Gemma3ForCausalLM: model.layers.*; .self_attn
        PhiForCausalLM: model.layers.*; .self_attn
        FalconForCausalLM: transformer.h.*; .self_attention
        BloomForCausalLM: transformer.h.*; .self_attention
        GPTNeoXForCausalLM: gpt_neox.layers.*; .attention
        OPTForCausalLM: model.decoder.layers.*; .self_attn
        MptForCausalLM: transformer.blocks.*; .attn
        CTRLLMHeadModel: transformer.h.*; .multi_head_attention
        MambaForCausalLM: backbone.layers.*; .mixer
        Mamba2ForCausalLM: backbone.layers.*; .mixer
        JambaForCausalLM: model.layers.*; .mamba
        RwkvForCausalLM: rwkv.blocks.*; .attention
        Qwen3NextForCausalLM: model.layers.*; .linear_attn .self_attn
        DebertaV2ForMaskedLM: deberta.encoder.layer.*; .attention
        ModernBertForMaskedLM: model.layers.*; .attn
        AlbertForPreTraining: albert.encoder.albert_layer_groups.*; .albert_layers.*.attention
        DistilBertForMaskedLM: distilbert.transformer.layer.*; .attention
        XLNetLMHeadModel: transformer.layer.*; .rel_attn
        LongformerForMaskedLM: longformer.encoder.layer.*; .attention
        FNetForPreTraining: fnet.encoder.layer.*;
        T5ForConditionalGeneration: encoder.block.* decoder.block.*; encoder.block.*.layer.*.SelfAttention \
            decoder.block.*.layer.*.SelfAttention decoder.block.*.layer.*.EncDecAttention
        FunnelForPreTraining: funnel.decoder.layers.* funnel.encoder.blocks.*.*; .attention
        AutoformerModel: encoder.layers.* decoder.layers.*; encoder.layers.*.self_attn decoder.layers.*.self_attn \
            decoder.layers.*.encoder_attn
        LlavaForConditionalGeneration: model.language_model.layers.* model.vision_tower.encoder.layers.*; .self_attn
        ViTForImageClassification: vit.layers.*; .attention
        BeitForImageClassification: beit.layers.*; .attention
        ASTForAudioClassification: audio_spectrogram_transformer.layers.*; .attention
        SwinForImageClassification: swin.encoder.layers.*; .blocks.*.attention
        SegformerForImageClassification: segformer.stages.*; .blocks.*.attention
        MobileViTForImageClassification: mobilevit.encoder.layer.*; .transformer.layer.*.attention
        MobileViTV2ForImageClassification: mobilevitv2.encoder.layer.*; .transformer.layer.*.attention
        ConvNextForImageClassification: convnext.encoder.stages.*;
    """,
    "diffusers": """
        UNet2DConditionModel: down_blocks.* up_blocks.* mid_block.attentions.* mid_block.resnets.*; \
            mid_block.attentions.*.transformer_blocks.*.attn1 mid_block.attentions.*.transformer_blocks.*.attn2 \
            down_blocks.*.attentions.*.transformer_blocks.*.attn1 \
            down_blocks.*.attentions.*.transformer_blocks.*.attn2 \
            up_blocks.*.attentions.*.transformer_blocks.*.attn1 up_blocks.*.attentions.*.transformer_blocks.*.attn2
        DiTTransformer2DModel: transformer_blocks.*; .attn1
        PixArtTransformer2DModel: transformer_blocks.*; .attn1 .attn2
        SD3Transformer2DModel: transformer_blocks.*; .attn
        FluxTransformer2DModel: transformer_blocks.* single_transformer_blocks.*; .attn
        WanTransformer3DModel: blocks.*; .attn1 .attn2
        SanaTransformer2DModel: transformer_blocks.*; .attn1 .attn2
        QwenImageTransformer2DModel: transformer_blocks.*; .attn
        AutoencoderKL: encoder.down_blocks.* decoder.up_blocks.* encoder.mid_block.attentions.* \
            encoder.mid_block.resnets.* decoder.mid_block.attentions.* decoder.mid_block.resnets.*; \
            encoder.mid_block.attentions.* decoder.mid_block.attentions.*
        AutoencoderDC: encoder.down_blocks.* decoder.up_blocks.*; .*.attn
    """,
    "torchvision": """
        resnet18: layer1.* layer2.* layer3.* layer4.*;
        swin_t: features.1.0 features.1.1 features.2 features.3.0 features.3.1 features.4 features.5.0 features.5.1 \
            features.5.2 features.5.3 features.5.4 features.5.5 features.6 features.7.0 features.7.1; \
            features.*.*.attn
    """,
    "timm": """
        test_vit: blocks.*; .attn
        cait_xxs24_224: blocks.* blocks_token_only.*; .attn
        pit_ti_224: transformers.*; .blocks.*.attn
        gcvit_xxtiny: stages.*; .blocks.*.attn
        mobilevit_xxs: stages.*.*; .transformer.*.attn
        test_mambaout: stages.* head.pre_logits.fc;
        test_byobnet: stages.*;
        edgenext_xx_small: stem.* stages.*; stages.*.blocks.*.xca
        mixer_s32_224: blocks.*;
        eca_botnext26ts_256: stem.conv1 stem.conv2 stem.conv3 stages.*.*; stages.*.*.self_attn
    """,
}


def found(model, alias):
    try:
        return {name for name, _ in expand(Rules.parse(f"{alias} : keep"), model).rules}
    except PolicyError:  # it finds nothing
        return set()


@pytest.mark.parametrize("library", PARTS)
def test_blocks_and_attention_are_those_of_the_table(library):
    if find_spec(library) is None:
        pytest.skip("it comes by requirements-models.txt")
    rows = dict(row.strip().split(": ") for row in PARTS[library].strip().splitlines())
    named = {each.name: each for each in architectures() if each.library == library and each.name in rows}
    assert named.keys() == rows.keys()
    differ = {}
    for name, row in rows.items():
        blocks, attention = (part.split() for part in row.split(";"))
        expected = {block + each if each.startswith(".") else each for each in attention for block in blocks}
        model = next(iter(named[name].models()))
        if (parts := (found(model, "@blocks"), found(model, "@attention"))) != (set(blocks), expected):
            differ[name] = parts
    assert not differ
