"""The unit of a move: a parcel of one large payload, or of several small ones.

States of a parcel:

* OPEN: on the device; takes more payloads, or waits for their encoding
* OFFLOADING: on the device; a copy to its tier runs
* RESIDENT: in its tier
* FETCHING: in its tier; a copy back to the device runs. When that fails it is RESIDENT again
* READY: on the device, and in its tier, unless the tier has lost it (`slot` is None)
* DROPPED: all its payloads are dead
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
import torch

from actstore.base.ledger import Account, Booking
from actstore.base.note import Note
from actstore.base.reaper import Finalizer
from actstore.base.storage import FleetingTensor
from actstore.base.ticket import Ticket
from actstore.errors import ActstoreError, ReplicaError, StateError
from actstore.tiers import Slot
from actstore.transfer.buffers import Buffer
from actstore.transfer.order import TransferRun


class ParcelState(Enum):
    OPEN = auto()
    OFFLOADING = auto()
    RESIDENT = auto()
    FETCHING = auto()
    READY = auto()
    DROPPED = auto()


NEXT = {
    ParcelState.OPEN: {ParcelState.OFFLOADING, ParcelState.DROPPED},
    ParcelState.OFFLOADING: {ParcelState.READY, ParcelState.DROPPED},
    ParcelState.RESIDENT: {ParcelState.FETCHING, ParcelState.DROPPED},
    ParcelState.FETCHING: {ParcelState.READY, ParcelState.RESIDENT, ParcelState.DROPPED},
    ParcelState.READY: {ParcelState.RESIDENT, ParcelState.DROPPED},
    ParcelState.DROPPED: set[ParcelState](),
}


class Parcel:
    """Payloads that move together. Only the engine changes them, under its lock.

    Attributes
    ----------
    alone : whether one payload has the buffer to itself
    buffer : the memory on the device, in the states that have one
    slot : its memory in the tier
    home : the stream that encodes the payloads
    arrival : complete when `buffer` holds the bytes; None while its payloads are being encoded
    motion : the current or last copy
    loan : the loan of `buffer` to tensors, if any
    fetched : whether `arrival` is a copy from the tier, not the encoding on `home`
    filling : payloads whose encoding is not queued yet
    users : threads that decode from `buffer` now
    waiting_nbytes, ahead_nbytes, leaving_nbytes : its bytes as the quota counts them now
    occupied : its bytes as the books of the tier count them now, in a list
    reads : the streams of decodings that may still run on `buffer`
    unread : berths with fewer reads than readers
    """

    __slots__ = (
        "ahead_nbytes", "alone", "arrival", "berths", "buffer", "capacity", "closed", "fetched", "filling", "home",
        "leaving_nbytes", "loan", "motion", "occupied", "reads", "run", "slot", "state", "tier", "unread", "used",
        "users", "waiting_nbytes",
    )  # fmt: skip

    def __init__(self, buffer: Buffer, slot: Slot, home: Any, run: TransferRun[Berth]) -> None:
        self.state = ParcelState.OPEN
        self.buffer: Buffer | None = buffer
        self.slot: Slot | None = slot
        self.capacity = slot.nbytes
        self.tier = slot.tier
        self.home = home
        self.run = run
        self.berths: set[Berth] = set()
        self.unread: set[Berth] = set()
        self.arrival: Ticket | None = None
        self.motion: Ticket | None = None
        self.reads: set[Any] = set()
        self.used = 0
        self.filling = 0
        self.users = 0
        self.loan: Loan | None = None
        self.closed = False
        self.alone = False
        self.fetched = False
        self.waiting_nbytes = self.ahead_nbytes = self.leaving_nbytes = 0
        self.occupied = [0]

    def gone(self) -> bool:
        """Return whether all its payloads are dead."""
        return self.state is ParcelState.DROPPED

    def wanted(self) -> bool:
        """Return whether backward is expected to ask for it next, or has begun to read it."""
        return any(berth.reads or self.run.expects(berth.serial) for berth in self.unread)

    def held_nbytes(self, berth: Berth) -> int:
        """Return the bytes of a payload that its tier has in the memory of the compute device."""
        return 0 if self.slot is None else self.tier.held_nbytes(berth.nbytes)

    def note_failure(self, error: ActstoreError | None) -> None:
        """Note at the sites of the payloads that their tier has lost them, and at an error between ranks the site."""
        for berth in self.berths:
            berth.account.note = Note(f"{self.tier.name} failed", kept=True)
            if isinstance(error, ReplicaError):
                error.add_context(str(berth.account.site))

    def shares(self) -> list[tuple[Account, int]]:
        """Return the account and the size of each payload."""
        return [(berth.account, berth.nbytes) for berth in self.berths]

    def turn(self, state: ParcelState) -> None:
        """Go to another state.

        Raises
        ------
        StateError : that state cannot follow this one: a bug of actstore
        """
        if state not in NEXT[self.state]:
            raise StateError(f"a parcel cannot turn from {self.state.name} to {state.name}. Report this.")
        self.state = state


class Carrier(Protocol):
    """Engine, as the owner of a berth uses it."""

    def depart(self, berth: Berth) -> None: ...

    def cancel(self, berth: Berth) -> None: ...

    def peek(self, berth: Berth) -> torch.Tensor | None: ...

    def peeked(self, berth: Berth) -> None: ...

    def arrive(self, berth: Berth) -> torch.Tensor: ...

    def lend(self, berth: Berth, dtype: torch.dtype, *, for_good: bool = ...) -> torch.Tensor | None: ...

    def leave(self, berth: Berth) -> None: ...

    def drop(self, berth: Berth) -> None: ...

    def poll(self, begun: TransferRun[Berth] | None = None) -> None: ...


class Berth:
    """The place of one payload in a parcel.

    Attributes
    ----------
    serial : number of the payload in its run
    readers : number of saved tensors that it serves
    reads : number of decodings since its bytes came to the device
    booking : its bytes on the device and elsewhere, as the books count them now
    """

    __slots__ = (
        "__weakref__", "account", "booking", "engine", "nbytes", "parcel", "readers", "reads", "serial", "start",
    )  # fmt: skip

    def __init__(self, engine: Carrier, parcel: Parcel, start: int, nbytes: int, account: Account, serial: int) -> None:
        self.engine = engine
        self.parcel = parcel
        self.start = start
        self.nbytes = nbytes
        self.account = account
        self.serial = serial
        self.readers = 1
        self.reads = 0
        self.booking: Booking = [account, 0, 0]

    @property
    def memory(self) -> torch.Tensor:
        """Bytes of the payload on the device, (nbytes,) uint8.

        Raises
        ------
        StateError : the store has freed the payload, as its `close` does
        """
        buffer = self.parcel.buffer
        if buffer is None:
            raise StateError("this payload was given back. Close the store after the last backward.")
        return buffer.memory[self.start : self.start + self.nbytes]

    def add_reader(self) -> None:
        """Count one more saved tensor that it serves."""
        self.readers += 1

    def count_read(self) -> None:
        """Count a decoding of the bytes on the device."""
        self.reads += 1
        if self.reads >= self.readers:
            self.parcel.unread.discard(self)


class Loan(FleetingTensor):
    """The buffer of a parcel while tensors have it as their memory, without a copy, where the compute device is a CPU.

    Not thread-safe.

    Code may write to the tensors, as to any tensor that autograd unpacks. Their shared version counter reveals it.

    Attributes
    ----------
    parcel : the owner of the bytes; None once a write has changed them
    users : number of users of the parcel that these tensors stand for
    """

    __slots__ = ("parcel", "users")

    def __init__(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.parcel: Parcel | None = parcel
        self.users = 0


class _Pages(np.ndarray):
    """Owner of a buffer's memory, which a storage keeps alive. Not a ctypes array: that makes a class for each size."""

    last: Finalizer


def lend(
    parcel: Parcel, memory: torch.Tensor, dtype: torch.dtype, returned: Callable[[Loan], None]
) -> tuple[Loan, torch.Tensor]:
    """Return a loan and a 1-d tensor over the `memory` of a parcel.

    Parameters
    ----------
    memory : Tensor, (nbytes,) uint8, on the host
    returned : a function written in C, called with the loan when the last of its tensors dies
    """
    pages = memory.numpy().view(_Pages)
    tensor = torch.frombuffer(pages, dtype=dtype)
    loan = Loan(parcel, tensor)
    pages.last = Finalizer(returned, loan)  # dies with the pages
    return loan, tensor
