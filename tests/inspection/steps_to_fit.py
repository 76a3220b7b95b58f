"""Steps for the tests of fits, and the peaks that the allocator counts for them."""

import gc
from contextlib import closing, nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore
from actstore.bench import workloads
from actstore.devices import cpu_memory

SIZES = {
    "gpt": {"layers": 2, "batch": 8},
    "llama": {"layers": 2, "batch": 8},
    "vit": {"layers": 2, "batch": 32},
    "resnet": {"batch": 16},
    "lora": {"layers": 2, "batch": 8},
}


def maker(name, **sizes):
    def make_step(batch=SIZES[name]["batch"]):
        job = workloads.make(workloads.sized(name, **{**SIZES[name], **sizes, "batch": batch}, threads=1))
        data = job.batch(0)
        return job.model, lambda: job.loss(*data)

    return make_step


def measured(make_step, policy="plain", steps=3, *, is_late=False, **sizes):
    """Return the allocator's peak in the last step, above the bytes before the model was made.

    is_late : whether the store fetches as far ahead as it does after many late copies
    """
    gc.collect()
    before = cpu_memory.memory_allocated()
    model, step = make_step(**sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    with nullcontext() if policy == "plain" else closing(ActivationStore(model, policy)) as store:
        for _ in range(steps):
            gc.collect()
            cpu_memory.reset_peak()
            if is_late:
                store._store.place(torch.device("cpu")).engine.widen()
            with store or nullcontext():
                loss = step()
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        return cpu_memory.max_memory_allocated() - before


class Mlp(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def make_mlp(batch=2048, context=1, device="meta"):
    with torch.device(device):
        model, x = Mlp(), torch.ones(batch, context, 512)
    return model, lambda: model(x).square().mean()
