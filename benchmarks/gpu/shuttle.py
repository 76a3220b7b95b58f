"""Shuttle of payloads between a device and a tier, through the transfer engine."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch

from actstore.base.ledger import Ledger
from actstore.base.spec import Site
from actstore.devices import Device
from actstore.tiers import Tier
from actstore.trace import Trace
from actstore.transfer import Berth, Engine, TransferRun
from benchmarks.gpu import chain as gpu_chain

SAMPLES = 3

Found = dict[str, Any]


class Shuttle:
    """Payloads of one size between a device and a tier, through an engine."""

    def __init__(self, device: Device, tier: Tier, nbytes: int, count: int, window_nbytes: int | None = None) -> None:
        self._device, self._tier, self._nbytes, self._count = device, tier, nbytes, count
        self._trace = Trace()
        self._ledger = Ledger()
        self._engine = Engine(device, self._ledger, window_nbytes, self._trace)
        self.source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device.torch_device)
        self.found = torch.zeros_like(self.source)
        self._away: list[Berth] = []
        self._step = 0

    def run(self, *, out: bool, back: bool) -> Found:
        """Move all payloads one way or both ways. `host_us` is the host's time for one turn of the loop."""
        self._step += 1
        self._account = self._ledger.account(
            Site("payloads", self._step)
        )  # a new site: the engine keeps no payload as the first of backward
        self._engine.start(self._step)
        run, new = self._engine.begin(), []
        begin = perf_counter()
        for _ in range(self._count):
            if out:
                new.append(self._put(run))
            if back:
                self._get(self._away.pop())
        self._engine.flush(run)
        host_us = (perf_counter() - begin) / self._count * 1e6
        self._finish(new)
        self._away += new
        moved = gpu_chain.rate(self._trace.events(self._step), "offload", "fetch")
        assert moved is not None
        return {**moved, "host_us": host_us}

    def close(self) -> None:
        """Free all payloads and close the engine."""
        for berth in self._away:
            self._engine.drop(berth)
        self._engine.close()

    def _put(self, run: TransferRun) -> Berth:
        berth = self._engine.board(run, self._tier, self._nbytes, self._account)
        assert berth is not None
        berth.memory.copy_(self.source)
        self._engine.depart(berth)
        return berth

    def _get(self, berth: Berth) -> None:
        self.found.copy_(self._engine.arrive(berth))
        self._engine.leave(berth)
        self._engine.drop(berth)

    def _finish(self, new: list[Berth]) -> None:
        """Make the host wait, and let the engine write the trace."""
        for berth in new:
            motion = berth.parcel.motion
            assert motion is not None
            motion.result()
        self._device.record(self._device.current()).result()
        self._engine.poll()


def shuttle_row(
    device: Device, tier: Tier, nbytes: int, count: int, window_nbytes: int | None = None, samples: int = SAMPLES
) -> Found:
    """Measure one size: the rates each way alone, and of both at once, as medians."""
    shuttle = Shuttle(device, tier, nbytes, count, window_nbytes)
    found: dict[str, list[Found]] = {"out": [], "back": [], "both": []}
    try:
        for sample in range(samples + 1):  # the first sample pins and allocates
            moved = {
                "out": shuttle.run(out=True, back=False),
                "both": shuttle.run(out=True, back=True),
                "back": shuttle.run(out=False, back=True),
            }
            for name, figures in moved.items() if sample else ():
                found[name].append(figures)
        correct = torch.equal(shuttle.source, shuttle.found)
    finally:
        shuttle.close()
    row: Found = {"nbytes": nbytes, "count": count, "window_nbytes": window_nbytes, "correct": correct}
    for name, taken in found.items():
        row[name] = {key: median(figures[key] for figures in taken) for key in taken[0]}
    return row
