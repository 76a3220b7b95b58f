"""Rules for tensors inside of one recomputed region, by operator or by tag: these tensors wait in the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from actstore.base.operators import PASSING
from actstore.policy import Encode, Keep, Offload, Rules
from actstore.policy.decision import exactly, waits_as
from actstore.policy.operators import COLLECTIVE, covers
from actstore.policy.pattern import Pattern
from actstore.recompute.operators import MAKES_EMPTY, base_name

# They also write to running statistics, which their schema does not say: the region runs them again.
_HIDDEN_WRITES = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_cudnn_rnn", "_cudnn_init_dropout_state"}
)
COMMUNICATION = "c10d"  # namespace of operators that write to their first argument, which their schemas do not say


class InnerRules:
    """Rules by operator and by tag inside of one recomputed region.

    Parameters
    ----------
    policy : the rules
    names : of the region's modules that run again

    Attributes
    ----------
    lossy : whether a tensor may come back with an error
    tags : whether there is a rule by tag
    """

    def __init__(self, policy: Rules, names: Iterable[str]) -> None:
        self._policy = policy
        self._rules = dict(rule for name in names for rule in policy.tensor_rules(name))
        waits = map(waits_as, self._rules.values())
        self.lossy = any(not isinstance(wait, Keep) and not wait.codec.lossless for wait in waits)
        self.tags = any(pattern.tag for pattern in self._rules)
        self._may_keep: dict[Any, bool] = {}
        self._decided: dict[tuple[str, str, str], Keep | Encode | Offload | None] = {}

    def __bool__(self) -> bool:
        return bool(self._rules)

    def has(self, pattern: Pattern) -> bool:
        """Return whether the rule of a pattern is among these."""
        return pattern in self._rules

    def may_keep(self, operator: Any) -> bool:
        """Return whether a rule may be for results of `operator`. Operators that write, and views, run again."""
        found = self._may_keep.get(operator)
        if found is None:
            name = name_of(operator)
            named = self.tags or any(rule.operator and covers(rule.operator, name) for rule in self._rules)
            self._may_keep[operator] = found = named and makes_results(operator)
        return found

    def decide(self, module: str, tag: str = "", operator: str = "") -> Keep | Encode | Offload | None:
        """Return how a tensor of `module` waits that has this tag or that `operator` made; None where it does not."""
        key = module, tag, operator
        if key not in self._decided:
            decided = self._policy.tensor_decision(*key)
            self._decided[key] = None if decided is None else _as_result(waits_as(decided))
        return self._decided[key]


def _as_result(wait: Keep | Encode | Offload) -> Keep | Encode | Offload:
    """Return the decision for a tensor that later operators compute from: signs stay, or else all bits."""
    if isinstance(wait, Keep) or wait.codec.lossless:
        return wait
    kept = wait.codec.keeping_signs
    return exactly(wait) if kept is None else replace(wait, codec=kept)


def name_of(operator: Any) -> str:
    """Return the name of an operator in rules, such as ``aten.gelu`` or ``flash_attn._flash_attn_forward``."""
    return f"{operator.namespace}.{base_name(operator)}" if isinstance(operator, OpOverload) else ""


@cache
def is_collective(operator: Any) -> bool:
    """Return whether a rule for `@collective` is for an operator."""
    return covers(COLLECTIVE, name_of(operator))


def makes_results(operator: Any) -> bool:
    """Return whether an operator makes tensors from tensors, and does nothing else. Collectives may write."""
    if not name_of(operator):
        return False
    if is_collective(operator):
        return True
    name, schema = base_name(operator), operator._schema
    if schema.is_mutable or name in PASSING or name in MAKES_EMPTY or name in _HIDDEN_WRITES:
        return False
    if any(result.alias_info is not None for result in schema.returns):
        return False
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return takes and any("Tensor" in str(result.type) for result in schema.returns)


def draws(operator: OpOverload) -> bool:
    """Return whether an operator may draw random numbers. Other libraries do not tag theirs."""
    is_tagged = torch.Tag.nondeterministic_seeded in operator.tags
    return is_tagged or not (operator.namespace == "aten" or is_collective(operator))


def written_by(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to."""
    for value in written_values(operator, args, kwargs):
        yield from (part for part in tree_leaves(value) if isinstance(part, Tensor))


def written_values(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator writes to, or that hold such tensors."""
    for position, name in _writes(operator):
        yield args[position] if position < len(args) else kwargs.get(name)


@cache
def _writes(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and the names of the arguments that an operator writes to."""
    if not isinstance(operator, OpOverload):
        return ()
    arguments = operator._schema.arguments
    if operator.namespace == COMMUNICATION and base_name(operator) == "send":
        return ()
    if operator.namespace == COMMUNICATION:
        return ((0, arguments[0].name),)
    written = enumerate(arguments)
    return tuple((i, arg.name) for i, arg in written if arg.alias_info is not None and arg.alias_info.is_write)
