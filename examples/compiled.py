"""torch.compile: compile the blocks, not the model, so that each keeps a name: python examples/compiled.py"""

import torch
from common import DEVICE, STEPS, Transformer, batch, compare, start

from actstore import ActivationStore, Window


def train(make_store):
    model = Transformer().to(DEVICE)
    for block in model.blocks:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = make_store(model)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        with store:
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters()), store


if __name__ == "__main__":
    start()
    compare(train, lambda model: ActivationStore(model, "@blocks : raw @ disk", tiers=[Window("2MiB")]))
