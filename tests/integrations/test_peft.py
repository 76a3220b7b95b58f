"""LoRA and frozen quantized weights: names are those of the model inside, weights are never moved."""

import pytest
import torch
from torch import nn

import actstore
from actstore.model.names import named_modules
from tests.integrations.conftest import llama, quietly, tokens

LoraConfig, PromptTuningConfig, get_peft_model = quietly("peft", "LoraConfig", "PromptTuningConfig", "get_peft_model")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning"),
]

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1, "init_lora_weights": False}


def four_bit(model):
    """Freeze the linear layers of the blocks in 4 bits."""
    Linear4bit, Params4bit = quietly("bitsandbytes.nn", "Linear4bit", "Params4bit")
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                linear = Linear4bit(child.in_features, child.out_features, bias=False, compute_dtype=torch.float32)
                linear.weight = Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                setattr(module, name, linear.to("cpu"))
    assert model.model.layers[0].mlp.up_proj.weight.dtype is torch.uint8
    return model


def eight_bit(model):
    """The same in 8 bits, by a tensor class of torchao."""
    quantize_, Int8WeightOnlyConfig = quietly("torchao.quantization", "quantize_", "Int8WeightOnlyConfig")
    quantize_(model.model.layers, Int8WeightOnlyConfig(version=2))
    assert type(model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    return model


BASES = {"float": lambda model: model, "4 bits": four_bit, "8 bits": eight_bit}


def train(base, policy, steps=20):
    torch.manual_seed(0)
    model = get_peft_model(BASES[base](llama(layers=2)), LoraConfig(**LORA))
    store = actstore.ActivationStore(model, policy, min_bytes=0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for i in range(steps):
        rows = torch.stack([row["input_ids"] for row in tokens()[i : i + 4]])
        with store:
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters() if p.requires_grad], store.report()


@pytest.mark.parametrize("base", BASES)
def test_adapters_train_as_without_a_store(base):
    losses, weights, kept = train(base, "keep")
    assert len(set(losses)) == len(losses)
    for policy in ("@mlp : recompute; model.layers.*.self_attn : expack", "raw @ host"):
        those, adapters, report = train(base, policy)
        assert those == losses, policy
        assert all(map(torch.equal, adapters, weights)), policy
        assert report.saved_bytes == kept.saved_bytes
        if policy != "raw @ host":
            assert report.held_bytes < 0.8 * report.saved_bytes
        assert report.live_bytes == 0


def test_quantized_weights_are_neither_stored_nor_counted():
    plain, four, eight = (train(base, "raw @ host", 1)[2] for base in BASES)
    assert four.stored_bytes == plain.stored_bytes
    assert four.saved_bytes == plain.saved_bytes
    more = eight.saved_bytes - plain.saved_bytes  # torchao has autograd save what it dequantizes, without a store, too
    assert more == eight.stored_bytes - plain.stored_bytes > 0
    assert train("8 bits", "recompute", 1)[2].held_bytes == train("float", "recompute", 1)[2].held_bytes


def test_names_are_those_of_the_model_inside():
    inside = {name for name, _ in llama().named_modules()}
    shown = {name for name, _ in named_modules(get_peft_model(llama(), LoraConfig(**LORA)))}
    assert inside <= shown
    assert all(name in inside or ".lora_" in name or ".base_layer" in name for name in shown)
    prompt = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert inside <= {name for name, _ in named_modules(prompt)}
    wrapped = nn.ModuleDict({"net": get_peft_model(llama(), LoraConfig(**LORA))})
    assert "net.model.layers.0.mlp" in {name for name, _ in named_modules(wrapped)}


def test_a_name_of_the_wrapper_is_refused_with_the_one_that_counts():
    with pytest.raises(actstore.errors.PolicyError, match=r"Did you mean 'model\.layers\.\*\.mlp'"):
        actstore.ActivationStore(
            get_peft_model(llama(), LoraConfig(**LORA)), "base_model.model.model.layers.*.mlp : int8"
        )
