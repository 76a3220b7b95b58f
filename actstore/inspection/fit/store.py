"""A store for dry steps: the policy and the hooks of `ActivationStore`, with codecs and tiers that move no bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module

from actstore.autograd.hooks import Scope
from actstore.base.ledger import Account
from actstore.base.ticket import Ticket
from actstore.codecs import Codec
from actstore.codecs.base import Bound
from actstore.devices import Device
from actstore.inspection.fit.memory import LiveMemory
from actstore.inspection.fit.work import Work
from actstore.plan.plan import Plan
from actstore.session.activation_store import ActivationStore
from actstore.session.observers import SampleErrors
from actstore.tiers import PluginTier, Slot, Tier, Window
from actstore.transfer.engine import DEVICE_WINDOW_NBYTES, HOST_WINDOW_NBYTES

LEAST_LATE_NBYTES = 4 << 20  # of copies that a slow tier has not ended


class DryStore(ActivationStore):
    """The store of a dry step.

    Parameters
    ----------
    policy : as for `ActivationStore`; a plan sets the window
    memory : the book of the step
    work : counts codecs and copies; None for no times
    slow : whether copies to and from the tiers are late; by default each ends at once
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
        slow: bool = False,
        on_host: bool = True,
        **options: Any,
    ) -> None:
        window_nbytes = HOST_WINDOW_NBYTES if on_host else DEVICE_WINDOW_NBYTES
        if isinstance(policy, Plan) and policy.window is not None:
            window_nbytes = policy.window
        self.moves = [DryTier(name, window_nbytes, work, slow=slow) for name in ("disk", "host")[: 1 if on_host else 2]]
        self._memory = memory
        tiers: list[PluginTier | Window] = [*map(_Ready, self.moves), Window(window_nbytes)]
        super().__init__(model, policy, tiers=tiers, observe=[SampleErrors(every=0)], **options)
        self._store.observers.measure(_DryCodecs(memory, work))

    def _scope(self, *, first: bool) -> Scope:
        scope = super()._scope(first=first)
        scope.storages.use(_Held(self._memory), _Held(self._memory))
        return scope


class _Held(dict[int, ref[Any]]):
    """Book of storages that a store keeps as they are; each is labelled when it comes in."""

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


class DryTier(Tier):
    """A tier without memory or a file, whose copies end at once.

    On a `slow` one, as many bytes have not ended as the window admits; a copy ends when later ones come, or someone
    waits for it.

    Attributes
    ----------
    is_used : whether a payload has gone there
    """

    def __init__(self, name: str, window_nbytes: int, work: Work | None, *, slow: bool) -> None:
        self.name = name  # type: ignore[misc]  # of the tier for which it stands
        self.is_used = False
        self._window_nbytes = window_nbytes
        self._work = work
        self._slow = slow
        self._late_nbytes = self._written_nbytes = self._nbytes = 0
        self._queue = deque[tuple[_LateCopy, int]]()

    def reserve(self, nbytes: int) -> Slot | None:
        return Slot(nbytes)

    def write(self, slot: Slot, src: Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        self.is_used = True
        self._written_nbytes += slot.nbytes
        slot.written = self._copy(slot.nbytes, back=False)
        return slot.written

    def read(self, slot: Slot, dst: Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        return self._copy(slot.nbytes, back=True)

    def free(self, slot: Slot) -> None:
        """Do nothing: a slot takes no room here."""

    def trim(self) -> None:
        """Begin a step: its window is a third of the bytes that the last step has moved."""
        if self._slow:
            self._late_nbytes = min(self._window_nbytes, max(LEAST_LATE_NBYTES, self._written_nbytes // 3))
        self._written_nbytes = 0

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _copy(self, nbytes: int, *, back: bool) -> Ticket:
        if self._work is not None:
            self._work.copy(self.name, nbytes, back=back)
        copy = _LateFetch() if back else _LateCopy()
        self._queue.append((copy, nbytes))
        self._nbytes += nbytes
        while self._nbytes > self._late_nbytes:
            first, size = self._queue.popleft()
            first.result()
            self._nbytes -= size
        return copy


class _Ready(PluginTier):
    """Options of a tier that is there, in place of the tier of its name."""

    tier: DryTier

    def __init__(self, tier: DryTier) -> None:
        super().__init__(tier.name)
        object.__setattr__(self, "tier", tier)

    def open(self, device: Device) -> Tier:
        return self.tier


class _LateCopy(Ticket):
    """A copy, which ends when its turn has come, or someone waits for it."""

    def __init__(self) -> None:
        self._ended = False

    def ready(self) -> bool:
        return self._ended

    def wait_on(self, stream: Any) -> None:
        self._ended = True

    def result(self) -> None:
        self._ended = True


class _LateFetch(_LateCopy):
    """A copy back, which is there when someone asks.

    A wait of no time would count as one for a late copy where another process has the core meanwhile, and the store
    would fetch more bytes ahead from then on.
    """

    def ready(self) -> bool:
        return True


def _nothing() -> None:
    pass
