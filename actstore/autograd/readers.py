"""Readers: the autograd nodes that read the payloads of a sampled step, and the tensors that they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from actstore.autograd.derived import Derived
from actstore.base.ledger import Account
from actstore.store.payload import Payload


class Reader:
    """Wrapper of a stored tensor's handle that autograd holds in a sampled step. The handle is read only once.

    Attributes
    ----------
    capture : whether to keep the tensor that is read until the node has run
    captured : the tensor that was read
    shown : the tensor to return instead of reading, while the node runs once more
    """

    __slots__ = ("__weakref__", "capture", "captured", "handle", "shown")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.capture = False
        self.captured: Tensor | None = None
        self.shown: Tensor | None = None

    def get(self) -> Tensor:
        if self.shown is not None:
            return self.shown
        tensor: Tensor = self.handle.get()
        if self.capture:
            self.captured = tensor
        return tensor

    def forget(self) -> None:
        """Release the captured tensor; later reads are plain."""
        self.capture, self.captured, self.shown = False, None, None

    @property
    def lossy(self) -> Account | None:
        """Account of the payload, where it was encoded with loss; else None."""
        return lossy_account(self.handle)

    @property
    def keeps_signs(self) -> bool:
        """True if zeros, positive and negative elements of the payload come back as such."""
        if isinstance(self.handle, Derived):
            return False
        codec = (self.handle.owner or self.handle).codec
        return bool(codec.keeping_signs is codec)


def lossy_account(handle: Any) -> Account | None:
    """Return the account of what `handle` encodes or derives; None where that is exact, or not encoded yet."""
    if isinstance(handle, Derived):
        return None if handle.codec is None else handle.account
    if handle.alias is not None:
        return None
    payload = handle if handle.owner is None else handle.owner
    account: Account = payload.account
    return None if payload.codec.lossless or payload.codec.decides else account


class Readers:
    """Readers of one step, by the sequence number of the autograd node that saved them.

    A node takes its number before it saves a tensor; the counter is one ahead. Readers live as long as the graph.

    Attributes
    ----------
    seen : numbers of all nodes whose saved tensors went through the store's hook, without nodes of recomputed regions
    wrapped : numbers of the nodes that read tensor wrappers
    """

    def __init__(self) -> None:
        self.seen = set[int]()
        self.wrapped = set[int]()
        self._readers: dict[int, list[ref[Reader]]] = {}
        self._apart: list[tuple[ref[Payload], str]] = []

    def hook(self, pack: Callable[..., Any], in_region: Callable[[], bool]) -> Callable[..., Any]:
        """Return the pack hook of a sampled step.

        Parameters
        ----------
        pack : the store's own pack hook
        in_region : returns whether the tensor saved now is the input of a recomputed region
        """

        def watching(tensor: Tensor) -> Any:
            handle = pack(tensor)
            number = _get_sequence_nr() - 1
            parts = [part for part in getattr(handle, "handles", {}).values() if isinstance(part, Payload)]
            if parts:
                self.wrapped.add(number)
                self._apart += [(ref(part), f"a part of a {type(tensor).__name__}") for part in parts]
            elif in_region():
                if isinstance(handle, Payload):
                    self._apart.append((ref(handle), "the input of a recomputed region"))
                return handle
            self.seen.add(number)
            if not isinstance(handle, Payload) and not (isinstance(handle, Derived) and handle.codec):
                return handle
            reader = Reader(handle)
            self._readers.setdefault(number, []).append(ref(reader))
            return reader

        return watching

    @property
    def alive(self) -> bool:
        """True while a reader lives, so that a backward may come."""
        return any(weak() is not None for readers in self._readers.values() for weak in readers)

    def of(self, number: int) -> list[Reader]:
        """Return the readers of one node."""
        return [reader for weak in self._readers.get(number, ()) if (reader := weak()) is not None]

    def lossy(self, why_not: Callable[[int], str]) -> dict[Account, str]:
        """Return all sites with a live lossy payload, each with the reason why its error cannot be predicted, or empty.

        why_not : returns for the number of a node the reason why its reads cannot be predicted; empty where they can
        """
        found: dict[Account, str] = {}
        for number in self._readers:
            for reader in self.of(number):
                if (account := reader.lossy) is not None:
                    found[account] = found.get(account) or why_not(number)
        for weak, reason in self._apart:
            handle = weak()
            if handle is not None and (account := lossy_account(handle)) is not None:
                found[account] = reason
        return found
