"""Which rows there are, and how flags choose among them."""

from __future__ import annotations

import pytest

from actstore.bench.peers.rows import ROWS, parse_policies, rows_for, select
from actstore.errors import ActstoreError, ConfigError


def test_the_usual_rows_are_those_of_three_minutes() -> None:
    usual = [row.name for row in ROWS if row.usual]
    assert usual == [
        "plain",
        "torch checkpoint",
        "bitsandbytes 8-bit",
        "derive",
        "raw @ disk",
        "int8",
        "int4",
        "recompute",
        "recompute(int8)",
        "auto 50 %",
    ]
    others = [(row.name, row.usual) for row in rows_for(("a : int8", "b : int8"))[len(ROWS) :]]
    assert others == [("a : int8", False), ("b : int8", False)]
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_select_keeps_plain_and_the_order() -> None:
    assert [row.name for row in select(list(ROWS), ["int8", "raw @ host"])] == ["plain", "int8", "raw @ host"]
    assert select(list(ROWS), []) == [row for row in ROWS if row.usual]
    assert select(list(ROWS), ["all"]) == list(ROWS)
    with pytest.raises(ConfigError, match=r"no row is called 'int9'. Near ones: int8"):
        select(list(ROWS), ["int9"])


def test_parse_policies() -> None:
    (row,) = parse_policies([" mine = blocks.*.mlp : int8 @ disk "], list(ROWS))
    assert (row.name, row.kind, row.policy) == ("mine", "ours", "blocks.*.mlp : int8 @ disk")


@pytest.mark.parametrize("option", ["int8", "=int8", "mine=", "plain=int8", "all=int8"])
def test_parse_policies_refuses(option: str) -> None:
    with pytest.raises(ConfigError, match="--policy"):
        parse_policies([option], list(ROWS))


def test_a_policy_that_does_not_parse_is_refused_before_the_run() -> None:
    with pytest.raises(ActstoreError, match="int9"):
        parse_policies(["mine=int9"], list(ROWS))


def test_rules_of_a_policy_do_not_part_its_name() -> None:
    *_, row = rows_for(("a : recompute; * : derive",))
    assert (row.name, row.policy) == ("a : recompute, * : derive", "a : recompute; * : derive")
