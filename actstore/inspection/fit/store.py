"""A store for dry steps: the policy and the hooks of `ActivationStore`, with codecs and tiers that move no bytes.

A clock says when copies to its tiers end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from actstore.autograd.hooks import Scope
from actstore.base.ledger import Account
from actstore.base.storage import SharedStorage
from actstore.base.ticket import DONE, Done, Span, Ticket
from actstore.codecs import Codec
from actstore.codecs.base import Bound
from actstore.devices import Cpu, Device, cpu_memory
from actstore.inspection.fit.memory import LiveMemory
from actstore.inspection.fit.work import Work
from actstore.plan.plan import Plan
from actstore.session.activation_store import ActivationStore
from actstore.session.observers import SampleErrors
from actstore.tiers import PluginTier, Slot, Tier, Window
from actstore.transfer.engine import DEVICE_WINDOW_NBYTES, HOST_WINDOW_NBYTES

SLOW_NS = 1_000  # for a byte: a copy on a slow tier ends when the host waits for it, or for a later one


class DryClock:
    """The time of a dry step, which waits for copies alone make pass.

    Attributes
    ----------
    now_ns : the time since the clock was made
    """

    def __init__(self) -> None:
        self.now_ns = 0

    def wait_until(self, ns: int) -> None:
        """Let time pass until a moment, unless it is over."""
        self.now_ns = max(ns, self.now_ns)


class DryDevice(Cpu):
    """A CPU with memory that no one touches, whose host waits by a `DryClock`.

    Parameters
    ----------
    stands_for_cpu : whether the step would train on a CPU, whose freed buffers serve tensors
    """

    def __init__(self, device: torch.device, memory: LiveMemory, clock: DryClock, *, stands_for_cpu: bool) -> None:
        super().__init__(device)
        self._memory = memory
        self._clock = clock
        self._stands_for_cpu = stands_for_cpu
        cpu_memory.install()

    def recycles(self, nbytes: int) -> bool:
        return self._stands_for_cpu and super().recycles(nbytes)

    def empty(self, nbytes: int) -> Tensor:
        return self._memory.buffer(nbytes) if nbytes else super().empty(nbytes)

    def wait(self, stream: Any, ticket: Ticket) -> Ticket | None:
        if ticket.ready():
            return None
        begin = self._clock.now_ns
        ticket.wait_on(stream)
        return Done((begin, self._clock.now_ns))


class DryTier(Tier):
    """A tier without memory or a file, whose copies end at once; on a slow one, one after the other on each way.

    Parameters
    ----------
    work : counts the copies; None for no times
    on_stream : whether a stream waits for the copies, never the host

    Attributes
    ----------
    is_used : whether a payload has gone there
    """

    def __init__(self, name: str, clock: DryClock, work: Work | None, *, is_slow: bool, on_stream: bool) -> None:
        self.name = name  # type: ignore[misc]  # of the tier for which it stands
        self.is_used = False
        self._clock = clock
        self._work = work
        self._byte_ns = SLOW_NS if is_slow else 0
        self._kind = _StreamCopy if on_stream else _DryCopy
        self._free_ns = [0, 0]  # when the last copy of each way ends

    def reserve(self, nbytes: int) -> Slot | None:
        return Slot(nbytes)

    def write(self, slot: Slot, src: Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        self.is_used = True
        slot.written = slot.place = self._copy(slot.nbytes, 0, back=False)
        return slot.written

    def read(self, slot: Slot, dst: Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        written = slot.place
        return self._copy(slot.nbytes, written.end_ns if isinstance(written, _DryCopy) else 0, back=True)

    def free(self, slot: Slot) -> None:
        """Do nothing: a slot takes no room here."""

    def trim(self) -> None:
        """Do nothing: no memory is idle."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _copy(self, nbytes: int, earliest_ns: int, *, back: bool) -> Ticket:
        if self._work is not None:
            self._work.copy(self.name, nbytes, back=back)
        begin = max(self._clock.now_ns, self._free_ns[back], earliest_ns)
        end = self._free_ns[back] = begin + nbytes * self._byte_ns
        return self._kind(self._clock, begin, end) if end > begin else DONE


class _DryCopy(Ticket):
    """A copy that ends at a moment of the clock."""

    def __init__(self, clock: DryClock, begin_ns: int, end_ns: int) -> None:
        self._clock = clock
        self._begin_ns = begin_ns
        self.end_ns = end_ns

    def ready(self) -> bool:
        return self._clock.now_ns >= self.end_ns

    def wait_on(self, stream: Any) -> None:
        self._clock.wait_until(self.end_ns)

    def result(self) -> None:
        self._clock.wait_until(self.end_ns)

    def span(self) -> Span | None:
        return (self._begin_ns, self.end_ns) if self.ready() else None


class _StreamCopy(_DryCopy):
    """A copy that a stream waits for."""

    on_stream = True


CPU = torch.device("cpu")


class DryStore(ActivationStore):
    """The store of a dry step.

    Parameters
    ----------
    policy : as for `ActivationStore`; a plan sets the window
    memory : the book of the step
    work : counts codecs and copies; None for no times
    is_slow : whether a copy to and from a tier ends when the host waits for it; by default it ends at once
    is_late : whether the store fetches as far ahead as it does after many late copies
    on_host : whether the device is a CPU, whose memory the host tier shares

    Attributes
    ----------
    moves : tiers whose bytes do not count as memory of the device
    """

    def __init__(
        self,
        model: Module,
        policy: Any,
        memory: LiveMemory,
        work: Work | None = None,
        *,
        is_slow: bool = False,
        is_late: bool = False,
        on_host: bool = True,
        **options: Any,
    ) -> None:
        window_nbytes = HOST_WINDOW_NBYTES if on_host else DEVICE_WINDOW_NBYTES
        if isinstance(policy, Plan) and policy.window is not None:
            window_nbytes = policy.window
        clock = DryClock()
        self.moves = [
            DryTier(name, clock, work, is_slow=is_slow, on_stream=not on_host)
            for name in ("disk", "host")[: 1 if on_host else 2]
        ]
        self._memory = memory
        self._is_late = is_late
        self._open_device = partial(DryDevice, memory=memory, clock=clock, stands_for_cpu=on_host)
        tiers: list[PluginTier | Window] = [*map(_Ready, self.moves), Window(window_nbytes)]
        super().__init__(model, policy, tiers=tiers, observe=[SampleErrors(every=0)], **options)
        self._store.observers.measure(_DryCodecs(memory, work))

    def _scope(self, *, first: bool) -> Scope:
        scope = super()._scope(first=first)
        if self._is_late:
            self._store.place(CPU).engine.widen()
        scope.storages.use(_Held(self._memory), _Held(self._memory))
        return scope


class _Held(dict[int, ref[Any]]):
    """Book of storages that a store keeps as they are; each gets its label when it comes in."""

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self._memory = memory

    def __setitem__(self, key: int, holder: ref[Any]) -> None:
        self._memory.label_all((key,), "activations")
        super().__setitem__(key, holder)

    def update(self, small: dict[int, ref[Any]]) -> None:  # type: ignore[override]  # as `Frame.end` calls it
        self._memory.label_all(small, "activations")
        super().update(small)


class _DryCodecs:
    """Gauge whose codecs have the sizes of the real ones, and write nothing."""

    measures = False

    def __init__(self, memory: LiveMemory, work: Work | None) -> None:
        self._memory = memory
        self._work = work

    def codec(self, bound: Bound, codec: Codec, account: Account) -> Bound:
        """Return a codec of the same sizes; a payload of variable size has its bound."""
        used = None if bound.exact else bound.nbytes

        def encode(src: Tensor, out: Tensor, key: int) -> int | None:
            self._memory.label(out, "payloads")
            self._match(out, src)
            self._count(src, out)
            return used

        def decode(buf: Tensor, out: Tensor, key: int) -> None:
            self._memory.label(buf, "payloads")
            self._match(out, buf)
            self._count(buf, out)

        return bound._replace(encode=encode, decode=decode, blank=True)

    def _match(self, target: Tensor, source: Tensor) -> None:
        """Split what has the values of a split tensor, unless other tensors share its memory."""
        if self._memory.is_split and target.nbytes == target.untyped_storage().nbytes():
            self._memory.split(target, self._memory.parts(source))

    def _count(self, source: Tensor, target: Tensor) -> None:
        if self._work is not None:
            self._work.codec(source.nbytes + target.nbytes)

    def recomputing(self, account: Account) -> Callable[[], None]:
        """Measure nothing."""
        return _nothing

    def share(self, storages: Iterable[SharedStorage]) -> None:
        """Take nothing."""


class _Ready(PluginTier):
    """Options of a tier that is there, in place of the tier of its name."""

    tier: DryTier

    def __init__(self, tier: DryTier) -> None:
        super().__init__(tier.name)
        object.__setattr__(self, "tier", tier)

    def open(self, device: Device) -> Tier:
        return self.tier


def _nothing() -> None:
    pass
