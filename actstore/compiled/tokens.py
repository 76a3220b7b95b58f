"""Tokens: what a graph saves of a payload that waits in a tier.

A token is a tensor without elements, of the payload's dtype and of its shape after dimensions of size 0. The memory
under it belongs to a Python object that owns the payload. So the payload lives as long as any alias of the token, which
autograd and the graph free as they free any saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from threading import local
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from actstore.autograd.tracker import Tracker
from actstore.base.ledger import Account, Ledger
from actstore.base.note import Note
from actstore.base.reaper import Finalizer
from actstore.base.spec import Site, describe
from actstore.errors import ActstoreError, StateError
from actstore.policy import Decision, Offload
from actstore.policy.grammar import parse_decision
from actstore.store.payload import Payload
from actstore.transfer import Berth

_MEMORY_NBYTES = 16  # an element of the widest dtype
_ZEROS = 5  # dimensions of a token in front of its shape: of four in all Inductor would copy one, as an image
_thread = local()  # .puts: of the region that runs now


class TieredPayload(Payload):
    """A payload of a graph in the store.

    Attributes
    ----------
    readers : number of reads in the backward graph
    """

    __slots__ = ("readers",)

    def __init__(self, account: Account, readers: int) -> None:
        super().__init__(account)
        self.readers = readers

    def read(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the bytes as a tensor of its own, to which the graph may write."""
        try:
            lent = self.store.borrow(self, dtype, for_good=True) if self.readers == 1 else None
            if lent is not None:
                return lent.view(shape)
            tensor = torch.empty(shape, dtype=dtype, device=device)
            self.store.get(self, tensor)
            return tensor
        except ActstoreError as error:
            error.add_context(f"while reading {self.account.site} in a compiled graph")
            raise


class KeptPayload:
    """A payload of a graph that waits in memory: no store is entered, or no tier has room."""

    __slots__ = ("_last", "_tensor")

    def __init__(self, tensor: Tensor, last: Finalizer | None = None) -> None:
        self._tensor = tensor.clone()  # the graph may write to its own
        self._last = last

    def read(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a copy, to which the graph may write."""
        return self._tensor.clone()


class _TokenMemory(bytearray):
    """The memory under a token."""

    __slots__ = ("__weakref__", "payload")

    payload: TieredPayload | KeptPayload


_memories = WeakValueDictionary[int, _TokenMemory]()  # by address


def token_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the token of a tensor, which has no elements."""
    return *(0,) * _ZEROS, *tensor.shape


def payload_shape(token: Tensor) -> torch.Size:
    """Return the shape of the tensor that a token stands for."""
    return token.shape[_ZEROS:]


def token_of(payload: TieredPayload | KeptPayload, tensor: Tensor) -> Tensor:
    """Return a token, which owns a payload that `tensor` became."""
    memory = _TokenMemory(_MEMORY_NBYTES)
    memory.payload = payload
    base = torch.frombuffer(memory, dtype=tensor.dtype, count=1)
    _memories[base.data_ptr()] = memory
    return base[:0].view(token_shape(tensor))


def payload_of(token: Tensor) -> TieredPayload | KeptPayload:
    """Return the payload of a token.

    Raises
    ------
    StateError : the token is a copy, and its original is gone
    """
    memory = _memories.get(token.untyped_storage().data_ptr())
    if memory is None:
        raise StateError(
            "saved-tensor hooks copied what a compiled graph saved, and freed the original, which owned bytes in a "
            "tier. Leave those hooks out, or compile with a policy without tiers."
        )
    return memory.payload


class Puts:
    """The payloads that one run of a compiled region puts into the store that is entered: a context around the run.

    Parameters
    ----------
    prefix : name of the compiled module
    """

    def __init__(self, tracker: Tracker, prefix: str) -> None:
        self._store, self._forward = tracker.home
        self._prefix = prefix
        self._made: list[ref[Any]] = []

    def __enter__(self) -> None:
        self._before = getattr(_thread, "puts", None)
        _thread.puts = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.puts = self._before
        if self._made:
            self._store.remember(self._made)

    def put(
        self, tensor: Tensor, decision: Offload, name: str, number: int, readers: int
    ) -> TieredPayload | KeptPayload:
        """Encode a tensor into the first tier of a decision with room.

        Raises
        ------
        CapacityError : no tier has room, and the store is strict
        """
        ledger: Ledger = self._store.ledger
        account = ledger.account(site_of(self._prefix, name, number))
        payload = TieredPayload(account, readers)
        try:
            route = self._store.route(account, tensor, decision.codec, decision.tiers)
            made = self._store.put(payload, tensor, route, 0, self._forward)
        except ActstoreError as error:
            error.add_context(f"while saving {account.site} ({describe(tensor)}, {decision}) in a compiled graph")
            raise
        if made is None:
            account.note = Note.no_room(decision.tiers)
            return KeptPayload(tensor, ledger.hold(account, 0, 0, tensor.nbytes))
        self._made.append(made)
        for _ in range(readers - 1):
            payload.add_reader()
        return payload

    @property
    def samples(self) -> bool:
        """True in a step whose errors are measured."""
        found: bool = self._store.observers.samples
        return found

    def sample(self, tensor: Tensor, decoded: Callable[[], Tensor], decision: Decision, name: str, number: int) -> None:
        """Measure the payload of a tensor under a decision, which `decoded` returns as it comes back."""
        account = self._store.ledger.account(site_of(self._prefix, name, number))
        account.decision = decision
        self._store.observers.take(tensor, decoded, account, self._store.place(tensor.device).device)


def running_puts() -> Puts | None:
    """Return the payloads of the region that runs now; None where no store is entered."""
    found: Puts | None = getattr(_thread, "puts", None)
    return found


def site_of(prefix: str, name: str, number: int) -> Site:
    """Return the site of a tensor in a region, from the name of the compiled module and the name relative to it.

    name : of a module; of a tagged tensor with ``/`` and its tag
    """
    module, _, tag = name.partition("/")
    return Site(".".join(filter(None, (prefix, module))), number, tag)


def put(tensor: Tensor, decision: str, name: str, number: int, readers: int) -> Tensor:
    """Put a tensor into the store that is entered, or keep a copy where none is. Returns its token."""
    puts = running_puts()
    if puts is None:
        return token_of(KeptPayload(tensor), tensor)
    wait = decision_of(decision)
    assert isinstance(wait, Offload), decision
    return token_of(puts.put(tensor, wait, name, number, readers), tensor)


def nbytes_of_token(token: Tensor) -> int:
    """Return the bytes of the tensor that became the payload of a token."""
    return prod(payload_shape(token)) * token.itemsize


def read(token: Tensor, device: torch.device) -> Tensor:
    """Return what a token stands for, as a new tensor."""
    return payload_of(token).read(payload_shape(token), token.dtype, device)


def fetch_ahead(token: Tensor) -> None:
    """Start to fetch what backward is expected to read first, within the engine's bounds."""
    payload = payload_of(token)
    if isinstance(payload, TieredPayload) and isinstance(payload.room, Berth):
        payload.room.engine.poll(payload.room.parcel.run)


@cache
def decision_of(text: str) -> Decision:
    """Return the decision that an operator has as text. One text gives one object: routes compare by identity."""
    return parse_decision(text)
