"""A store for dry steps: the policy and the hooks of `ActivationStore`, with codecs and tiers that move no bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from actstore.autograd.hooks import Scope
from actstore.base.ledger import Account
from actstore.codecs import Codec
from actstore.codecs.base import Bound
from actstore.devices import Device
from actstore.inspection.fit.memory import LiveMemory
from actstore.inspection.fit.tiers import DryClock, DryDevice, DryTier
from actstore.inspection.fit.work import Work
from actstore.plan.plan import Plan
from actstore.session.activation_store import ActivationStore
from actstore.session.observers import SampleErrors
from actstore.tiers import PluginTier, Tier, Window
from actstore.transfer.engine import DEVICE_WINDOW_NBYTES, HOST_WINDOW_NBYTES

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
