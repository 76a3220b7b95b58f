"""Records of one payload, of one forward pass, and of one kind of tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from actstore.base.ledger import Account, Claim, Ledger
from actstore.base.reaper import Finalizer
from actstore.base.ticket import Ticket
from actstore.codecs import Codec
from actstore.codecs.base import Bound
from actstore.store.tierset import TierSet
from actstore.tiers import Slot
from actstore.transfer import Berth, TransferRun


class Home(Protocol):
    """Owner of payloads, which reads them and accounts for them."""

    ledger: Ledger

    def get(self, entry: Payload, out: torch.Tensor) -> None: ...

    def borrow(self, entry: Payload, dtype: torch.dtype, *, for_good: bool = ...) -> torch.Tensor | None: ...


class Payload:
    """One payload, or an empty record. The payload frees its bytes when it dies.

    Attributes
    ----------
    room : its bytes: memory of a pool, a slot of the device, which returns its memory when it dies, or a berth of the
        engine; None for an empty record
    last : returns memory, books the bytes as gone, or drops the berth
    key : of the random bits of a keyed codec; 0 before it is put, unless it is to have another payload's
    """

    __slots__ = ("__weakref__", "account", "bound", "codec", "key", "last", "room", "store")

    store: Home
    account: Account
    codec: Codec
    bound: Bound
    key: int
    room: torch.Tensor | Slot | Berth | None
    last: Finalizer | Claim | None

    def __init__(self, account: Account) -> None:
        self.account = account
        self.room = self.last = None
        self.key = 0

    def add_reader(self) -> None:
        """Count one more saved tensor that this payload serves."""
        if isinstance(self.room, Berth):
            self.room.add_reader()

    def free(self) -> None:
        """Return the memory. A later read raises StateError."""
        if isinstance(self.last, Claim):
            self.store.ledger.release(self.last)
        self.room = self.last = None


class ForwardPass:
    """One forward pass: the state that its payloads share, on each device."""

    def __init__(self) -> None:
        self.runs: dict[TierSet, TransferRun[Berth]] = {}
        self.ended = False
        self.place: TierSet | None = None  # of the device on which the pass runs, where that is known
        self.mark: Ticket | None = None  # its start
        self.span: Ticket | None = None  # from its start to its end


class Route:
    """Codec and tiers of the last tensor of a site: the next tensor of the same kind reuses them without a search.

    Attributes
    ----------
    pool : source of the buffers, if payloads have one size and wait in host memory that is the device's memory
    """

    __slots__ = ("bound", "codec", "device", "dtype", "keyed", "numel", "place", "pool", "shape", "tiers")

    def __init__(self, src: torch.Tensor, codec: Codec, tiers: Sequence[str], place: TierSet) -> None:
        self.codec = codec
        self.tiers = tiers
        self.numel = src.numel()
        self.dtype = src.dtype
        self.device = src.device
        self.keyed = codec.keyed
        self.shape = (src.shape, src.stride()) if codec.shaped else None
        self.bound = codec.bind(src)
        self.place = place
        self.pool = place.pool(tiers[0]) if self.bound.exact else None

    def fits(self, src: torch.Tensor, codec: Codec, tiers: Sequence[str]) -> bool:
        return (
            self.codec is codec
            and self.tiers is tiers
            and self.numel == src.numel()
            and self.dtype is src.dtype
            and self.device == src.device
            and (self.shape is None or self.shape == (src.shape, src.stride()))
        )
