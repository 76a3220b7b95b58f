"""A small training run that stops after some steps and goes on, in this process or in a fresh one."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from actstore import ActivationStore
from actstore.accuracy.bits import chooser

CANDIDATES = ("keep", "int8(affine, round=dither)", "int4(group=64, round=dither)")  # others would be compiled
POLICIES = {
    "stochastic": "int8(round=stochastic)",
    "dither": "int8(affine, round=dither)",
    "int2": "int2(round=dither)",
    "recompute": "blocks.* : recompute; * : int8(round=stochastic) @ disk",
    "bits": "bits(max_noise=0.05)",
    "auto": "auto(200KiB)",
}
STEPS, STOP = 40, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Run:
    """Training of one model, whose steps depend on their numbers alone."""

    def __init__(self, policy: object, **options: object) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.store = ActivationStore(self.model, policy, **{"min_bytes": 0, **options})
        self.steps = 0

    def to(self, steps: int) -> Run:
        """Train until so many steps have run."""
        for number in range(self.steps, steps):
            generator = torch.Generator().manual_seed(number)
            with self.store:
                loss = self.model(torch.randn(64, 64, generator=generator)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps = steps
        return self

    def checkpoint(self) -> dict[str, object]:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "store": self.store.state_dict(),
            "steps": self.steps,
        }
        return deepcopy(state)

    def resume(self, checkpoint: dict[str, object]) -> Run:
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.store.load_state_dict(checkpoint["store"])
        self.steps = checkpoint["steps"]
        return self


def go_on(folder: Path) -> None:
    """Train on from each checkpoint in a folder, and write the weights beside it."""
    torch.set_num_threads(1)
    chooser.CANDIDATES = CANDIDATES
    for name, policy in POLICIES.items():
        run = Run(policy).resume(torch.load(folder / f"{name}.checkpoint", weights_only=True)).to(STEPS)
        torch.save(run.model.state_dict(), folder / f"{name}.weights")
        run.store.close()


if __name__ == "__main__":
    go_on(Path(sys.argv[1]))
