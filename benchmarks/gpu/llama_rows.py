"""Rows of the Llama blocks: PyTorch's own, those of other packages, and actstore's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from actstore import ActivationStore, Auto
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
    package : package that must be installed
    exact : whether the gradients must be bit-identical to plain's
    """

    name: str
    kind: str
    policy: str = ""
    share: float = 0.0
    package: str = ""
    exact: bool = True

    def missing(self, on_gpu: bool) -> str:
        """Return the reason why the row cannot run here; empty where it can."""
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return "it needs a GPU" if self.package in OFFLOADS and not on_gpu else ""


PLAIN = Row("plain", "plain")
KEEP = Row("keep", "ours", "keep")
ROWS = (
    KEEP,
    Row("derive", "ours", "derive"),
    Row("derive(raw @ host)", "ours", "derive(raw @ host)"),
    Row("recompute", "ours", "recompute"),
    Row("attention kept", "ours", "@attention : keep; @blocks : recompute"),
    Row("raw @ host", "ours", "raw @ host"),
    Row("int8", "ours", "int8", exact=False),
    Row("int8 @ host", "ours", "int8 @ host", exact=False),
    Row("torch checkpoint", "peer"),
    Row("auto 50 %", "ours", "auto", share=0.5),
    Row("auto 25 %", "ours", "auto", share=0.25),
    Row("recompute(raw @ host)", "ours", "recompute(raw @ host)"),
    Row("int4 @ host", "ours", "int4 @ host", exact=False),
    Row("save_on_cpu", "peer"),
    Row("TRL offload", "peer", package="trl"),
    Row("torchtune offload", "peer", package="torchtune"),
)
OFFLOADS = {"trl": "trl.models.activation_offloading", "torchtune": "torchtune.training"}


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
        store = ActivationStore(job.model, Auto(budget) if row.share else row.policy, **options)
        try:
            yield lambda: store, store
        finally:
            store.close()
    elif row.name == "torch checkpoint":
        yield partial(_checkpointed, job), None
    elif row.name == "save_on_cpu":
        yield partial(save_on_cpu, pin_memory=job.place.on_gpu), None
    elif row.package:
        offload = import_module(OFFLOADS[row.package]).OffloadActivations()
        yield lambda: offload, None
    else:
        yield nullcontext, None


@contextmanager
def _checkpointed(job: Job) -> Iterator[None]:
    """Checkpoint each block in one forward; the plain steps between run as ever."""
    for block in job.model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in job.model.blocks:
            del block.forward
