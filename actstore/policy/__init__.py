"""Decisions as values, rules that give one to each saved tensor, policies that choose, and their text."""

from actstore.base.spec import Site, Spec
from actstore.policy.choosers import Auto, Bits, parse_chooser
from actstore.policy.decision import Decision, Derive, Encode, Keep, Offload, Policy, Recompute
from actstore.policy.grammar import parse_decision
from actstore.policy.rules import Rules, may_be_lossy

parse = Rules.parse

__all__ = [
    "Auto",
    "Bits",
    "Decision",
    "Derive",
    "Encode",
    "Keep",
    "Offload",
    "Policy",
    "Recompute",
    "Rules",
    "Site",
    "Spec",
    "may_be_lossy",
    "parse",
    "parse_chooser",
    "parse_decision",
]
