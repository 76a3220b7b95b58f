"""Host time of small payloads, and how much of the link they reach, beside the offloads of PyTorch and of TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu

from actstore import ActivationStore
from actstore.bench.peers import libraries
from benchmarks.gpu.chain import Chain, synchronize
from benchmarks.gpu.place import MIB, Place

SIZES = {1 * MIB: 256, 4 * MIB: 128, 16 * MIB: 64}  # of payloads, and how many of them a step saves
SMALL_SIZES = {MIB // 4: 4}
WIDTH, SMALL_WIDTH = 256, 64  # of a layer: its products take far less time than its copies
WARMUP, REPEATS = 12, 7  # steps; later ones have untimed copies

Found = dict[str, Any]
Enter = Callable[[], AbstractContextManager[Any]]


def rows(place: Place, policy: str) -> list[Found]:
    """Return a row for each size and each way to offload, with the host's time beyond that of a step without copies."""
    found: list[Found] = []
    for nbytes, count in place.sized(SIZES, SMALL_SIZES).items():
        width = place.sized(WIDTH, SMALL_WIDTH)
        chain = Chain(place.device, count, nbytes // (width * (2 if place.on_gpu else 4)), width)
        plain = _measured(chain, nullcontext)
        for name, way in _ways(place, policy).items():
            row: Found = {"name": name, "nbytes": nbytes, "count": count}
            if name == "TRL offload" and (find_spec("trl") is None or not place.on_gpu):
                found.append(row | {"left_out": "it needs a GPU, and trl"})
                continue
            try:
                with way() as enter:
                    taken = _measured(chain, enter)
            except Exception as error:  # the remaining rows run
                found.append(row | {"failed": f"{type(error).__name__}: {error}".splitlines()[0]})
                continue
            for half in ("out", "back"):
                row[f"{half}_us"] = (taken[f"{half}_us"] - plain[f"{half}_us"]) / count
            found.append(row | {"step_ms": taken["step_ms"], "gbps": 2 * nbytes * count / taken["step_ms"] / 1e6})
    return found


def _ways(place: Place, policy: str) -> dict[str, Callable[[], AbstractContextManager[Enter]]]:
    return {
        policy: partial(_stored, policy),
        "save_on_cpu": lambda: nullcontext(partial(save_on_cpu, pin_memory=place.on_gpu)),
        "TRL offload": lambda: nullcontext(libraries.Trl(SimpleNamespace(model=nn.Identity())).context),  # type: ignore[arg-type]
    }


@contextmanager
def _stored(policy: str) -> Iterator[Enter]:
    store = ActivationStore(policy=policy, min_bytes=0)
    try:
        yield lambda: store
    finally:
        store.close()


def _measured(chain: Chain, enter: Enter) -> Found:
    """Return medians of a step: the host's time for forward and for backward, and the time until the device is idle."""
    samples = [_step(chain, enter) for _ in range(WARMUP + REPEATS)][WARMUP:]
    return {name: median(sample[name] for sample in samples) for name in samples[0]}


def _step(chain: Chain, enter: Enter) -> Found:
    synchronize(chain.device)
    begin = perf_counter()
    loss = chain.forward(enter())
    turn = perf_counter()
    loss.backward()
    end = perf_counter()
    del loss
    synchronize(chain.device)
    return {"out_us": (turn - begin) * 1e6, "back_us": (end - turn) * 1e6, "step_ms": (perf_counter() - begin) * 1e3}
