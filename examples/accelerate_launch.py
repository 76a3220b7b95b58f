"""Accelerate, by its own launcher or another one: torchrun --nproc-per-node 2 examples/accelerate_launch.py

By `accelerate launch --cpu examples/accelerate_launch.py` it is one process: several on CPUs need MPI there.
"""

import torch
from accelerate import Accelerator
from common import DEVICE, STEPS, Transformer, batch, compare, start

from actstore import ActivationStore


def train(make_store):
    accelerator = Accelerator(cpu=DEVICE.type == "cpu", gradient_accumulation_steps=2)
    model = Transformer()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    store = make_store(model)  # before prepare or after it: names are those of the Transformer
    losses = []
    for step in range(STEPS):
        x, y = batch(step, accelerator.process_index)
        with accelerator.accumulate(model):
            with store:
                loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters()), store


if __name__ == "__main__":
    start()
    compare(train, lambda model: ActivationStore(model, "@blocks : recompute(raw @ disk); * : expack"))
