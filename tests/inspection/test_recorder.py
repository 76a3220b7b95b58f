"""Lines of an inspection are those of a traceback, on models of Transformers; later steps record nothing."""

import os
import sys
import sysconfig
import traceback

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from actstore import ActivationStore, inspect_step
from tests.integrations.conftest import quietly

TORCH, STANDARD = os.path.dirname(torch.__file__), sysconfig.get_path("stdlib")
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
LANGUAGE = {  # the model, and its configuration
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "LlamaForCausalLM": ("LlamaConfig", WIDTHS),
    "BertForMaskedLM": ("BertConfig", WIDTHS),
    "T5ForConditionalGeneration": (
        "T5Config",
        {**T5, "decoder_start_token_id": 0},
    ),
}


def language(name):
    config, options = LANGUAGE[name]
    model_of, config_of = quietly("transformers", name, config)
    model, tokens = model_of(config_of(vocab_size=64, use_cache=False, **options)), torch.randint(0, 64, (2, 8))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


IMAGES = {
    "ViTForImageClassification": ("ViTConfig", {"image_size": 16, "patch_size": 8, **WIDTHS}),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
}


def images(name):
    config, options = IMAGES[name]
    model_of, config_of = quietly("transformers", name, config)
    model, x = model_of(config_of(**options)), torch.randn(2, 3, 16, 16)
    return model, lambda: model(pixel_values=x, labels=torch.tensor([0, 1])).loss


def users(file):
    standard = file.startswith(STANDARD) and "-packages" not in file
    return not (file.startswith((TORCH, "<frozen")) or standard)


@pytest.mark.parametrize("name", [*LANGUAGE, *IMAGES])
def test_lines_are_those_of_a_traceback(name):
    torch.manual_seed(0)
    model, step = language(name) if name in LANGUAGE else images(name)
    lines = []

    def pack(tensor):
        frames = [frame for frame in traceback.extract_stack(sys._getframe(1)) if users(frame.filename)]
        lines.append((frames[-1].filename, frames[-1].lineno, frames[-1].name))
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    store = ActivationStore(model, min_bytes=0)
    torch.manual_seed(1)
    found = inspect_step(step, store)
    assert [(each.file, each.line, each.function) for each in found.tensors] == lines
    assert len({each.file for each in found.tensors} - {__file__}) >= 1
    assert {each.operator for each in found.tensors} >= {"linear", "cross_entropy_loss"}


def test_later_steps_record_nothing():
    model, step = images("ResNetForImageClassification")
    store = ActivationStore(model, min_bytes=0)
    inspect_step(step, store)
    calls = []
    sys.setprofile(lambda frame, *_: calls.append(frame.f_code.co_filename))
    try:
        with store:
            loss = step()
        loss.backward()
    finally:
        sys.setprofile(None)
    assert calls
    assert not [file for file in calls if f"actstore{os.sep}inspection" in file]
