"""Reads the arguments of an ActivationStore."""

from __future__ import annotations

import functools
from typing import Any

from torch.nn import Module

from actstore.accuracy.bits.chooser import Grant
from actstore.base.spec import Site, Spec
from actstore.base.units import parse_nbytes
from actstore.errors import ConfigError, PolicyError
from actstore.plan.plan import Plan
from actstore.plan.wish import Wish
from actstore.policy import Decision, Derive, Encode, Keep, Offload, Policy, Recompute, Rules
from actstore.policy.aliases import expand
from actstore.policy.decision import waits_as


def read_policy(policy: Any, model: Module | None = None) -> Policy:
    """A policy as a value, from whatever users may give. Aliases stand for names of `model`."""
    if isinstance(policy, str):
        policy = Rules.parse(policy)
    if isinstance(policy, Keep | Derive | Encode | Offload | Recompute):
        return Rules([], default=policy)
    if isinstance(policy, Rules):
        return policy if model is None else expand(policy, model)
    if isinstance(policy, Plan):
        return Rules.parse(policy.text)
    if callable(policy):
        return _checked(policy)
    raise PolicyError(
        f"policy={policy!r} is neither text, Rules, a decision such as Encode(Int8()), nor a function "
        "(site, spec) -> decision"
    )


def _checked(policy: Policy) -> Policy:
    """A user's function, whose answers are decisions about tensors."""

    @functools.wraps(policy)
    def decide(site: Site, spec: Spec) -> Decision:
        decision: Any = policy(site, spec)
        if not isinstance(decision, Keep | Derive | Encode | Offload):
            raise PolicyError(
                f"the policy function returned {decision!r} for {site} ({spec}); it decides single tensors, and so "
                "returns Keep(), Derive(), Encode(codec) or Offload(codec, tiers). Modules are recomputed by Rules.",
                site=site,
                decision=decision,
            )
        return decision

    return decide


def read_wish(
    model: Module | None,
    policy: Any,
    budget: int | str | None,
    max_noise: float | None,
    host_budget: int | str | None,
    disk_budget: int | str | None,
) -> Wish | Grant | None:
    """What "auto" and "bits" may use; None for another policy."""
    if policy == "auto":
        if model is None or budget is None:
            raise ConfigError('"auto" plans for a model and a budget: ActivationStore(model, "auto", budget="20GiB")')
        return Wish.read(budget, max_noise or 0.0, host_budget, disk_budget)
    if policy == "bits":
        if model is None or (budget is None) == (max_noise is None):
            raise ConfigError(
                '"bits" chooses codecs for a model and one limit: ActivationStore(model, "bits", max_noise=0.1) for '
                'the fewest bytes, or ActivationStore(model, "bits", budget="4GiB") for gradients disturbed least'
            )
        return Grant.read(budget, max_noise)
    if budget is not None or max_noise is not None:
        raise ConfigError('budget= and max_noise= are for "auto" and "bits", which choose; other policies say it all')
    return None


def window_under(wish: Wish | Grant | None, plan: Plan | None) -> int | None:
    """That of a plan; an eighth of a budget at most, while it is measured; None for the default."""
    if plan is not None:
        return plan.window
    return None if not isinstance(wish, Wish) else max(2**16, min(wish.device // 8, 32 * 2**20))


def read_window(window: int | str) -> int:
    """Bytes, more than none."""
    nbytes = parse_nbytes(window, "window")
    if nbytes == 0:
        raise ConfigError('window=0 lets nothing move; give some megabytes, such as window="64MiB", or leave it out')
    return nbytes


def read_when_full(when_full: str) -> str:
    """One of the three words."""
    if when_full not in ("wait", "keep", "spill"):
        raise ConfigError(f'when_full={when_full!r}; give "wait", "keep" or "spill"', when_full=when_full)
    return when_full


def read_count(count: Any, name: str) -> int:
    """A number of steps, 0 for never."""
    if type(count) is not int or count < 0:
        raise ConfigError(f"{name}={count!r} is no number of steps; give 1 or more, or 0 for never")
    return int(count)


def read_error(error: Any, name: str, sample_errors: int) -> float | None:
    """A relative error above which something happens; None for none."""
    if error is None:
        return None
    if type(error) not in (int, float) or not error >= 0:
        raise ConfigError(f"{name}={error!r} is no relative error; give a number such as 0.05, which is 5 %")
    if not sample_errors:
        raise ConfigError(f"{name}={error!r} needs errors that are measured; give sample_errors=1 or more")
    return float(error)


def may_be_lossy(policy: Policy) -> bool:
    """Whether some payload may be lossy, as far as the policy tells."""
    if not isinstance(policy, Rules):
        return True
    decisions = [policy.default, *(decision for _, decision in policy.rules)]
    return any(isinstance(inner, Encode | Offload) and not inner.codec.lossless for inner in map(waits_as, decisions))


def names_tags(policy: Policy) -> bool:
    """Whether some rule is about tags."""
    return isinstance(policy, Rules) and any("/" in pattern for pattern, _ in policy.rules)


def recomputes(policy: Rules) -> bool:
    """Whether some rule recomputes."""
    return any(isinstance(decision, Recompute) for _, decision in policy.rules) or isinstance(policy.default, Recompute)


def tiers_of(policy: Policy) -> set[str]:
    """The tiers that rules name."""
    found: set[str] = set()
    if isinstance(policy, Rules):
        for decision in [*(decision for _, decision in policy.rules), policy.default]:
            inner = waits_as(decision)
            if isinstance(inner, Offload):
                found.update(inner.tiers)
    return found
