"""Accelerate with FSDP2 on two processes: a Llama trains under a store as without one."""

import os
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from actstore import ActivationStore
from tests.distributed.launch import check_jobs
from tests.distributed.training import local

STEPS = 20


def test_two_processes(tmp_path):
    if not (find_spec("accelerate") and find_spec("transformers")):
        pytest.skip("needs accelerate and transformers")
    check_jobs(2, [f"{__name__}:fsdp2"], tmp_path, 200)


def train(policy, order):
    """Train; returns losses, this rank's parts of the weights, and the last report."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    from tests.integrations.conftest import llama, tokens

    AcceleratorState._reset_state(True)
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.state.fsdp_plugin = plugin  # which on a CPU it would not look at
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    model = llama()
    store = ActivationStore(model, policy, min_bytes=0) if order == "before" else None
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert accelerator.is_fsdp2
    assert isinstance(next(model.parameters()), DTensor)
    if order == "after":
        store = ActivationStore(model, policy, min_bytes=0)
    rows = tokens(2 * 2 * STEPS)
    losses = []
    for step in range(STEPS):
        mine = torch.stack([rows[4 * step + 2 * dist.get_rank() + i]["input_ids"] for i in range(2)])
        with accelerator.accumulate(model):
            with store or nullcontext():
                loss = model(input_ids=mine, labels=mine).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    weights = [local(weight).detach().clone() for weight in model.parameters()]
    return losses, weights, store.report() if store else None


def fsdp2():
    """The job of a rank."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")
    losses, weights, _ = train(None, "")
    for order in ("before", "after"):
        found, stored, report = train("@blocks : recompute(raw @ disk); * : expack", order)
        assert found == losses, order
        assert all(map(torch.equal, stored, weights)), order
        assert report.held_bytes < 0.6 * report.saved_bytes, report
        assert report.live_bytes == 0
