"""A profile of a dry step: the bytes of each unit are those of a run, its times come from the work of operators."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch.nn import Module

from actstore.auto.probes import MAX_MEASURED_STEPS, Probes
from actstore.auto.profiler import Profiler
from actstore.autograd.hooks import Scope
from actstore.base.ledger import Account
from actstore.base.ticket import Done, Ticket
from actstore.codecs import Codec
from actstore.codecs.base import Bound
from actstore.devices import Cpu
from actstore.errors import ConfigError
from actstore.inspection.fit.memory import LiveMemory
from actstore.inspection.fit.store import DryStore
from actstore.inspection.fit.work import Work
from actstore.plan.decisions import rules_of
from actstore.plan.profile import Profile
from actstore.plan.solver.chain import Links
from actstore.plan.values import Grants
from actstore.session.entries import StoreEntry
from actstore.store.observers import Gauge

EVERYTHING = Grants(0, None, 0, 0.0)  # limits that leave no decision out, but for those on a disk and lossy ones


class ProfiledStore(DryStore):
    """The store of dry steps under the decisions that "auto" tries, which measures them as "auto" does.

    Parameters
    ----------
    links : rates of the device's links
    """

    def __init__(self, model: Module, memory: LiveMemory, work: Work, links: Links, **options: Any) -> None:
        super().__init__(model, "keep", memory, work, on_host=links.on_host, **options)
        self._on_host = links.on_host
        self._clock = WorkClock(work)
        self._profiler = Profiler(model, self._ledger)
        self._probes = Probes(self._profiler, model, EVERYTHING)
        self._probes.use(links)
        self._decisions: dict[str, str] = {}
        codecs = self._store.observers.gauge
        assert codecs is not None
        self._store.observers.measure(_Measured(codecs, self._profiler))

    def profile(self, train: Callable[[], object]) -> Profile:
        """Run steps until each decision has been tried on each kind of unit, and return their figures.

        Raises
        ------
        ConfigError : no step enters the store and runs backward through the model
        """
        for _ in range(MAX_MEASURED_STEPS):
            if not self._take():
                break
            train()
        if not self._probes.steps:
            raise ConfigError(
                'policy="auto": needs a step with a backward through the model. Return the model that the step calls.'
            )
        return self._probes.profile(torch.device("cpu"))

    def close(self) -> None:
        self._profiler.cancel()
        self._probes.close()
        super().close()

    def _take(self) -> bool:
        """Take the figures of the last step, and choose the next decisions; return False where no try is left."""
        sample = self._profiler.finish()
        if sample is not None and sample.backward:
            self._probes.add(sample)
        decisions = self._probes.untried(on_host=self._on_host, samples=1, room=inf)
        self._decisions = decisions or {}
        return decisions is not None

    def _scope(self, *, first: bool) -> Scope:
        if first:
            if self._profiler.measures:  # the second entry of a step
                self._take()
            self._follow(rules_of(self._decisions))
        scope = super()._scope(first=first)
        if first:
            self._profiler.begin(self._clock, self._decisions)
        return scope

    def _end_forward(self, entry: StoreEntry) -> None:
        self._profiler.end_forward()
        super()._end_forward(entry)


class WorkClock(Cpu):
    """A CPU whose time is that of the counted work."""

    def __init__(self, work: Work) -> None:
        super().__init__(torch.device("cpu"))
        self._work = work

    def mark(self, stream: Any) -> Ticket:
        now = round(self._work.compute_ms * 1e6)
        return Done((now, now))


class _Measured:
    """Gauge that wraps another gauge, and measures its codecs."""

    def __init__(self, codecs: Gauge, profiler: Profiler) -> None:
        self._codecs, self._profiler = codecs, profiler

    @property
    def measures(self) -> bool:
        return self._profiler.measures

    def codec(self, bound: Bound, codec: Codec, account: Account) -> Bound:
        """Return the other gauge's codec, measured."""
        return self._profiler.codec(self._codecs.codec(bound, codec, account), codec, account)

    def recomputing(self, account: Account) -> Callable[[], None]:
        """Begin to measure a recomputation. Returns a function to call at its end."""
        return self._profiler.recomputing(account)
