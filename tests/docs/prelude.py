"""What README and the pages take for granted: a small model whose parts have the names they use, and batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WIDTH, CLASSES = 64, 10


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    """Gives the loss where it is given `y`, the logits without."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if y is None else loss_function(logits, y)


def loss_function(logits: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), y.flatten())


def trainer_for_transformers() -> tuple[Any, Any, Any, list[dict[str, Tensor]]]:
    """The Trainer of Transformers, a small Llama, arguments and data."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    rows = torch.randint(0, 64, (16, 32))
    arguments = TrainingArguments(
        "build/trainer", max_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    llm = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    return Trainer, llm, arguments, [{"input_ids": row, "labels": row} for row in rows]


torch.manual_seed(0)
model = Model()
batches = [(torch.randn(16, 64, WIDTH), torch.randint(CLASSES, (16, 64))) for _ in range(2)]
x, y = batches[0]
optimizer = torch.optim.AdamW(model.parameters())
