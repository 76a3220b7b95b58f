"""A loop as people write it: bfloat16 autocast, accumulated gradients, clipping, evaluation, a scheduler."""

import sys

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Body(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = Body(width)
        self.head = nn.Linear(width, 50)

    def forward(self, x):
        return self.head(self.body(x))


def main(parts):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        for _ in range(2):
            tokens = torch.randint(50, (4, 48))
            with torch.autocast("cpu", torch.bfloat16):
                logits = model.head(model.body(tokens)) if parts else model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            model(tokens)
        model.train()
    return model


if __name__ == "__main__":
    trained = main("--parts" in sys.argv)
    torch.save(trained.state_dict(), sys.argv[1])
    print("trained")
