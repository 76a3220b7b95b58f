"""Budgets that the processes of a machine share: torchrun --nproc-per-node 2 examples/budgets.py

What does not fit into the host's share goes to disk, and what does not fit there either is kept.
"""

from common import DEVICE, compare, start
from ddp import train

from actstore import ActivationStore, Disk, Host, Window


def make_store(model):
    tiers = [Host("160GiB/node"), Disk(budget="1TiB/node")]
    if DEVICE.type == "cpu":  # a small model, and a tier of host memory that saves nothing
        tiers = [Host("8MiB/node"), Disk(budget="16MiB/node"), Window("1MiB")]
    return ActivationStore(model, "raw @ host > disk", tiers=tiers)


if __name__ == "__main__":
    start()
    compare(train, make_store)
