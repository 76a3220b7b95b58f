"""DeepSpeed's ZeRO on two processes is, under a store, what it is without one; what ZeRO-3 gathers, a store lets go."""

import os
import sys
import warnings
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from actstore import ActivationStore
from actstore.base.storage import expired, free_weak, hold_weak
from tests.distributed.launch import check_jobs

STEPS, WIDTH = 20, 32


def test_on_two_processes(tmp_path):
    if find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    check_jobs(2, [f"{__name__}:{job}" for job in ("begin", "zero1", "zero2", "zero3", "checkpoints")], tmp_path, 280)


# -- what ranks run ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Has parameters of its own beside those of the modules in it; of one, autograd saves a view."""

    def __init__(self, view):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale, self.mix = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.eye(WIDTH)) if view else None

    def forward(self, x):
        y = self.norm(x if self.mix is None else x @ self.mix.t())
        return x + self.scale * self.down(F.dropout(F.gelu(self.up(y)), 0.1))


class Model(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        self.blocks = nn.ModuleList(Block(view=checkpoint is None) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.checkpoint = checkpoint

    def forward(self, x):
        for block in self.blocks:
            x = self.checkpoint(block, x) if self.checkpoint else block(x)
        return self.head(x)


def train(stage, policy=None, checkpoint=None, steps=STEPS, **options):
    """Train; returns losses, this rank's parts of the weights, the last report, and gathered bytes after forward."""
    deepspeed = sys.modules["deepspeed"]
    torch.manual_seed(0)
    model = Model(checkpoint)
    gathered = []
    at_once = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, **at_once},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def note(module, _):
        storage = module.weight.untyped_storage()
        assert storage.nbytes() >= 4 * WIDTH * WIDTH, "not gathered"
        gathered.append(hold_weak(storage))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(note)
    store = ActivationStore(engine, policy, min_bytes=0, **options) if policy else None
    losses, alive = [], []
    for step in range(steps):
        torch.manual_seed(2 * step + dist.get_rank())
        x = torch.randn(4, 16, WIDTH, requires_grad=True)
        with store or nullcontext():
            loss = engine(x).square().mean()
        alive.append(sum(not expired(key) for key in gathered))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        while gathered:
            free_weak(gathered.pop())
    weights = [getattr(weight, "ds_tensor", weight).detach().clone() for weight in model.parameters()]
    report = store.report() if store else None
    engine.destroy()
    return losses, weights, report, alive


def begin():
    """Import DeepSpeed for a CPU, without the extension that it would compile."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()))
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()))
    import deepspeed

    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)  # in DeepSpeed 0.19
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")


def check(stage, policies, checkpoint=None, steps=STEPS):
    """The reports of `policies`, under which losses and weights are plain's and no more weights stay gathered."""
    losses, weights, _, alive = train(stage, None, checkpoint, steps)
    assert losses[-1] < losses[0]
    reports = {}
    for policy in policies:
        found, stored, report, still = train(stage, policy, checkpoint, steps)
        assert found == losses, policy
        assert all(map(torch.equal, stored, weights)), policy
        assert still == alive, policy
        assert report.live_bytes == 0, policy
        reports[policy] = report
    return reports, alive


def zero1():
    reports, _ = check(1, ["raw @ disk", "recompute"])
    assert reports["recompute"].held_bytes < 0.3 * reports["recompute"].saved_bytes


def zero2():
    reports, _ = check(2, ["recompute"])
    assert reports["recompute"].held_bytes < 0.3 * reports["recompute"].saved_bytes


def zero3():
    _, _, plain, _ = train(1, "keep", steps=1)
    reports, alive = check(3, ["keep", "raw @ host", "recompute(raw @ disk)"])
    assert set(alive) == {0}, alive  # no weight outlives its module's forward
    assert {report.saved_bytes for report in reports.values()} == {plain.saved_bytes}  # no weight, all activations
    assert reports["recompute(raw @ disk)"].held_bytes < 0.3 * plain.held_bytes


def checkpoints():
    """DeepSpeed's own activation checkpointing, in both forms. Under ZeRO-3 it cannot have views of parameters."""
    deepspeed = sys.modules["deepspeed"]
    deepspeed.checkpointing.configure(None)
    warnings.filterwarnings("ignore", ".*Switch the model's own checkpoints off", RuntimeWarning)  # see test_checkpoint
    for checkpoint in (deepspeed.checkpointing.checkpoint, deepspeed.checkpointing.non_reentrant_checkpoint):
        for stage in (1, 3):
            check(stage, ["raw @ disk", "recompute"], checkpoint, steps=3)
