"""Budgets that the processes of a machine share: torchrun --nproc-per-node 2 examples/budgets.py

What does not fit into the host's share goes to disk, and what does not fit there either is kept.
"""

from common import DEVICE, compare, start
from ddp import train

from actstore import ActivationStore


def make_store(model):
    budgets = {"host_budget": "160GiB/node", "disk_budget": "1TiB/node"}
    if DEVICE.type == "cpu":  # a small model, and a tier of host memory that saves nothing
        budgets = {"host_budget": "8MiB/node", "disk_budget": "16MiB/node", "window": "1MiB"}
    return ActivationStore(model, "raw @ host > disk", **budgets)


if __name__ == "__main__":
    start()
    compare(train, make_store)
