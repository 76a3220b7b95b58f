"""Which autograd nodes read the payloads of a sampled step, and what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from actstore.base.ledger import Account
from actstore.store.payload import Payload


class Reader:
    """What autograd holds in place of a stored tensor in a sampled step: its handle, which is read only once.

    Attributes
    ----------
    capture : whether to keep what is read until the node has run
    captured : what was read
    shown : what to give instead of reading, while the node runs once more
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
        """Let go of what was read; later readings are plain."""
        self.capture, self.captured, self.shown = False, None, None

    @property
    def lossy(self) -> Account | None:
        """The account of the payload that the reader gets, where it was encoded with loss."""
        return lossy_account(self.handle)


def lossy_account(handle: Any) -> Account | None:
    """The account of the payload of `handle`; None where it is exact, or not encoded yet."""
    if handle.alias is not None:
        return None
    payload = handle if handle.owner is None else handle.owner
    account: Account = payload.account
    return None if payload.codec.lossless or payload.codec.decides else account


class Readers:
    """The readers of one step, by the sequence number of the autograd node that saved them.

    A node takes its number before it saves anything; the counter is one ahead. Readers live as long as the graph.

    Attributes
    ----------
    seen : the numbers of all nodes whose saved tensors went through the store's hook: none of a recomputed region
    wrapped : the numbers of nodes that read tensors which are made of others
    """

    def __init__(self) -> None:
        self.seen = set[int]()
        self.wrapped = set[int]()
        self._readers: dict[int, list[ref[Reader]]] = {}
        self._apart: list[tuple[ref[Payload], str]] = []

    def hook(self, pack: Callable[..., Any], in_region: Callable[[], bool]) -> Callable[..., Any]:
        """The pack hook of a sampled step.

        Parameters
        ----------
        pack : the store's own
        in_region : whether what is saved now is the input of a recomputed region
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
            if not isinstance(handle, Payload):
                return handle
            reader = Reader(handle)
            self._readers.setdefault(number, []).append(ref(reader))
            return reader

        return watching

    @property
    def alive(self) -> bool:
        """Whether some are: a backward may come."""
        return any(weak() is not None for readers in self._readers.values() for weak in readers)

    def of(self, number: int) -> list[Reader]:
        """Those of one node."""
        return [reader for weak in self._readers.get(number, ()) if (reader := weak()) is not None]

    def lossy(self, why_not: Callable[[int], str]) -> dict[Account, str]:
        """All sites whose payloads are lossy and alive, with why they cannot be predicted, if so.

        why_not : of the number of a node: why what it reads cannot be predicted; empty where it can
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
