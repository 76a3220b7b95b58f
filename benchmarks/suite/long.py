"""Long contexts: the peak and the time of a step whose logits are most of its memory.

Blocks are recomputed in each row but plain, and rows differ in how the last linear layer and its loss run. All rows of
a model take turns in one process; a peak is the high-water mark of bytes of all CPU tensors, weights and gradients
included. Ratios of times are medians over pairs of steps in the same turn; those of the processor's time, in all
threads, other programs of the machine disturb least.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actstore import ActivationStore, tile
from actstore.bench.environment import environment
from actstore.bench.trainer import fix_numerics
from actstore.bench.workloads.gpt import GPT
from actstore.bench.workloads.llama import Llama
from actstore.bench.workloads.workload import Workload
from actstore.devices import cpu_memory
from actstore.display import pictures as look
from benchmarks.markdown import table

MODELS: dict[str, Callable[[Workload], nn.Module]] = {"gpt": GPT, "llama": Llama}
TILES = 16
BASE, OURS = "recompute", "recompute, loss in tiles"
RATIOS = ("peak", "time", "processor")  # to BASE; the last is time of the processor, in all threads
Loss = Callable[[Tensor, Tensor], Tensor]


class Long(nn.Module):
    """A model of the benchmark with a vocabulary of its own, whose loss is apart."""

    def __init__(self, work: Workload, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(work.seed)
        self.trunk: Any = MODELS[work.model](work)
        self.trunk.characters = nn.Embedding(vocabulary, work.width)
        self.trunk.head = nn.Linear(work.width, vocabulary, bias=False)

    def forward(self, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        """Return what the last linear layer takes."""
        h = self.trunk.characters(x)
        if hasattr(self.trunk, "positions"):
            h = h + self.trunk.positions.weight
        for block in self.trunk.blocks:
            h = run(block, h)
        hidden: Tensor = self.trunk.norm(h)
        return hidden


def called(block: nn.Module, h: Tensor) -> Tensor:
    """Run a block as it is."""
    returned: Tensor = block(h)
    return returned


def checkpointed(block: nn.Module, h: Tensor) -> Tensor:
    """Run a block under PyTorch's checkpoint."""
    returned: Tensor = checkpoint(block, h, use_reentrant=False)
    return returned


def losses(head: nn.Linear) -> dict[str, Loss]:
    """Return the losses: each row's, by its name."""

    def whole(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(h).flatten(0, 1), y.flatten())

    found = {"plain": whole, BASE: whole, "torch checkpoint": whole, OURS: tile(whole, tiles=TILES)}
    if hasattr(F, "linear_cross_entropy"):  # from PyTorch 2.13 on
        options = torch.nn.LinearCrossEntropyOptions()

        def linear(h: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = F.linear_cross_entropy(h.flatten(0, 1), head.weight, y.flatten(), options=options)
            return loss

        found["recompute, linear_cross_entropy of PyTorch"] = linear
    if find_spec("trl") is not None:
        kernels: Any = import_module("trl.kernels.chunked_logprob")

        def chunked(h: Tensor, y: Tensor) -> Tensor:
            none = (head.weight, None, y.flatten(), 1.0, 8192, None, 1.0, ())
            loss: Tensor = -kernels.ChunkedLogProbFunction.apply(h.flatten(0, 1), *none)[0].mean()
            return loss

        found["recompute, chunked loss of TRL"] = chunked
    return found


def measure(works: Iterable[Workload], vocabulary: int, rounds: int, done: Callable[[dict[str, Any]], None]) -> None:
    """Measure all rows of the workloads, and pass the figures so far to `done` after each."""
    figures: dict[str, Any] = {
        "environment": environment(), "vocabulary": vocabulary, "tiles": TILES, "rounds": rounds, "runs": [],
    }  # fmt: skip
    if not cpu_memory.count():
        raise SystemExit("the bytes of CPU tensors cannot be counted here: install a C++ compiler")
    for work in works:
        fix_numerics(work)
        figures["runs"].append(_run(work, vocabulary, rounds))
        done(figures)


def _run(work: Workload, vocabulary: int, rounds: int) -> dict[str, Any]:
    model = Long(work, vocabulary)
    make = torch.Generator().manual_seed(work.seed)
    x, y = torch.randint(vocabulary, (2, work.batch, work.context), generator=make)
    every = losses(model.trunk.head)
    store = ActivationStore(model, "trunk.blocks.* : recompute")
    weights = sum(weight.nbytes for weight in model.parameters())

    def step(name: str) -> tuple[float, float, float, float]:
        """Return the milliseconds of a step, those of the processor, its peak and its loss; gradients stay."""
        model.zero_grad()
        gc.collect()  # so that nothing of what is beside goes while the step runs
        beside = (cpu_memory.memory_allocated() or 0) - weights  # all else in this process
        cpu_memory.reset_peak()
        begin, worked = perf_counter(), process_time()
        with store if name.startswith("recompute") else nullcontext():
            loss = every[name](model(x, checkpointed if name == "torch checkpoint" else called), y)
        loss.backward()
        took = (perf_counter() - begin) * 1e3, (process_time() - worked) * 1e3
        return *took, float((cpu_memory.max_memory_allocated() or 0) - beside), loss.item()

    rows: dict[str, dict[str, Any]] = {}
    wanted: list[Tensor] = []
    for name in every:
        _, _, peak, loss = step(name)
        found = [weight.grad for weight in model.parameters() if weight.grad is not None]
        wanted = wanted or [each.clone() for each in found]  # plain's
        away = sum(float((a - b).double().square().sum()) for a, b in zip(found, wanted, strict=True))
        norm = sum(float(each.double().square().sum()) for each in wanted)
        rows[name] = {"peak_bytes": peak, "loss": loss, "gradient_error": (away / norm) ** 0.5}
        rows[name]["loss_error"] = abs(loss / rows["plain"]["loss"] - 1)
        del found
    wanted.clear()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in every if name != "plain"}
    shuffle = random.Random(work.seed).shuffle
    for _ in range(rounds):
        names = list(times)
        shuffle(names)
        for name in names:
            times[name].append(step(name)[:2])
    store.close()
    for name, took in times.items():
        for i, kind in enumerate(("time", "processor")):
            rows[name][kind] = median(one[i] / two[i] for one, two in zip(took, times[BASE], strict=True))
        rows[name] |= {
            "ms": median(one for one, _ in took),
            "peak": rows[name]["peak_bytes"] / rows[BASE]["peak_bytes"],
        }
    return {"workload": work.to_dict(), "rows": [{"name": name, **row} for name, row in rows.items()]}


def draw(found: dict[str, Any]) -> Figure:
    """Draw the peak of each row, by model."""
    names = [row["name"] for row in found["runs"][0]["rows"]]
    figure = look.figure(1.6 + 0.5 * len(names))
    axes = figure.add_subplot()
    height = 0.8 / len(found["runs"])
    for number, run in enumerate(found["runs"]):
        places = [place + number * height for place in range(len(names))]
        axes.barh(places, [row["peak_bytes"] / 2**30 for row in run["rows"]], height=height, label=subject(run))
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names, fontsize=look.NORMAL)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of tensors at the peak of a step, weights and gradients included (shorter is better)")
    look.heading(axes, "Peak with a long context", f"vocabulary {found['vocabulary']:,}, 4 layers")
    look.clean(axes, "x")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=look.NORMAL)
    return figure


def subject(run: dict[str, Any]) -> str:
    """Return the name of a workload."""
    return f"{run['workload']['model']}, context {run['workload']['context']:,}"


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures in Markdown."""
    said = []
    for run in found["runs"]:
        rows = []
        for row in run["rows"]:
            ratios = [f"{row[name]:.2f}" if name in row else "" for name in RATIOS]
            errors = [f"{row[name]:.1e}" if row.get(name) else "" for name in ("loss_error", "gradient_error")]
            rows.append([row["name"], f"{row['peak_bytes'] / 2**20:,.0f}", *ratios, *errors])
        work = run["workload"]
        header = ["", "peak MiB", *(f"{name}, recompute = 1" for name in RATIOS), "error of the loss", "of gradients"]
        about = f"{work['layers']} layers, width {work['width']}, batch {work['batch']}"
        said += [f"{subject(run)}, vocabulary {found['vocabulary']:,}, {about}.", "", *table(header, rows), ""]
    return said[:-1]
