"""Goes on after a process was killed: torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py FOLDER

Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: gloo then finds nothing of processes that have ended.
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from common import DEVICE, STEPS, Transformer, batch, log, start
from torch.nn.parallel import DistributedDataParallel

from actstore import ActivationStore

SAVE_EVERY_STEPS = 4


def save(folder, step, **parts):
    """Save a checkpoint of all ranks. It counts once it is whole."""
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step, **states}, folder / f"{step}-{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "next").write_text(str(step))
        (folder / "next").replace(folder / "last")


def load(folder, **parts):
    """Load the last whole checkpoint, and return its step; 0 without one. A new rank loads that of rank 0."""
    if not (folder / "last").exists():
        return 0
    step = (folder / "last").read_text()
    found = [path for rank in (dist.get_rank(), 0) if (path := folder / f"{step}-{rank}.pt").exists()]
    checkpoint = torch.load(found[0], map_location=DEVICE, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    return checkpoint["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", type=int, nargs=2, metavar=("RANK", "STEP"), default=(-1, -1))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    start()
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer().to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = ActivationStore(model, "@blocks : int8(round=stochastic)", min_bytes=0)
    parts = {"model": model, "optimizer": optimizer, "store": store}
    first = load(options.folder, **parts)
    for step in range(first, STEPS):
        x, y = batch(step, dist.get_rank())
        with store:
            loss = (model(x) - y).square().mean()
        loss.backward()
        if [dist.get_rank(), step] == list(options.kill) and restarts == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY_STEPS == 0:
            save(options.folder, step + 1, **parts)
    if dist.get_rank() == 0:
        weights = b"".join(weight.detach().cpu().numpy().tobytes() for weight in model.parameters())
        log.info("steps %d to %d, restarts %s, weights %s", first, STEPS, restarts, hashlib.sha256(weights).hexdigest())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
