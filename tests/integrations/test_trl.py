"""The callback for the Trainers of TRL: weights as without a store, bit for bit; what clashes is refused."""

import pytest
import torch

import actstore
from tests.integrations.conftest import llama, quietly, same_weights, tokens

(Dataset,) = quietly("datasets", "Dataset")
(ActivationStoreCallback,) = quietly("actstore.integrations.huggingface", "ActivationStoreCallback")

pytestmark = [
    pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),  # of Transformers, in TRL
    pytest.mark.filterwarnings("ignore:.*the model checkpoints this module, or a part of it, by itself:RuntimeWarning"),
]

COMMON = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False, "seed": 0}


def tokenizer_of_words():
    from tokenizers import Tokenizer, models, pre_tokenizers

    (PreTrainedTokenizerFast,) = quietly("transformers", "PreTrainedTokenizerFast")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(62)} | {"<pad>": 62, "<eos>": 63}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def texts(count=32, length=32):
    return [" ".join(f"w{int(i)}" for i in row["input_ids"][:length] % 62) for row in tokens(count)]


def sft(folder, callbacks, **options):
    SFTConfig, SFTTrainer = quietly("trl", "SFTConfig", "SFTTrainer")
    options = {"max_steps": 20, "logging_steps": 5, "gradient_checkpointing": False, **options}
    return SFTTrainer(
        llama(),
        SFTConfig(str(folder), per_device_train_batch_size=4, **COMMON, **options),
        train_dataset=Dataset.from_dict({"text": texts()}),
        processing_class=tokenizer_of_words(),
        callbacks=callbacks,
    )


def dpo(folder, callbacks):
    """A DPOTrainer with TRL's defaults, which switches the model's checkpoints around its reference model."""
    DPOConfig, DPOTrainer = quietly("trl", "DPOConfig", "DPOTrainer")
    words = texts(12, 8)
    rows = [dict(zip(("prompt", "chosen", "rejected"), words[i : i + 3], strict=True)) for i in range(0, 12, 3)]
    return DPOTrainer(
        llama(),
        llama(),
        args=DPOConfig(str(folder), max_steps=2, logging_steps=1, per_device_train_batch_size=2, **COMMON),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer_of_words(),
        callbacks=callbacks,
    )


def reward(folder, callbacks):
    RewardConfig, RewardTrainer = quietly("trl", "RewardConfig", "RewardTrainer")
    (LlamaForSequenceClassification,) = quietly("transformers", "LlamaForSequenceClassification")
    torch.manual_seed(0)
    config = llama().config
    config.num_labels, config.pad_token_id = 1, 62
    words = texts(16, 12)
    return RewardTrainer(
        LlamaForSequenceClassification(config),
        RewardConfig(str(folder), max_steps=3, logging_steps=1, per_device_train_batch_size=2, **COMMON),
        train_dataset=Dataset.from_dict({"chosen": words[:8], "rejected": words[8:]}),
        processing_class=tokenizer_of_words(),
        callbacks=callbacks,
    )


def online(name, folder, callbacks):
    """A trainer that generates answers and rewards them, beside a frozen copy of the model."""
    kind_of_config, kind = quietly("trl", f"{name}Config", f"{name}Trainer")
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "beta": 0.04}
    tokenizer, model = tokenizer_of_words(), llama(pad_token_id=62, eos_token_id=63, use_cache=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return kind(
        str(folder / "model"),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=kind_of_config(str(folder), max_steps=2, logging_steps=1, **sizes, **COMMON),
        train_dataset=Dataset.from_dict({"prompt": texts(8, 4)}),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def grpo(folder, callbacks):
    return online("GRPO", folder, callbacks)


def rloo(folder, callbacks):
    return online("RLOO", folder, callbacks)


def trained(make, folder, callbacks=()):
    torch.manual_seed(0)
    trainer = make(folder, list(callbacks))
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (sft, "recompute(raw @ disk)"),
        (dpo, "@blocks : recompute"),
        pytest.param(dpo, "raw @ disk", marks=pytest.mark.slow),
        pytest.param(reward, "@blocks : recompute", marks=pytest.mark.slow),
        pytest.param(grpo, "raw @ disk", marks=pytest.mark.slow),
        pytest.param(grpo, "* : expack", marks=pytest.mark.slow),
        pytest.param(rloo, "raw @ disk", marks=pytest.mark.slow),
    ],
)
def test_training_is_that_without_a_store(make, policy, tmp_path):
    plain = trained(make, tmp_path)
    callback = ActivationStoreCallback(policy, min_bytes=0)
    stored = trained(make, tmp_path, [callback])
    assert same_weights(stored.model, plain.model)
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (plain, stored)]
    assert losses[0] == losses[1]
    assert losses[0]
    assert callback.store.report().saved_bytes > 0


def test_activation_offloading_of_trl_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:  # TRL asks for the accelerator when the Trainer is made
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
        trainer = sft(tmp_path, [ActivationStoreCallback("recompute")], activation_offloading=True)
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda self: None, raising=False)
    with pytest.raises(actstore.errors.StateError, match=r"trl\..*activation_offloading=False"):
        trainer.train()
