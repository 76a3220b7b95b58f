"""The Trainer of Transformers, with a tiny Llama and its own gradient checkpointing if asked for."""

import sys

import torch

from tests.models.libraries import import_torchvision

import_torchvision()
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
rows = torch.randint(0, 64, (16, 64))
dataset = [{"input_ids": row, "labels": row} for row in rows]
if "--checkpointing" in sys.argv:
    model.gradient_checkpointing_enable()
arguments = TrainingArguments(
    "unused", max_steps=4, per_device_train_batch_size=4, save_strategy="no", report_to=[], use_cpu=True,
    disable_tqdm=True,
)  # fmt: skip
Trainer(model, arguments, train_dataset=dataset, eval_dataset=dataset[:4]).train()
torch.save(model.state_dict(), sys.argv[1])
