"""Comparison of a payload with a tensor of the same memory that is saved once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from actstore.base.sameness import difference_on_device, same_on_host
from actstore.base.ticket import Ticket
from actstore.codecs.base import Bound
from actstore.errors import ActstoreError
from actstore.kernels.base import storage_slice
from actstore.store.payload import Payload
from actstore.store.tierset import TierSet


class PayloadComparison:
    """Comparison of a payload and a tensor by the device, whose result is on its way to the host.

    Parameters
    ----------
    differs : Tensor, 0-d bool in host memory, once `end` is complete
    later : errors of comparisons that were asked about before they were complete
    """

    def __init__(self, differs: Tensor, end: Ticket, later: Later) -> None:
        self._differs = differs
        self._end = end
        self._later = later

    def refuse(self, error: ActstoreError) -> None:
        """Raise `error` if the two differ. The host does not wait: an error that is not known yet comes later."""
        if not self._end.ready():
            self._later.append((self, error))
        elif self._differs:
            raise error

    def wait(self) -> None:
        """Have the host wait for the result."""
        self._end.result()


Later = list[tuple[PayloadComparison, ActstoreError]]


def compare(entry: Payload, src: Tensor, place: TierSet, later: Later) -> bool | PayloadComparison:
    """Compare a payload with the one that `src` would have now.

    Parameters
    ----------
    src : Tensor, from the same memory, with the shape and strides that the payload was encoded from
    place : the tiers of its device
    later : gets errors that are not known when backward reads

    Returns
    -------
    bool : whether they are the same, where the payload lies in host memory; False where it has left for another tier
    Comparison : of a payload in the memory of an accelerator; the host does not wait

    Notes
    -----
    Stream: current. A lossy payload is compared with another one of the same random bits.
    """
    bound = entry.codec.plain.bind(src)
    if not bound.nbytes:
        return True
    as_bytes = bound.exact or place.device.on_host
    with nullcontext() if as_bytes else place.late_lock, _at_hand(entry, place) as memory:
        if memory is not None and as_bytes:
            return _compare(memory, _payload(bound, src, entry.key), place, later)
        if memory is not None:  # its length is not known on the host yet
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
    if memory.numel() < nbytes:  # of variable size, and longer than the one that is there
        return False
    if place.device.on_host:
        return same_on_host(memory.data_ptr(), payload.data_ptr(), nbytes)
    differs = difference_on_device(memory[:nbytes], payload).to("cpu", non_blocking=True)
    return PayloadComparison(differs, place.device.record(place.device.current()), later)


@contextmanager
def _at_hand(entry: Payload, place: TierSet) -> Iterator[Tensor | None]:
    """Give the payload in the memory of the compute device, for work on the current stream; None where it has left."""
    berth = entry.berth
    if entry.memory is not None:
        yield entry.memory
    elif berth is not None:
        memory = berth.engine.peek(berth)
        try:
            yield memory
        finally:
            if memory is not None:
                berth.engine.peeked(berth)
    else:
        slot = entry.slot
        if slot is None or slot.buffer is None:
            yield None
            return
        slot.written.wait_on(place.device.current())
        yield slot.buffer
        if slot.place is not None:
            slot.tier.used(slot)
