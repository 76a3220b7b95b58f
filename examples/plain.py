"""A loop of your own, on one device: python examples/plain.py"""

import torch
from common import DEVICE, STEPS, Transformer, batch, compare, start

from actstore import ActivationStore


def train(make_store):
    model = Transformer().to(DEVICE)
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
    compare(train, lambda model: ActivationStore(model, "@blocks : recompute"))
