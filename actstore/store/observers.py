"""Observers of the store's work: checks of bytes that wait, a gauge, a trace, and a sampler of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from actstore.base.checksum import checksum
from actstore.base.ledger import Account
from actstore.base.storage import SharedStorage
from actstore.base.ticket import Between, Ticket
from actstore.codecs import Codec
from actstore.codecs.base import Bound
from actstore.devices import Device
from actstore.errors import PayloadError
from actstore.kernels.base import LENGTH_NBYTES
from actstore.store.payload import ForwardPass
from actstore.store.tierset import TierSet
from actstore.trace import Trace


class Seal:
    """Checksum of the bytes in `memory`, as `checksum` takes it."""

    __slots__ = ("_expected", "_nbytes")

    def __init__(self, memory: torch.Tensor) -> None:
        self._nbytes = memory.numel()
        self._expected = checksum(memory)

    def check(self, memory: torch.Tensor) -> None:
        """Compare the first bytes of `memory` with the checksum. The host waits for both.

        Raises
        ------
        PayloadError : they have changed
        """
        found = checksum(memory[: self._nbytes])
        if not torch.equal(found, self._expected):
            raise PayloadError(
                f"{self._nbytes} bytes came back with another checksum ({int(found)}) than they were encoded with "
                f"({int(self._expected)}): something wrote to them while they waited. Please report this with the "
                "policy and the devices, unless your own code or driver does so.",
                nbytes=self._nbytes,
            )


def verified(bound: Bound) -> Bound:
    """Return the same codec, which compares checksums on each decode. The host waits for them."""
    seals: list[Seal] = []

    def encode(src: torch.Tensor, out: torch.Tensor, key: int) -> int | None:
        used = bound.encode(src, out, key)
        nbytes = bound.nbytes if bound.exact else int(out[:LENGTH_NBYTES].view(torch.int64))
        seals[:] = [Seal(out[:nbytes])]
        return used

    def decode(buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
        seals[0].check(buf)
        bound.decode(buf, out, key)

    return Bound(bound.nbytes, bound.exact, encode, decode)  # not `as_is`: the checksum reads all bytes


class Gauge(Protocol):
    """Meter of the time that the store's own work takes."""

    @property
    def measures(self) -> bool:
        """True in a step that the gauge measures."""

    def codec(self, bound: Bound, codec: Codec, account: Account) -> Bound:
        """Return the same codec, measured."""

    def recomputing(self, account: Account) -> Callable[[], None]:
        """Begin to measure a recomputation. Returns a function to call at its end."""

    def share(self, storages: Iterable[SharedStorage]) -> None:
        """Take the storages that several modules save, at the end of forward."""


class PayloadSampler(Protocol):
    """Meter of the loss of lossy payloads, in some steps."""

    def start(self, step: int) -> bool:
        """Begin a step. Returns whether the sampler samples it."""

    def codec(self, bound: Bound, plain: Bound, account: Account, device: Device, trace: Trace | None) -> Bound:
        """Return the same codec, which measures each payload when it is encoded; `plain` decodes without measuring."""

    def take(
        self, src: Tensor, decoded: Callable[[], Tensor | None], account: Account, device: Device, trace: Trace | None
    ) -> None:
        """Measure `src` beside what `decoded` returns: the tensor as it comes back, or None where that is not known."""

    def read(self, *, wait: bool) -> None:
        """Read the results that are on the host; with `wait`, also those that are on their way."""

    def close(self) -> None:
        """Return the memory."""


class StoreObservers:
    """Observers of one store. They wrap codecs in the steps that they observe; other steps run without any.

    Attributes
    ----------
    are_active : whether this step verifies, traces or measures all codecs
    samples : whether it samples lossy ones
    verifies : whether each payload is compared with its checksum
    """

    def __init__(
        self, *, verify: bool, trace: Trace | None, gauge: Gauge | None, sampler: PayloadSampler | None
    ) -> None:
        self.trace = trace
        self.gauge = gauge
        self.samples = False
        self.are_active = True
        self.verifies = verify
        self._sampler = sampler
        self._backward: tuple[TierSet, Ticket, Ticket] | None = None  # its first and its last work

    def measure(self, gauge: Gauge) -> None:
        """Measure with a gauge from the next step on."""
        self.gauge = gauge

    def start(self, step: int) -> None:
        """Begin a step.

        Raises
        ------
        AccuracyError : the last sampled payloads lost more than the limit
        """
        self.samples = self._sampler is not None and self._sampler.start(step)
        self.are_active = self.verifies or self.trace is not None or self.gauge is not None
        self.end_backward()

    def around(self, bound: Bound, codec: Codec, account: Account, place: TierSet) -> Bound:
        """Return the same codec, whose work is verified, measured, traced or sampled."""
        plain = bound = verified(bound) if self.verifies else bound
        if self.gauge is not None:
            bound = self.gauge.codec(bound, codec, account)
        if self.trace is not None:
            bound = self._traced(bound, place, account)
        if self._sampler is not None and self._takes() and not (codec.lossless or codec.decides):
            bound = self._sampler.codec(bound, plain, account, place.device, self.trace)
        return bound

    def _takes(self) -> bool:
        return self.samples and not (self.gauge is not None and self.gauge.measures)

    def take(self, src: Tensor, decoded: Callable[[], Tensor | None], account: Account, device: Device) -> None:
        """Measure a tensor that a graph has encoded, or that backward will derive, where the step is sampled."""
        if self._sampler is not None and self._takes():
            self._sampler.take(src, decoded, account, device, self.trace)

    def recomputing(self, forward: ForwardPass, account: Account) -> Callable[[], None] | None:
        """Trace the recomputation of a region. Returns a function to call at its end; None without a trace."""
        place = forward.place
        if place is None or self.trace is None:
            return None
        device = place.device
        begin = device.mark(device.current())
        self.note_backward(place, begin, begin)

        def ended() -> None:
            end = device.mark(device.current())
            place.engine.note("recompute", Between(begin, end), [(account, 0)])
            self.note_backward(place, begin, end)

        return ended

    def note_backward(self, place: TierSet, begin: Ticket, end: Ticket) -> None:
        """Note that backward decoded a payload, or ran a region again."""
        first = begin if self._backward is None else self._backward[1]
        self._backward = (place, first, end)

    def end_backward(self) -> None:
        """Trace the last backward: from the first work that it asked for to the last."""
        backward, self._backward = self._backward, None
        if backward is not None:
            place, begin, end = backward
            place.engine.note("backward", Between(begin, end), [])

    def read(self) -> None:
        """Read the results that are on the host."""
        if self._sampler is not None:
            self._sampler.read(wait=False)

    def close(self) -> None:
        """Return the sampler's memory."""
        if self._sampler is not None:
            self._sampler.close()

    def _traced(self, bound: Bound, place: TierSet, account: Account) -> Bound:
        """Return the same codec, whose work is traced."""
        device, engine = place.device, place.engine

        def encode(src: torch.Tensor, out: torch.Tensor, key: int) -> int | None:
            begin = device.mark(device.current())
            used = bound.encode(src, out, key)
            engine.note("encode", Between(begin, device.mark(device.current())), [(account, src.nbytes)])
            return used

        def decode(buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
            begin = device.mark(device.current())
            bound.decode(buf, out, key)
            end = device.mark(device.current())
            engine.note("decode", Between(begin, end), [(account, out.nbytes)])
            self.note_backward(place, begin, end)

        return bound._replace(encode=encode, decode=decode)
