"""Rows of the Llama blocks: PyTorch's own, those of other packages, and actstore's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch.autograd.graph import save_on_cpu

from actstore import ActivationStore, Auto, Window
from actstore.bench.peers import libraries
from benchmarks.gpu.llama_model import Job

Enter = Callable[[], AbstractContextManager[object]]
"""Makes the context of one forward."""


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes
    ----------
    kind : plain | peer | ours
    policy : text for ActivationStore; kind ours only
    share : budget of "auto", as a fraction of `keep`'s peak; 0 for a policy
    window : bound on bytes in transit; kind ours only, empty for the default
    package : package that must be installed
    needs_gpu : whether it raises, or moves nothing, without one
    exact : whether the gradients must be bit-identical to plain's
    """

    name: str
    kind: str
    policy: str = ""
    share: float = 0.0
    window: str = ""
    package: str = ""
    needs_gpu: bool = False
    exact: bool = True

    def missing(self, on_gpu: bool) -> str:
        """Return the reason why the row cannot run here; empty where it can."""
        if self.package and find_spec(self.package) is None:
            return NOT_CARRIED.get(self.package, f"{self.package} is not installed")
        return "it needs a GPU" if self.needs_gpu and not on_gpu else ""


NOT_CARRIED = {"torchtune": "its last release, 0.6.1, cannot be imported with the PyTorch of today"}
PLAIN = Row("plain", "plain")
KEEP = Row("keep", "ours", "keep")
ROWS = (
    KEEP,
    Row("derive", "ours", "derive"),
    Row("torch checkpoint", "peer"),
    Row("recompute", "ours", "recompute"),
    Row("selective checkpoint", "peer"),
    Row("attention kept", "ours", "@attention : keep; @blocks : recompute"),
    Row("sdpa kept", "ours", "*/@sdpa : keep; @blocks : recompute"),
    Row("int8", "ours", "int8", exact=False),
    Row("derive(int8)", "ours", "derive(int8)", exact=False),
    Row("recompute(int8)", "ours", "recompute(int8)", exact=False),
    Row("auto 50 %", "ours", "auto", share=0.5),
    Row("auto 25 %", "ours", "auto", share=0.25),
    Row("save_on_cpu", "peer"),
    Row("raw @ host", "ours", "raw @ host"),
    Row("raw @ host, window 64 MiB", "ours", "raw @ host", window="64MiB"),
    Row("int8 @ host", "ours", "int8 @ host", exact=False),
    Row("derive(int8 @ host)", "ours", "derive(int8 @ host)", exact=False),
    Row("Transformers offload", "peer"),
    Row("recompute(raw @ host)", "ours", "recompute(raw @ host)"),
    Row("TRL offload", "peer", package="trl", needs_gpu=True),
    Row("torch_remat, attention kept", "peer", package="torch_remat"),
    Row("DeepSpeed cpu_checkpointing", "peer", package="deepspeed", needs_gpu=True),
    Row("bitsandbytes 8-bit", "peer", package="bitsandbytes", exact=False),
    Row("TRL offload, checkpoint", "peer", package="trl", needs_gpu=True),
    Row("derive(raw @ host)", "ours", "derive(raw @ host)"),
    Row("int4 @ host", "ours", "int4 @ host", exact=False),
    Row("torchtune offload", "peer", package="torchtune", needs_gpu=True),
)
TILED = "loss : recompute(tiles=16)"
TILED_ROWS = (  # the loss of a large vocabulary in slices of its tokens
    Row("recompute, loss in tiles", "ours", f"{TILED}; @blocks : recompute", exact=False),
    Row("recompute(raw @ host), loss in tiles", "ours", f"{TILED}; @blocks : recompute(raw @ host)", exact=False),
    Row("torch checkpoint, Liger's loss", "peer", package="liger_kernel", needs_gpu=True, exact=False),
)
_BY_NAME = {row.name: row for row in (*ROWS, *TILED_ROWS)}


def named(*names: str) -> tuple[Row, ...]:
    """Return the rows of these names, in their order."""
    return tuple(_BY_NAME[name] for name in names)


LORA_ROWS = named(
    "keep", "torch checkpoint", "recompute", "attention kept", "derive", "int8", "derive(int8)",
    "recompute(raw @ host)", "Transformers offload", "TRL offload, checkpoint", "TRL offload", "raw @ host",
    "int8 @ host", "derive(int8 @ host)", "recompute, loss in tiles", "torch checkpoint, Liger's loss",
)  # fmt: skip


class Liger(libraries.Checkpoint):
    """PyTorch's checkpoint around each block, and Liger's kernel for the last layer and the loss."""

    def __init__(self, job: Any) -> None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        super().__init__(job)
        loss, fused = job.model.loss, LigerFusedLinearCrossEntropyLoss()
        loss.forward = lambda hidden, codes: fused(loss.head.weight, loss.norm(hidden).flatten(0, 1), codes.flatten())


BLOCKS: dict[str, type[libraries.Checkpoint]] = {
    "torch checkpoint": libraries.Checkpoint,
    "selective checkpoint": libraries.Selective,
    "Transformers offload": libraries.Offloaded,
    "torch checkpoint, Liger's loss": Liger,
    "torch_remat, attention kept": libraries.Remat,
    "DeepSpeed cpu_checkpointing": libraries.DeepSpeedCpu,
}
HOOKS: dict[str, type[libraries.Around]] = {
    "TRL offload": libraries.Trl,
    "torchtune offload": libraries.Torchtune,
    "bitsandbytes 8-bit": libraries.BitsAndBytes,
}


@contextmanager
def entered(row: Row, job: Job, budget: int = 0, **options: Any) -> Iterator[tuple[Enter, ActivationStore | None]]:
    """Yield the context to enter around each forward, and the store of an actstore row.

    Parameters
    ----------
    budget : bytes, of a row with a share
    options : of ActivationStore
    """
    if row.kind == "ours":
        if job.place.small:
            options["min_bytes"] = 0
        if row.window:
            options["tiers"] = [Window(row.window)]
        store = ActivationStore(job.model, Auto(budget) if row.share else row.policy, **options)
        try:
            yield lambda: store, store
        finally:
            store.close()
    elif row.name in BLOCKS:
        yield _wrapped(BLOCKS[row.name], job), None
    elif row.name == "save_on_cpu":
        yield partial(save_on_cpu, pin_memory=job.place.on_gpu), None
    elif row.name == "TRL offload, checkpoint":
        instead, offload = _wrapped(libraries.Checkpoint, job), HOOKS["TRL offload"](job).context  # type: ignore[arg-type]
        yield partial(_both, instead, offload), None
    elif row.name in HOOKS:
        yield HOOKS[row.name](job).context, None  # type: ignore[arg-type]
    else:
        yield nullcontext, None


@contextmanager
def _both(outer: Enter, inner: Enter) -> Iterator[None]:
    with outer(), inner():
        yield


def _wrapped(peer: type[libraries.Checkpoint], job: Job) -> Enter:
    """Let a peer wrap the blocks of a second model with the same weights; return the context that puts it in place."""
    twin = copy(job)
    twin.model = deepcopy(job.model, {id(weight): weight for weight in job.model.parameters()})
    names = {module: name for name, module in job.model.named_modules()}
    twin.blocks = [twin.model.get_submodule(names[block]) for block in job.blocks]
    peer(twin)  # type: ignore[arg-type]

    @contextmanager
    def instead() -> Iterator[None]:
        own, job.model = job.model, twin.model
        try:
            yield
        finally:
            job.model = own

    return instead
