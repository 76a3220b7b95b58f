"""Policies in one line, as people write them: one decision for all blocks, or for all units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.nn import Module

from actstore.auto.exceptions import DERIVE
from actstore.plan.profile import KEEP, except_from_recompute
from actstore.policy.aliases import attention_of

OneLines = Mapping[str, Mapping[str, str]]
"""Decisions by unit, by the text of a policy."""


def one_lines(
    model: Module, units: Iterable[str], blocks: Sequence[str], tiers: Iterable[str], *, lossy: bool
) -> OneLines:
    """Return policies in one line, the most common ones first.

    Parameters
    ----------
    units : all units that a rule can name
    blocks : those that can be recomputed
    """
    units = list(units)
    inner = {block: [] for block in blocks}  # type: dict[str, list[str]]
    for name in attention_of(model):
        for block in blocks:
            if name.startswith(f"{block}."):
                inner[block].append(name[len(block) + 1 :])
    attention = {block: except_from_recompute(names[0], KEEP) for block, names in inner.items() if len(names) == 1}
    recompute = dict.fromkeys(blocks, "recompute")
    found = {
        "@blocks : recompute": recompute,
        "@blocks : recompute; * : derive": dict.fromkeys(units, DERIVE) | recompute,
        "derive": dict.fromkeys(units, DERIVE),
        "@attention : keep; @blocks : recompute": recompute | attention if attention else {},
        "*/@sdpa : keep; @blocks : recompute": dict.fromkeys(blocks, except_from_recompute("@sdpa", KEEP)),
    }
    for tier in tiers:
        found[f"raw @ {tier}"] = dict.fromkeys(units, f"raw @ {tier}")
        found[f"@blocks : recompute(raw @ {tier})"] = dict.fromkeys(blocks, f"recompute(raw @ {tier})")
    if lossy:
        found["int8"] = dict.fromkeys(units, "int8")
    return {text: decisions for text, decisions in found.items() if decisions}
