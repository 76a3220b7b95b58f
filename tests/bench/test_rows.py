"""Which rows there are, and how flags choose among them."""

from __future__ import annotations

import pytest

from actstore.bench import rows
from actstore.bench.rows import BITSANDBYTES, PLAIN, ROWS, parse_policies, select
from actstore.errors import ActstoreError, ConfigError


def test_all_rows_are_there() -> None:
    assert [row.name for row in ROWS] == [
        "plain",
        "torch checkpoint",
        "save_on_cpu",
        "bitsandbytes 8-bit",
        "raw @ host",
        "raw @ disk",
        "expack",
        "int8",
        "int8 @ host",
        "int8 @ disk",
        "int4",
        "recompute",
        "recompute(raw @ disk)",
        "recompute(int8)",
    ]


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_spec", lambda name: None)
    assert BITSANDBYTES.missing() == "bitsandbytes is not installed"
    assert PLAIN.missing() == ""


def test_select_keeps_plain_and_the_order() -> None:
    assert [row.name for row in select(list(ROWS), ["int8", "raw @ host"])] == ["plain", "raw @ host", "int8"]
    assert select(list(ROWS), []) == list(ROWS)
    with pytest.raises(ConfigError, match="no row is called 'int9'; near ones: int8"):
        select(list(ROWS), ["int9"])


def test_parse_policies() -> None:
    (row,) = parse_policies([" mine = blocks.*.mlp : int8 @ disk "])
    assert (row.name, row.kind, row.policy) == ("mine", "ours", "blocks.*.mlp : int8 @ disk")


@pytest.mark.parametrize("option", ["int8", "=int8", "mine=", "plain=int8"])
def test_parse_policies_refuses(option: str) -> None:
    with pytest.raises(ConfigError, match="--policy"):
        parse_policies([option])


def test_a_policy_that_does_not_parse_is_refused_before_the_run() -> None:
    with pytest.raises(ActstoreError, match="int9"):
        parse_policies(["mine=int9"])
