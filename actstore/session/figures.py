"""Figures of a store: its report, its plan, its trace, and what it holds now."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn import Module

from actstore.accuracy import Sampler
from actstore.accuracy.bits.payloads import Choice
from actstore.accuracy.influence.influence import Influence
from actstore.base.ledger import Ledger
from actstore.compiled.budget.plan import GraphPlan
from actstore.errors import StateError
from actstore.plan.plan import Plan
from actstore.policy import Decision, Policy, Rules
from actstore.session.by_size import rules_by_size
from actstore.session.causes import request_of
from actstore.session.fitted import Fitted
from actstore.session.job_report import JobReport, RankReport
from actstore.session.process import Optimizers, ProcessMemory
from actstore.session.report import Report
from actstore.session.step_policy import StepPolicy
from actstore.store.store import Store
from actstore.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.distributed import ProcessGroup


class StoreFigures:
    """Base of `ActivationStore`: all that only reads a store."""

    _model: Module | None
    _store: Store
    _ledger: Ledger
    _fitted: Fitted
    _sampler: Sampler
    _influence: Influence | None
    _optimizers: Optimizers | None
    _controller: StepPolicy | None
    _given_plan: Plan | None
    _min_nbytes: int

    @property
    def model(self) -> Module | None:
        """Model of the store; None for none."""
        return self._model

    @property
    def policy(self) -> Policy:
        """Policy as a value."""
        return self._fitted.policy

    @property
    def plan(self) -> Plan | GraphPlan | Choice | None:
        """Current result of `Auto` (a Plan, of a compiled model a GraphPlan) or `Bits` (a Choice); None while steps are
        measured."""
        return self._given_plan if self._controller is None else self._controller.plan

    def report(self) -> Report:
        """Return the figures of the last forward, per site and in all, and the errors of the last sampled step.

        Raises
        ------
        AccuracyError : a site lost more than ``SampleErrors(fail=)``, and no call has raised this yet
        """
        store = self._store
        store.poll()
        gradients = None if self._influence is None else self._influence.read()
        circumstances, errors = store.circumstances(self._min_nbytes), self._sampler.errors()
        places = self._fitted.places.values()
        hidden = tuple(place.name for place in places if place.hidden)
        runs = self._model is None or any(place.has_run for place in places)
        named = tuple(place.name for place in places)
        request = request_of(self._fitted.policy, self._controller, self.plan, hidden, named, runs=runs)
        request = replace(request, around_layers=self._fitted.around_layers)
        process = None
        if circumstances.on_host:
            optimizers = [] if self._optimizers is None else self._optimizers.find()
            process = ProcessMemory.now(self._model, self._ledger.held, optimizers)
        return Report.of(self._ledger, circumstances, errors, gradients, request, process)

    def job_report(self, group: ProcessGroup | None = None) -> JobReport | None:
        """Return the figures of the last forward of all ranks, on the first rank of the group; None on the other ranks.

        A collective: each rank of the group calls it on its store, between two steps.

        Parameters
        ----------
        group : the process group; None for all ranks of the job

        Raises
        ------
        StateError : this process has no process group
        """
        if not dist.is_available() or not dist.is_initialized():
            raise StateError("job_report() was called without a process group. Call report(), or init_process_group.")
        self._store.poll()
        mine = RankReport.of(dist.get_rank(), self._ledger, self._fitted.policy, self.plan)
        first = dist.get_rank(group) == 0
        found: list[Any] | None = [None] * dist.get_world_size(group) if first else None
        dist.gather_object(mine, found, group=group, group_dst=0)
        return None if found is None else JobReport(tuple(found))

    def rules_by_size(
        self, larger_than: int | str, decision: Decision | str = "recompute", among: str = "@blocks"
    ) -> Rules:
        """Return rules for the modules that saved more than so many bytes in the last forward, and `keep` for the rest.

        What a module saved includes what the modules inside of it saved, and does not depend on the policy of that
        forward: it is `Report.saved_bytes`, where each storage counts once, for the module that saved it first.

        Parameters
        ----------
        larger_than : bytes, an int or text such as ``"64MiB"``
        decision : what becomes of the larger modules, as a value or text
        among : pattern of the modules to choose from; of modules inside each other that it matches, the outermost

        Raises
        ------
        StateError : no module has saved a tensor yet
        PolicyError : `among` matches no module, names a tag, or the store has no model
        ConfigError : `larger_than` or `decision` does not parse
        """
        return rules_by_size(self._ledger, self._model, larger_than, decision, among)

    @property
    def held_bytes(self) -> int:
        """Bytes of activations that are held on the compute device now."""
        return self._ledger.held

    def held_by_module(self) -> dict[str, int]:
        """Return `held_bytes` by the name of the module that saved them; a region's memory while it runs again is not
        among them."""
        return self._ledger.held_by_module()

    def plot(self) -> Figure:
        """Draw where the bytes of each module waited at the end of the last forward: `report().plot()`."""
        return self.report().plot()

    @property
    def trace(self) -> Trace:
        """Trace of the events so far.

        Raises
        ------
        StateError : the store was made without Trace()
        """
        trace = self._store.events()
        if trace is None:
            raise StateError("the store has no trace. Make it with ActivationStore(..., observe=[Trace()]).")
        return trace
