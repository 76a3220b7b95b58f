"""The callback in the Trainer of sentence-transformers, which derives from that of Transformers."""

import pytest
import torch

from tests.integrations.conftest import quietly
from tests.integrations.test_trl import COMMON, texts, tokenizer_of_words

SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments = quietly(
    "sentence_transformers",
    "SentenceTransformer",
    "SentenceTransformerTrainer",
    "SentenceTransformerTrainingArguments",
)
(MultipleNegativesRankingLoss,) = quietly("sentence_transformers.losses", "MultipleNegativesRankingLoss")
BertConfig, BertModel = quietly("transformers", "BertConfig", "BertModel")
(ActivationStoreCallback,) = quietly("actstore.integrations.huggingface", "ActivationStoreCallback")
(Dataset,) = quietly("datasets", "Dataset")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # its own, and those of its packages


def trained(folder, callbacks=()):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    BertModel(BertConfig(**sizes, intermediate_size=64)).save_pretrained(folder / "model")
    tokenizer_of_words().save_pretrained(folder / "model")
    model, rows = SentenceTransformer(str(folder / "model"), device="cpu"), texts(16, 8)
    arguments = SentenceTransformerTrainingArguments(str(folder), max_steps=4, per_device_train_batch_size=4, **COMMON)
    SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"anchor": rows[:8], "positive": rows[8:]}),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=list(callbacks),
    ).train()
    return model.state_dict()


@pytest.mark.parametrize("policy", ["@blocks : recompute", "0.* : recompute(raw @ disk)"])
def test_training_is_that_without_a_store(policy, tmp_path):
    plain = trained(tmp_path)
    callback = ActivationStoreCallback(policy, min_bytes=0)
    stored = trained(tmp_path, [callback])
    assert all(torch.equal(plain[name], stored[name]) for name in plain)
    assert callback.store.report().held_bytes < 0.1 * callback.store.report().saved_bytes
