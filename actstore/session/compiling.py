"""Compilation of a store's model, with the policy in the graphs, and the way to the tier of a plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import inf
from typing import Any
from weakref import ref

import torch
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from actstore.accuracy import Sampler
from actstore.accuracy.influence.influence import Influence
from actstore.auto.controller import AutoController
from actstore.auto.graph import GraphSteps
from actstore.auto.links import rates_alone
from actstore.base.ledger import Ledger
from actstore.compiled.backend import INDUCTOR, GraphBackend
from actstore.compiled.budget.costs import bytes_per_ms
from actstore.compiled.budget.lane import MIN_NBYTES, TierLane
from actstore.compiled.budget.plan import RegionBudget
from actstore.compiled.rules import GraphRules
from actstore.errors import ConfigError
from actstore.model.blocks import repeated_blocks
from actstore.model.names import named_modules
from actstore.model.units import device_of
from actstore.plan.values import Grants
from actstore.policy import Auto, Bits, Policy, Recompute, Rules
from actstore.session.controllers import StepPolicy, grants_of
from actstore.store.store import Store
from actstore.tiers import Window
from actstore.tiers.arena import SEGMENT_NBYTES
from actstore.tiers.options import read_tiers

HOST_WINDOWS_NBYTES = 4 * 2**20, 8 * 2**20, 16 * 2**20
DEVICE_WINDOWS_NBYTES = 32 * 2**20, 128 * 2**20
USED_SHARE, FILE_SHARE = 0.75, 0.99  # of the limit of a tier
PAYLOAD_NBYTES = 4 * 2**20  # of those that are timed


def read_inner(options: dict[str, Any]) -> str | Callable[..., Any]:
    """Take the back end out of the options for `torch.compile`.

    Raises
    ------
    ConfigError : options for Inductor beside another back end
    """
    inner: str | Callable[..., Any] = options.pop("backend", INDUCTOR)
    for name in ("mode", "options"):
        if inner != INDUCTOR and options.get(name):
            raise ConfigError(f"{name}={options[name]!r}: is for {INDUCTOR!r}, and backend={inner!r}. Leave it out.")
    return inner


def compile_part(part: Module, backend: GraphBackend, options: dict[str, Any]) -> Callable[..., Any]:
    """Return the compiled call of a module.

    Raises
    ------
    ConfigError : there is a budget, and more than one graph is allowed
    """
    if backend.budget is not None and not options.setdefault("fullgraph", True):
        raise ConfigError("fullgraph=False: a budget is for one graph. Leave it out, and mend the breaks of graphs.")
    with _wrapped(part):
        compiled: Callable[..., Any] = torch.compile(part._call_impl, backend=backend, **options)
    return compiled


def _wrapped(part: Module) -> AbstractContextManager[Any]:
    """Let PyTorch compile a module of its own, such as `nn.Sequential`: it skips those that no code of a user calls."""
    if not type(part).forward.__module__.startswith("torch."):
        return nullcontext()
    from torch._dynamo import config

    found: AbstractContextManager[Any] = config.patch(wrap_top_frame=True)
    return found


def run_graphs(
    budget: RegionBudget,
    call: tuple[Module, Callable[..., Any]],
    chooser: Auto,
    tiers: Any,
    store: Store,
    observers: tuple[Ledger, Sampler, Influence | None],
    controller: StepPolicy | None,
) -> None:
    """Leave the budget to the graphs, with the tiers that the user grants to "auto".

    Parameters
    ----------
    call : the module, and its compiled call
    tiers : as the user gave them
    observers : of the store's eager steps
    """
    assert isinstance(controller, AutoController)
    options, window = read_tiers(tiers)
    device = device_of(call[0]) or torch.device("cpu")
    windows = windows_of(window, device)
    tier = tier_of(grants_of(chooser, options, 0), window, device)
    budget.allow(tier, windows, lanes_of(store, tier, windows))
    controller.compile(GraphSteps(budget, call, *observers, chooser.max_noise))


def graph_rules(
    policy: Policy,
    chooser: Auto | Bits | None,
    model: Module | None,
    part: Module | None,
    min_nbytes: int,
    *,
    samples: bool,
) -> GraphRules:
    """Return the policy of a store for a compiled module.

    Parameters
    ----------
    chooser : the policy that chooses; None for rules
    model : the store's; None for none
    part : the module that is compiled, `model` or one inside of it; None where it is unknown
    samples : whether graphs measure the errors of their payloads

    Raises
    ------
    ConfigError : the policy is `Bits`, or `Auto` with arguments that graphs do not follow, or for a part of the model;
        it recomputes chains; or `part` is not a part of `model`
    """
    if chooser is not None:
        budget = _budget(chooser, whole=part is model)
        return GraphRules(
            Rules([]), lambda: [] if model is None else named_modules(model), "", min_nbytes, budget=budget
        )
    for decision in policy.decisions if isinstance(policy, Rules) else ():
        if isinstance(decision, Recompute) and (decision.replays or {decision.first, decision.tiles} != {None}):
            raise ConfigError(
                f"decision={decision}: segment, schedule, first and tiles are not for compiled graphs. Leave them out, "
                "or compile the modules inside of the recomputed ones by Module.compile()."
            )
    whole = part if model is None else model
    named = [] if whole is None else named_modules(whole)
    targets = [""] if part is None else [name for name, module in named if module is part]
    if not targets:
        raise ConfigError(
            f"model={type(part).__name__}: is not a part of the store's model, {type(whole).__name__}. Compile that, "
            "or modules of it."
        )
    roots, parts = frozenset[str](), frozenset[str]()
    if model is not None and isinstance(policy, Rules) and policy.recomputes:
        regions = policy.regions([name for name, _ in named], repeated_blocks(model))
        inside = [
            name for name, _ in named if name == targets[0] or name.startswith(f"{targets[0]}.") or not targets[0]
        ]
        roots, parts = (frozenset(each).intersection(inside) for each in (regions.roots, regions.parts))

    def modules() -> list[tuple[str, Module]]:  # when a graph is compiled: users replace modules
        return [] if whole is None else named_modules(whole)

    return GraphRules(policy, modules, targets[0], min_nbytes, roots, parts, samples=samples)


def _budget(chooser: Auto | Bits, *, whole: bool) -> RegionBudget:
    if isinstance(chooser, Bits):
        raise ConfigError(f"policy={chooser}: does not choose for compiled graphs. Give rules, such as 'int8'.")
    if chooser.group is not None:
        raise ConfigError(
            f"policy={chooser}: group is not for compiled models. Leave it out: Auto({chooser.budget!r})."
        )
    if chooser.tiles:
        raise ConfigError(f"policy={chooser}: tiles are not for compiled models. Leave them out.")
    if not whole:
        raise ConfigError(f"policy={chooser}: a budget is for the whole model. Compile it by store.compile().")
    return RegionBudget(chooser.budget_nbytes)


def tier_of(grants: Grants, window: Window, device: torch.device) -> tuple[str, float] | None:
    """Return the tier that a plan may use, and the limit of the bytes there; None for none.

    Host memory for another device than the CPU, or else the disk that the user grants. None as well where payloads may
    stay on the device when the window is full: no plan knows how many.
    """
    if window.when_full != "wait":
        return None
    for name, nbytes in (("host", 0 if device.type == "cpu" else grants.host), ("disk", grants.disk)):
        if nbytes != 0:
            return name, inf if nbytes is None else nbytes
    return None


def windows_of(window: Window, device: torch.device) -> tuple[int, ...]:
    """Return the windows that a plan may choose from, where the user has given `window`."""
    most = window.limit_nbytes
    windows = HOST_WINDOWS_NBYTES if device.type == "cpu" else DEVICE_WINDOWS_NBYTES
    return windows if most is None else (*(each for each in windows if each < most), most)


def lanes_of(
    store: Store, tier: tuple[str, float] | None, windows: tuple[int, ...]
) -> Callable[[torch.device], TierLane | None]:
    """Return a function that measures the way from a device to a tier, once. Compiled code keeps it, but not the store.

    A tier holds fewer bytes than its limit: pinned memory has idle parts, and files have blocks.
    """
    weak = ref(store)

    @cache
    def lane_of(device: torch.device) -> TierLane | None:
        store = weak()
        if tier is None or store is None:
            return None
        name, limit = tier
        with _disable_current_modes(), torch.no_grad():
            place = store.place(device)
            if name == "host" and place.device.on_host:
                return None  # the model has moved to the CPU since it was compiled
            limit = USED_SHARE * (limit - SEGMENT_NBYTES) if name == "host" else FILE_SHARE * limit
            rates = rates_alone(place, name, PAYLOAD_NBYTES)
            if rates is None:
                return None
            on_host, recycles = place.device.on_host, place.device.recycles(MIN_NBYTES)
            return TierLane(name, limit, *rates, bytes_per_ms(device), windows, on_host, recycles)

    return lane_of
