"""Compilation of a store's model, with the policy in the graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Module

from actstore.auto.controller import AutoController
from actstore.compiled.backend import INDUCTOR, GraphBackend
from actstore.compiled.budget.plan import RegionBudget
from actstore.errors import ConfigError, StateError
from actstore.model.units import device_of
from actstore.plan.plan import Plan
from actstore.policy import Auto, Bits, Decision, Policy, Rules
from actstore.session.controllers import wish_of
from actstore.session.entries import StoreEntry
from actstore.session.figures import StoreFigures
from actstore.session.graph_controller import EagerObservers, GraphController
from actstore.session.graphs import graph_rules
from actstore.session.lanes import lanes_of, tier_of, windows_of
from actstore.session.observers import SampleErrors, Verify
from actstore.tiers.options import read_tiers
from actstore.trace import Trace


class StoreGraphs(StoreFigures):
    """Base of `ActivationStore`: what puts its policy into compiled graphs."""

    _given_policy: str | Rules | Decision | Policy | Auto | Bits | Plan
    _chooser: Auto | Bits | None
    _inside: set[StoreEntry]
    _observe: Iterable[SampleErrors | Trace | Verify]
    _options: dict[str, Any]

    def compile(self, model: Module | None = None, **options: Any) -> None:
        """Compile the model, or a module of it, with the policy in the graphs, in place as `Module.compile` does.

        What a graph saves for backward leaves forward as payloads, and is decoded right before backward reads it. Enter
        the store around forward as always: the report then tells of the tensors inside of the compiled regions.

        Parameters
        ----------
        model : a module of the store's model; None for the store's model
        options : as for `torch.compile`: fullgraph, dynamic, mode, options, and backend, which `backend` takes as
            `inner`

        Raises
        ------
        ConfigError : the module is not a part of the store's model, the store has none, or the policy is one that
            chooses
        """
        part = self._model if model is None else model
        if part is None:
            raise ConfigError("model=None: the store has no model. Give the module to compile.")
        inner = options.pop("backend", INDUCTOR)
        for name in ("mode", "options"):
            if inner != INDUCTOR and options.get(name):
                raise ConfigError(
                    f"{name}={options[name]!r}: is for {INDUCTOR!r}, and backend={inner!r}. Leave it out."
                )
        backend = self._backend(part, inner)
        if backend.budget is not None and not options.setdefault("fullgraph", True):
            raise ConfigError(
                "fullgraph=False: a budget is for one graph. Leave it out, and mend the breaks of graphs."
            )
        with _wrapped(part):
            compiled = torch.compile(part._call_impl, backend=backend, **options)  # as Module.compile, but for later
        if backend.budget is None:
            part._compiled_call_impl = compiled
        else:
            self._plan_in_graphs(backend.budget, part, compiled)

    def backend(self, inner: str | Callable[..., Any] = INDUCTOR) -> Callable[..., Any]:
        """Return a back end for ``torch.compile(model, backend=)``, with the policy in the graphs.

        It is for the whole model, or for a function around it. `compile` also takes a part of the model.

        Parameters
        ----------
        inner : "inductor"; "aot_eager", which runs the graphs as they are; or a function that compiles a graph of ATen
            operators

        Raises
        ------
        ConfigError : `inner` is unknown, or the policy is one that chooses
        """
        backend = self._backend(self._model, inner)
        if backend.budget is not None:
            raise ConfigError(
                f"policy={self._given_policy}: a budget is for a model, and a back end may compile more. Use "
                "store.compile()."
            )
        return backend

    def _backend(self, part: Module | None, inner: str | Callable[..., Any]) -> GraphBackend:
        samples = any(isinstance(each, SampleErrors) and each.every for each in self._observe)
        rules = graph_rules(self._fitted.policy, self._chooser, self._model, part, self._min_nbytes, samples=samples)
        backend = GraphBackend(rules, inner)
        if self._inside:
            raise StateError("a module was compiled inside of the store's context. Compile it before the first step.")
        self._fitted.leave_to_graphs(rules.target)
        return backend

    def _plan_in_graphs(self, budget: RegionBudget, part: Module, compiled: Callable[..., Any]) -> None:
        """Leave the budget to the graphs, with the tiers that the user grants to "auto"."""
        assert isinstance(self._chooser, Auto)
        tiers, window = read_tiers(self._options["tiers"])
        device = device_of(self._model) or torch.device("cpu")
        windows = windows_of(window, device)
        tier = tier_of(wish_of(self._chooser, tiers), window, device)
        budget.allow(tier, windows, lanes_of(self._store, tier, windows))
        before, noise = self._controller, self._chooser.max_noise
        eager = before.eager if isinstance(before, GraphController) else before  # or it is compiled again
        budget.allow_loss(before.lossy if isinstance(before, GraphController) else None)
        if eager is not None and not noise:
            eager.close()
            eager = None
        assert eager is None or isinstance(eager, AutoController)
        observers = EagerObservers(self._ledger, self._sampler, self._influence)
        self._controller = GraphController(budget, (part, compiled), observers, eager, noise)


def _wrapped(part: Module) -> AbstractContextManager[Any]:
    """Let PyTorch compile a module of its own, such as `nn.Sequential`: it skips those that no code of a user calls."""
    if not type(part).forward.__module__.startswith("torch."):
        return nullcontext()
    from torch._dynamo import config

    found: AbstractContextManager[Any] = config.patch(wrap_top_frame=True)
    return found
