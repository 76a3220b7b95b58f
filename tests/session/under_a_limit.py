"""A process that trains a model under a limit of memory: `python -m tests.session.under_a_limit`.

Arguments: a policy; MiB that it may have beside what it has when the model is made; its blocks; the layers of each. It
prints the notes of an error about memory, or ``trained``.
"""

import resource
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from actstore import ActivationStore, encode
from actstore.session.process import status_bytes

ROWS, WIDTH, CLASSES = 4096, 128, 200


class Block(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        inner = [each for _ in range(layers - 2) for each in (nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU())]
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), *inner, nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, blocks: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(layers) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def main(policy: str, room: int, blocks: int, layers: int) -> None:
    model = Model(blocks, layers)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(CLASSES, (ROWS,))
    store = ActivationStore(model, policy)
    if policy.startswith("int"):
        encode(torch.ones(4096), policy).decode()  # compiles its kernels
    limit = status_bytes()["VmData"] + room * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        for _ in range(3):
            with store:
                cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    except (torch.OutOfMemoryError, MemoryError) as error:
        print(*error.__notes__, sep="\n")
    else:
        print("trained")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
