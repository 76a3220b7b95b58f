"""DeepSpeed, ZeRO 1 to 3: torchrun --nproc-per-node 2 examples/deepspeed_zero.py --stage 3

Without a GPU set DS_ACCELERATOR=cpu; the first start then compiles an extension of DeepSpeed, for a minute or two.
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, DEVICE, STEPS, Transformer, batch, compare, start

from actstore import ActivationStore


def train(make_store):
    model = Transformer().to(DEVICE)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config
    )
    store = make_store(engine)  # names are those of the Transformer
    losses = []
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        with store:
            loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    weights = [getattr(weight, "ds_tensor", weight) for weight in model.parameters()]  # this rank's parts
    engine.destroy()
    return losses, weights, store


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    stage = parser.parse_args().stage
    start()
    compare(train, lambda engine: ActivationStore(engine, "@blocks : recompute"))
