"""Comparison of a payload with a tensor that is saved again from the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from ctypes import CDLL, c_int, c_size_t, c_void_p

import torch
from torch import Tensor

from actstore.base.ticket import Ticket
from actstore.codecs.base import Bound
from actstore.errors import ActstoreError
from actstore.kernels.base import storage_slice
from actstore.store.payload import Payload
from actstore.store.tierset import TierSet
from actstore.tiers import Slot
from actstore.transfer import Berth

CHUNK_WORDS = 2**23  # compared at a time on a device, so that the comparison needs little memory
_memcmp = CDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = [c_void_p, c_void_p, c_size_t], c_int


class PayloadComparison:
    """Comparison on the device of a payload and a tensor, whose result is on its way to the host.

    Parameters
    ----------
    differs : Tensor, 0-d bool in host memory, once `end` is complete
    later : collects the errors of comparisons that `refuse` found incomplete
    """

    def __init__(self, differs: Tensor, end: Ticket, later: Later) -> None:
        self._differs = differs
        self._end = end
        self._later = later

    def refuse(self, error: ActstoreError) -> None:
        """Raise `error` if the two differ. Where the result is not on the host yet, keep the error for later."""
        if not self._end.ready():
            self._later.append((self, error))
        elif self._differs:
            raise error

    def wait(self) -> None:
        """Wait on the host until the result is there."""
        self._end.result()


Later = list[tuple[PayloadComparison, ActstoreError]]


def compare(entry: Payload, src: Tensor, place: TierSet, later: Later) -> bool | PayloadComparison:
    """Compare a payload with the payload that `src` would have now.

    Parameters
    ----------
    src : Tensor, from the same memory, with the shape and strides that the payload was encoded from
    place : the tiers of the payload's device
    later : collects the errors whose comparison is incomplete when backward reads the payload

    Returns
    -------
    bool : whether both are the same, where the payload is in host memory; False where it has left for another tier
    PayloadComparison : for a payload in the memory of an accelerator; the host does not wait

    Notes
    -----
    Stream: current. `compare` encodes `src` with the random bits of a lossy payload. Blank payloads are the same.
    """
    bound = entry.codec.plain.bind(src)
    if not bound.nbytes or entry.bound.blank:
        return True
    as_bytes = bound.exact or place.device.on_host
    with nullcontext() if as_bytes else place.late_lock, _at_hand(entry, place) as memory:
        if memory is not None and as_bytes:
            return _compare(memory, _payload(bound, src, entry.key), place, later)
        if memory is not None:  # the host does not know its length yet, so decoded values are compared
            values = src if entry.codec.lossless else _decoded(bound, _payload(bound, src, entry.key), src, entry.key)
            return _compare(bytes_of(_decoded(bound, memory, src, entry.key)), bytes_of(values), place, later)
    return False


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in storage order, as 1-d uint8."""
    return storage_slice(tensor, 0, tensor.numel()).view(torch.uint8)


def _payload(bound: Bound, src: Tensor, key: int) -> Tensor:
    """Encode `src`."""
    if bound.as_is:
        return bytes_of(src)
    out = torch.empty(bound.nbytes, dtype=torch.uint8, device=src.device)
    used = bound.encode(src, out, key)
    return out if used is None else out[:used]


def _decoded(bound: Bound, payload: Tensor, like: Tensor, key: int) -> Tensor:
    out = torch.empty_like(like)
    bound.decode(payload, out, key)
    return out


def _compare(memory: Tensor, payload: Tensor, place: TierSet, later: Later) -> bool | PayloadComparison:
    nbytes = payload.numel()
    if memory.numel() < nbytes:  # the new payload has variable size, and is longer
        return False
    if place.device.on_host:
        return same_on_host(memory.data_ptr(), payload.data_ptr(), nbytes)
    differs = difference_on_device(memory[:nbytes], payload).to("cpu", non_blocking=True)
    return PayloadComparison(differs, place.device.record(place.device.current()), later)


@contextmanager
def at_hand(entry: Payload) -> Iterator[bool]:
    """Let the store read a payload without a transfer. Yields False where its bytes have left for another tier."""
    berth = entry.room
    memory = berth.engine.peek(berth) if isinstance(berth, Berth) else None
    if not isinstance(berth, Berth) or memory is None:
        yield not isinstance(berth, Berth)
        return
    try:
        entry.room = Slot(berth.nbytes, memory)
        yield True
    finally:
        entry.room = berth
        berth.engine.peeked(berth)


@contextmanager
def _at_hand(entry: Payload, place: TierSet) -> Iterator[Tensor | None]:
    """Yield the payload in memory of the compute device, for work on the current stream; None where it has left."""
    room = entry.room
    if isinstance(room, Berth):
        memory = room.engine.peek(room)
        try:
            yield memory
        finally:
            if memory is not None:
                room.engine.peeked(room)
    elif isinstance(room, Slot) and room.buffer is not None:
        room.written.wait_on(place.device.current())
        yield room.buffer
        if room.place is not None:
            room.tier.used(room)
    else:
        yield None if isinstance(room, Slot) else room


def same_on_host(a: int, b: int, nbytes: int) -> bool:
    """Return whether `nbytes` at two addresses of host memory are equal."""
    return not _memcmp(a, b, nbytes)


def difference_on_device(a: Tensor, b: Tensor) -> Tensor:
    """Compare two tensors, 1-d uint8 of one size, without a wait. Return a 0-d bool tensor on their device."""
    found = torch.zeros((), dtype=torch.bool, device=a.device)
    whole = a.numel() & -8
    if whole and a.data_ptr() % 8 == b.data_ptr() % 8 == 0:
        words = a[:whole].view(torch.int64), b[:whole].view(torch.int64)
        for x, y in zip(words[0].split(CHUNK_WORDS), words[1].split(CHUNK_WORDS), strict=True):
            found = found | (x != y).any()
        a, b = a[whole:], b[whole:]
    return found | (a != b).any()
