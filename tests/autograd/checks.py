"""What a store promises to autograd, as functions that raise AssertionError where it is broken."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch._dynamo  # on its first use it would be imported, and keep frames for the collector
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from actstore import ActivationStore
from actstore.errors import PayloadError, TransferError
from actstore.tiers import DeviceTier
from actstore.tiers.base import Limited
from actstore.tiers.disk import DiskTier
from actstore.transfer import Engine


class Step(NamedTuple):
    """A loss and the gradients by name."""

    loss: Tensor
    grads: dict[str, Tensor | None]


def same_bits(found: Tensor | None, wanted: Tensor | None) -> bool:
    """Equal bit for bit: NaN and the sign of zero count, strides do not."""
    if found is None or wanted is None:
        return found is wanted
    if found.layout != torch.strided or wanted.layout != torch.strided:
        return found.layout == wanted.layout and same_bits(found.to_dense(), wanted.to_dense())
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return torch.equal(_bytes(found), _bytes(wanted))


def _bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def check_same(found: Any, wanted: Any) -> None:
    """Two results of the same shape, a tensor or containers of tensors, equal bit for bit."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name in wanted:
            assert same_bits(found[name], wanted[name]), f"{name} differs"
    elif isinstance(wanted, Step):
        assert same_bits(found.loss, wanted.loss), "the loss differs"
        check_same(found.grads, wanted.grads)
    elif isinstance(wanted, tuple | list):
        assert len(found) == len(wanted)
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert same_bits(a, b), f"number {i} differs"
    else:
        assert same_bits(found, wanted)


def train_step(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    store: ActivationStore | None = None,
    *,
    seed: int = 1,
    inside: bool = False,
    autocast: bool = False,
) -> Step:
    """Forward and backward of one batch, backward `inside` the context of the store or after it."""
    model.zero_grad()
    torch.manual_seed(seed)
    with store or nullcontext():
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(*batch).float().square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return Step(loss.detach(), {name: p.grad for name, p in model.named_parameters()})


def pools(store: ActivationStore) -> Iterator[tuple[str, int]]:
    """(tier, bytes in use) of every open tier."""
    store._store.ledger.settle()
    for place in store._store._places.values():
        settle(place.engine)
        yield "buffers", place.engine._traffic.buffers.used_nbytes
        for name, tier in place._open.items():
            if isinstance(tier, Limited):
                with tier._lock:
                    tier._back.drain_locked()
                yield f"{name} budget", tier._used_nbytes
                tier = tier.tier
            if isinstance(tier, DiskTier):
                yield name, tier.used_nbytes
            elif isinstance(tier, DeviceTier) and tier.pool is not None:
                yield name, tier.pool.used_nbytes


def settle(engine: Engine) -> None:
    """Wait until host threads have finished what they do for payloads that are gone, whether that failed or not."""
    engine.poll()
    for ticket, *_ in list(engine._traffic.leaving):
        with suppress(TransferError, PayloadError):  # of a fetch that no backward asked for
            ticket.result()
    engine.poll()


def check_drained(store: ActivationStore) -> None:
    """Nothing is held any more: the graphs are gone, and so are the bytes and the slots."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # what copies still read is held until they end
    used = dict(pools(store))
    assert used == dict.fromkeys(used, 0), used
    report = store.report()
    assert report.live_bytes == 0
    assert [site.live_bytes for site in report.sites] == [0] * len(report.sites)


@contextmanager
def gc_off() -> Iterator[None]:
    """Only reference counts free anything inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Census:
    """Hooks of their own that count what plain autograd saves: each storage once, parameters and buffers excluded."""

    def __init__(self, model: nn.Module | None = None) -> None:
        tensors = [*model.parameters(), *model.buffers()] if model is not None else []
        self._excluded = {t.untyped_storage()._cdata for t in tensors}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._storages.values())

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._excluded:
            self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return tensor.detach()

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, lambda tensor: tensor)


def verdict(run: Callable[[], Any]) -> tuple[str, Any]:
    """("error", its text) when autograd refuses what `run` does, ("ok", the gradients) otherwise."""
    try:
        return "ok", run()
    except RuntimeError as error:
        return "error", str(error)
