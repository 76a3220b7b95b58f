"""Decisions as values, rules that give one to each saved tensor, and their text."""

from actstore.policy.decision import Decision, Derive, Encode, Keep, Offload, Policy, Recompute
from actstore.policy.grammar import parse_decision
from actstore.policy.rules import Rules

parse = Rules.parse

__all__ = [
    "Decision",
    "Derive",
    "Encode",
    "Keep",
    "Offload",
    "Policy",
    "Recompute",
    "Rules",
    "parse",
    "parse_decision",
]
