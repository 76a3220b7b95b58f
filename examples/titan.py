"""A training file like torchtitan's: torchrun --nproc-per-node 4 examples/titan.py

A store takes the place of apply_ac. Training stops in the middle, and a new model and store go on from its checkpoint.
"""

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import DEVICE, STEPS, batch, compare, start
from llama import Llama, apply_fsdp, apply_tp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from actstore import ActivationStore

POLICIES = {  # for the modes of apply_ac
    "full": "@blocks : recompute",
    "every second layer": "@blocks[::2] : recompute",
    "selective": "@blocks/@sdpa : keep; @blocks/@collective : keep; @blocks : recompute",
}


@dataclass
class Config:
    steps: int = STEPS
    tensor: int = 2  # ranks that share a layer
    mode: str = "selective"
    folder: Path | None = None  # of checkpoints
    save_every_steps: int = STEPS // 2


class Training:
    """Model, optimizer, and the steps done: a `Stateful` of `torch.distributed.checkpoint`."""

    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.steps = 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state):
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.steps = state["steps"]


def train(config, make_store):
    """Train, from the last checkpoint where there is one."""
    shape = dist.get_world_size() // config.tensor, config.tensor
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("data", "tensor"))
    model = Llama().to(DEVICE)
    apply_tp(model, mesh["tensor"])
    store = make_store(model)  # in place of apply_ac
    apply_fsdp(model, mesh["data"])
    training = Training(model)
    parts = {"training": training, f"store_{dist.get_rank()}": store}  # each rank's store has its own state
    saved = sorted(config.folder.glob("step-*")) if config.folder else []
    if saved:
        dcp.load(parts, checkpoint_id=saved[-1])
    losses = []
    while training.steps < config.steps:
        x, y = batch(training.steps, mesh.get_local_rank("data"))
        with store:
            loss = model(x, y)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.steps += 1
        losses.append(loss.detach())
        if config.folder and training.steps % config.save_every_steps == 0:
            dcp.save(parts, checkpoint_id=config.folder / f"step-{training.steps:06}")
    return losses, list(model.parameters()), store


def train_and_resume(config, make_store):
    """Train until the first checkpoint, and go on from it with a new model and a new store."""
    first, *_ = train(replace(config, steps=config.save_every_steps), make_store)
    rest, weights, store = train(config, make_store)
    return first + rest, weights, store


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=POLICIES, default=Config.mode)
    mode = parser.parse_args().mode
    start()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # all ranks use that of rank 0
        config = Config(mode=mode, folder=Path(folder[0]))
        compare(
            lambda make_store: train_and_resume(config, make_store),
            lambda model: ActivationStore(model, POLICIES[mode]),
            plain=lambda make_store: train(replace(config, folder=None), make_store),
        )
