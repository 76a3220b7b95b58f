"""Readers of policies and of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from actstore.errors import ConfigError, PolicyError
from actstore.model.units import device_of, digest_of
from actstore.policy import (
    Auto,
    Bits,
    Decision,
    Derive,
    Encode,
    Keep,
    Offload,
    Policy,
    Recompute,
    Rules,
    Site,
    Spec,
    parse_chooser,
)  # fmt: skip
from actstore.policy.aliases import expand

if TYPE_CHECKING:
    from actstore.plan.plan import Plan

_RULES = str, Rules, Keep, Derive, Encode, Offload, Recompute  # forms of rules


def listed(given: Any) -> Any:
    """Return a list of an iterator's items, because it can be read only once; any other object as it is."""
    return list(given) if isinstance(given, Iterator) else given


def read_model(model: Any) -> Module | None:
    """Return the model.

    Raises
    ------
    ConfigError : it is not a Module, or is on several devices
    """
    if model is None:
        return None
    if not isinstance(model, Module):
        raise ConfigError(
            f"model={model!r}: must be a torch.nn.Module. Give the model first and the policy second, or policy= alone "
            "for code without a model."
        )
    first: tuple[str, torch.device] | None = None
    for name, tensor in model.named_parameters():
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            raise ConfigError(
                f"the model lies on several devices: {first[0]} on {first[1]}, {name} on {tensor.device}. "
                "Move it to one (model.to(device)), or make one store for the part on each device.",
                devices=(first[1], tensor.device),
            )
    return model


def check_flag(name: str, value: Any) -> bool:
    """Return the flag.

    Raises
    ------
    ConfigError : it is not True or False
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be True or False.")
    return value


def check_seed(seed: Any) -> int:
    """Return the seed.

    Raises
    ------
    ConfigError : it is not a whole number
    """
    if not isinstance(seed, int):
        raise ConfigError(f"seed={seed!r}: must be a whole number.")
    return seed


def read_chooser(model: Module | None, policy: Any) -> Auto | Bits | None:
    """Return the policy if it chooses decisions; None for any other policy.

    Raises
    ------
    ConfigError : its text does not parse, or the model is missing
    """
    chooser = parse_chooser(policy) if isinstance(policy, str) else policy
    if not isinstance(chooser, Auto | Bits):
        return None
    if model is None:
        raise ConfigError(f"policy={chooser}: needs a model. Write ActivationStore(model, {chooser!r}).")
    return chooser


def check_policy(policy: Any) -> None:
    """Check the parts of a policy that need no model.

    Raises
    ------
    PolicyError, ChainError, UnknownCodecError, ConfigError : it does not parse
    """
    chooser = parse_chooser(policy) if isinstance(policy, str) else policy
    if not isinstance(chooser, Auto | Bits):
        read_policy(policy)


def read_policy(policy: Any, model: Module | None = None) -> Policy:
    """Return a policy as a value, from any form that users give. Aliases stand for names of `model`."""
    if isinstance(policy, str):
        policy = Rules.parse(policy)
    if isinstance(policy, Keep | Derive | Encode | Offload | Recompute):
        return Rules([], default=policy)
    if isinstance(policy, Rules):
        return policy if model is None else expand(policy, model)
    if is_plan(policy):
        return Rules.parse(policy.text)
    if callable(policy) and not isinstance(policy, type):
        return _checked(policy)
    raise PolicyError(
        f"policy={policy!r}: must be text, Rules, a decision such as Encode(Int8()), Auto(...), Bits(...), a Plan, or "
        "a function (site, spec) -> decision."
    )


def _checked(policy: Policy) -> Policy:
    """Return a user's function with a check that its results are decisions on tensors."""

    @functools.wraps(policy)
    def decide(site: Site, spec: Spec) -> Decision:
        decision: Any = policy(site, spec)
        if not isinstance(decision, Keep | Derive | Encode | Offload):
            raise PolicyError(
                f"the policy function returned {decision!r} for {site} ({spec}). It decides single tensors. "
                "Return Keep(), Derive(), Encode(codec) or Offload(codec, tiers). Modules are recomputed by Rules.",
                site=site,
                decision=decision,
            )
        return decision

    decide.names_operators = True  # type: ignore[attr-defined]  # as `Rules.names_operators`: it may read the site's
    return decide


def is_plan(policy: Any) -> bool:
    """Return whether a policy is a Plan."""
    if isinstance(policy, _RULES):
        return False
    from actstore.plan.plan import Plan

    return isinstance(policy, Plan)


def read_plan(policy: Any, model: Module | None) -> Plan | None:
    """Return the policy if it is a plan; None for any other policy.

    Raises
    ------
    ConfigError : the model or the machine is not that of the plan; the text names the differences and the next step
    """
    if not is_plan(policy):
        return None
    if model is None:
        raise ConfigError("a plan is for a model. Write ActivationStore(model, plan).")
    from actstore.auto.machine import machine_of

    plan: Plan = policy
    plan.check(digest_of(model), machine_of(device_of(model) or torch.device("cpu")))
    return plan
