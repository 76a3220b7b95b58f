"""Small random models and data; nothing comes from a hub."""

import importlib
import os
import warnings

import pytest
import torch

from tests.models.libraries import import_torchvision

os.environ["HF_HUB_OFFLINE"] = "1"
import_torchvision()


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """These models are small."""


def quietly(module, *names):
    """These names of a framework, imported without its warnings; the tests are skipped where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(module.partition(".")[0], reason=f"needs {module.partition('.')[0]}")
        found = importlib.import_module(module)
        return [getattr(found, name) for name in names]


def llama(layers=3, **options):
    """A Llama with random weights, always the same ones."""
    config_of, model_of = quietly("transformers", "LlamaConfig", "LlamaForCausalLM")
    torch.manual_seed(0)
    config = config_of(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        **{"use_cache": False, **options},
    )
    return model_of(config)


def tokens(count=32, length=32):
    """Examples of a causal language model."""
    rows = torch.randint(0, 64, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def same_weights(one, other):
    """Whether two models have the same state, bit for bit."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
