"""Caches of keys and values, which Transformers' decoders make by default: recomputed modules run without them."""

import warnings

import pytest
import torch

import actstore
from tests.integrations.conftest import llama, quietly

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
DECODERS = {
    "LlamaForCausalLM": SIZES,
    "MistralForCausalLM": {**SIZES, "num_key_value_heads": 2, "sliding_window": 8},  # its cache has a tensor at once
    "GPTNeoForCausalLM": {
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "vocab_size": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "T5ForConditionalGeneration": {
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": 64,
        "decoder_start_token_id": 0,
    },
    "FlaubertWithLMHeadModel": {"vocab_size": 64, "emb_dim": 32, "n_layers": 4, "n_heads": 4},
}
LEFT_OUT = pytest.mark.filterwarnings(r"ignore:.*Recomputed modules run without it:RuntimeWarning")
rows = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def build(kind, **options):
    (kind,) = quietly("transformers", kind)
    torch.manual_seed(0)
    return kind(kind.config_class(**DECODERS[kind.__name__], **options)).train()


def gradients(model, policy, **options):
    store = actstore.ActivationStore(model, policy, min_bytes=0)
    torch.manual_seed(1)
    with store:
        loss = model(input_ids=rows, labels=rows, **options).loss
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)], store.report()


@LEFT_OUT
@pytest.mark.parametrize("policy", ["@blocks : recompute", "@blocks[1::2] : recompute"])
@pytest.mark.parametrize("kind", [kind for kind in DECODERS if not kind.startswith("Flaubert")])
def test_gradients_are_those_without_a_cache(kind, policy):
    wanted, kept = gradients(build(kind), "keep", use_cache=False)
    found, report = gradients(build(kind), policy)
    for one, other in zip(found, wanted, strict=True):
        if "[" in policy:  # blocks that are kept have the cache, which copies what attention reads: other last bits
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)
    assert report.held_bytes < kept.held_bytes


@LEFT_OUT
def test_a_model_without_an_option_for_its_cache_is_recomputed():
    wanted, kept = gradients(build("FlaubertWithLMHeadModel"), "keep")
    found, report = gradients(build("FlaubertWithLMHeadModel"), "@blocks : recompute")
    for one, other in zip(found, wanted, strict=True):  # a cache copies what attention reads: other last bits
        torch.testing.assert_close(one, other)
    assert report.held_bytes < 0.5 * kept.held_bytes


def test_a_store_warns_once_and_leaves_the_cache_empty():
    model = llama(use_cache=True).train()
    store = actstore.ActivationStore(model, "@blocks : recompute", min_bytes=0)

    def step():
        with store:
            output = model(input_ids=rows, labels=rows)
        output.loss.backward()
        return output

    with pytest.warns(RuntimeWarning) as given:
        output = step()
    step()  # warnings are errors
    (warning,) = given
    assert str(warning.message).startswith("model.layers.0 (recompute) is given a DynamicCache: ")
    assert warning.filename == torch.nn.modules.module.__file__
    assert output.past_key_values.get_seq_length() == 0


def test_a_cache_with_values_is_refused():
    model = llama(use_cache=True).train()
    past = model(input_ids=rows).past_key_values
    store = actstore.ActivationStore(model, "@blocks : recompute", min_bytes=0)
    with pytest.raises(actstore.errors.StateError, match=r"that has values already.*'model\.layers\.0 : keep'"), store:
        model(input_ids=rows, past_key_values=past)


class Layer(torch.nn.Module):
    def __init__(self, reads=False):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self._can_checkpoint_with_cache = reads  # as in Transformers' layers that only read a cache

    def forward(self, x, others, use_cache=True):
        return self.linear(x) * (1.0 if others is None else 2.0)


def run(layer, *args):
    model = torch.nn.ModuleList([layer])
    store = actstore.ActivationStore(model, "0 : recompute", min_bytes=0)
    x = torch.ones(2, 4, requires_grad=True)
    with store:
        y = layer(x, *args).sum()
    y.backward()
    return y


def test_a_cache_inside_of_another_argument_is_refused():
    (cache,) = quietly("transformers", "DynamicCache")
    with pytest.raises(actstore.errors.StateError, match="a cache inside of another argument"):
        run(Layer(), [cache()])


def test_a_module_that_only_reads_a_cache_is_given_it():
    (cache,) = quietly("transformers", "DynamicCache")
    layer = Layer(reads=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(layer, cache()), 2.0 * run(layer, None))
