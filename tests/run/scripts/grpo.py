"""TRL's GRPO: generates answers, rewards them, and trains it beside a frozen copy; a random model and tokenizer."""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.models.libraries import import_torchvision

import_torchvision()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

words = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]
tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left")
folder = tempfile.mkdtemp()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes))
model.save_pretrained(folder)
fast.save_pretrained(folder)
prompts = Dataset.from_dict({"prompt": [f"w{number} w{number + 1} w{number + 2}" for number in range(8)]})
arguments = GRPOConfig(
    "unused", max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=8, beta=0.04,
    gradient_checkpointing="--checkpointing" in sys.argv, report_to=[], use_cpu=True, bf16=False,
    disable_tqdm=True, save_strategy="no", seed=0,
)  # fmt: skip
trainer = GRPOTrainer(
    folder,
    reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
    args=arguments,
    train_dataset=prompts,
    processing_class=fast,
)
trainer.train()
torch.save(trainer.model.state_dict(), sys.argv[1])
