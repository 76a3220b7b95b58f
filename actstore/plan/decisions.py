"""Decisions on a unit of a model: on all of it, on parts of it, or on all but a part.

In figures, plans and files a decision has its policy text as its name, with names relative to the unit: ``recompute``,
``attn : int8``, ``@sdpa : keep; recompute``. What a decision means is read from the values that the text parses to.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from actstore.policy import Decision, Derive, Keep, Offload, Recompute, Rules, parse_decision
from actstore.policy.decision import waits_as
from actstore.policy.grammar import split_rules

KEEP, DERIVE, RECOMPUTE = "keep", "derive", "recompute"
TILES = 8  # slices of a part in tiles
TILED = f"recompute(tiles={TILES})"

OneLines = Mapping[str, Mapping[str, str]]
"""Decisions by unit, by the text of a policy in one line."""


@lru_cache(maxsize=4096)
def by_part(decision: str) -> Mapping[str, Decision]:
    """Return the decision on each part of a unit, in order; the part "" is the unit itself."""
    found: dict[str, Decision] = {}
    for rule in split_rules(decision):
        part, rest = rule.split()
        found[part or ""] = parse_decision(rest.text)
    return found


def recomputes(decision: str) -> bool:
    """Return whether a decision on a unit recomputes it, or a part of it."""
    return any(isinstance(each, Recompute) for each in by_part(decision).values())


def recomputes_all(decision: str) -> bool:
    """Return whether a decision on a unit recomputes it as a whole, maybe with a part in tiles."""
    parts = by_part(decision)
    return "" in parts and all(isinstance(each, Recompute) for each in parts.values())


def in_tiles(part: str, again: str) -> str:
    """Return the decision `again`, which recomputes a unit, with one part in tiles."""
    return f"{part} : {TILED}; {again}"


def has_tiles(decision: str) -> bool:
    """Return whether a part of a unit runs in tiles."""
    return any(isinstance(each, Recompute) and each.tiles for each in by_part(decision).values())


def recomputed_calls(decision: str) -> int | None:
    """Return how many calls of a unit a decision recomputes, where that is a part of them; None otherwise."""
    each = by_part(decision).get("")
    return each.first if isinstance(each, Recompute) else None


def offloads(decision: str) -> bool:
    """Return whether a decision on a unit moves payloads to a tier."""
    return any(isinstance(waits_as(each), Offload) for each in by_part(decision).values())


def encodes_for_derive(decision: str) -> str:
    """Return the lossy decision inside a `derive` on a unit, as ``int8`` of ``derive(int8)``; empty for any other."""
    each = by_part(decision).get("")
    rest = each.rest if isinstance(each, Derive) else Keep()
    return "" if isinstance(rest, Keep) or rest.codec.lossless else str(rest)


def except_from_recompute(part: str, wait: str) -> str:
    """Return the decision that recomputes a unit, except for one part: a child, or the operators "@matmul"."""
    return f"{part} : {wait}; {RECOMPUTE}"


def excepted_part(decision: str) -> str:
    """Return the part that a decision excepts from the recomputation of its unit; empty where it excepts none."""
    parts = by_part(decision)
    return next(iter(parts)) if len(parts) == 2 and parts.get("") == Recompute() else ""


def rules_of(decisions: Mapping[str, str]) -> Rules:
    """Return decisions by unit as rules for a model."""
    rules = [
        (f"{unit}/{part}" if part.startswith("@") else f"{unit}.{part}" if part else unit, each)
        for unit, decision in decisions.items()
        if unit and decision != KEEP
        for part, each in by_part(decision).items()
    ]
    return Rules(rules, Keep())
