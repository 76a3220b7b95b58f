"""Each peer against the best of our rows."""

from __future__ import annotations

import pytest

from actstore.bench.comparison import as_exact, plans, versus
from actstore.bench.result import Duel, RowResult


def row(name: str, kind: str, held: int | None, ratio: float | None, error: float = 0.0, failed: str = "") -> RowResult:
    return RowResult(name, kind, held_bytes=held, ratio=ratio, grad_error=error, bit_equal=error == 0, failed=failed)


OURS = [
    row("keep", "ours", 100, 1.0),
    row("recompute", "ours", 10, 1.4),
    row("int8", "ours", 25, 1.1, 0.002),
    row("int4", "ours", 15, 1.05, 0.02),
    row("broken", "ours", 1, 0.1, failed="gone"),
]


@pytest.mark.parametrize(
    ("peer", "ours", "times", "reason"),
    [
        (row("p", "peer", 10, 1.6), "recompute", 1.4 / 1.6, ""),
        (row("p", "peer", 10, 1.4), "recompute", 1.0, ""),
        (row("p", "peer", 10, 1.4, 0.9), "", None, "its gradients are wrong, by 90 %"),
        (row("p", "peer", 30, 1.5, 0.01), "int8", 1.1 / 1.5, ""),
        (row("p", "peer", 30, 1.5, 0.1), "int4", 1.05 / 1.5, ""),
        (row("p", "peer", 30, 1.5), "recompute", 1.4 / 1.5, ""),
        (row("p", "peer", 9, 9.0), "", None, "none of our rows holds as little"),
        (row("p", "peer", None, 9.0), "", None, "could not be had"),
        (row("p", "peer", 50, 1.5, failed="no compiler"), "", None, "it failed: no compiler"),
    ],
)
def test_the_fastest_of_ours_that_is_as_small_and_as_exact(
    peer: RowResult, ours: str, times: float | None, reason: str
) -> None:
    (found,) = versus([row("plain", "plain", 100, 1.0), peer, *OURS])
    assert found.ours == ours
    assert found.times == (None if times is None else pytest.approx(times))
    assert reason in found.reason
    assert bool(reason) == bool(found.reason)
    assert found.verdict == ("" if times is None else "faster" if times < 1 else "as fast" if times == 1 else "slower")


@pytest.mark.parametrize(("held", "ours"), [(99_950, "keep"), (99_800, "recompute")])
def test_blocks_of_the_allocator_do_not_decide(held: int, ours: str) -> None:
    rows = [row("p", "peer", held, 1.0), row("keep", "ours", 100_000, 1.0), row("recompute", "ours", 10_000, 1.4)]
    assert [one.ours for one in versus(rows)] == [ours]


@pytest.mark.parametrize(("spread", "verdict"), [(0.001, "faster"), (0.4, "as fast")])
def test_what_cannot_be_told_apart(spread: float, verdict: str) -> None:
    rows = [row("p", "peer", 10, None), row("recompute", "ours", 10, None)]
    for one, ratio in zip(rows, (1.4, 1.3), strict=True):
        one.add_times([ratio + spread * (i % 5 - 2) for i in range(15)], [1.0] * 15)
    (found,) = versus(rows)
    assert found.verdict == verdict
    assert found.low <= (found.times or 0) <= found.high


@pytest.mark.parametrize(
    ("duel", "times", "verdict"),
    [
        (Duel("p", "recompute", [10.0, 20.0, 10.0], [9.0, 18.0, 9.0]), 0.9, "faster"),
        (Duel("p", "recompute", [10.0, 20.0, 10.0], [11.0, 22.0, 11.0]), 1.1, "slower"),
        (Duel("p", "recompute", [10.0, 20.0, 10.0, 10.0], [9.0, 18.0, 11.0, 12.0]), 1.0, "as fast"),
        (Duel("p", "another row", [10.0], [1.0]), 1.3 / 1.4, "faster"),
        (Duel("another peer", "recompute", [10.0], [1.0]), 1.3 / 1.4, "faster"),
    ],
)
def test_steps_in_turns_say_more_than_times_of_different_hours(duel: Duel, times: float, verdict: str) -> None:
    """Only of the two that are compared."""
    rows = [row("p", "peer", 10, 1.4), row("recompute", "ours", 10, 1.3)]
    (found,) = versus(rows, [duel])
    assert found.times == pytest.approx(times)
    assert found.verdict == verdict
    assert found.pairs == (len(duel.ours_ms) if (duel.peer, duel.ours) == ("p", "recompute") else 0)


def test_rows_of_about_the_same_time_are_tried_before_a_duel() -> None:
    rows = [row("p", "peer", 10, 1.4)]
    rows += [row(f"{ratio}", "ours", 10, ratio) for ratio in (1.36, 1.3, 1.33, 1.34, 1.5)]
    (found,) = versus(rows)
    assert (found.ours, found.near) == ("1.3", ("1.3", "1.33", "1.34"))
    (found,) = versus(rows, [Duel("p", "1.34", [10.0] * 3, [9.0] * 3)])
    assert (found.ours, found.times, found.near) == ("1.34", pytest.approx(0.9), ("1.3", "1.33", "1.34"))


def test_none_is_as_exact() -> None:
    (found,) = versus([row("p", "peer", 20, 1.5), OURS[3]])
    assert found.reason == "none of our rows that hold as little is as exact"


def test_rounding_of_a_compiler_is_no_advantage() -> None:
    compiled = row("compile", "peer", 1, 1, 1e-8)
    assert as_exact(row("a", "ours", 1, 1, 5e-7), compiled)
    assert as_exact(row("a", "ours", 1, 1), compiled)
    assert as_exact(row("a", "ours", 1, 1, 0.002005), row("compile", "peer", 1, 1, 0.002))
    assert not as_exact(row("a", "ours", 1, 1, 0.0021), row("compile", "peer", 1, 1, 0.002))
    assert not as_exact(row("a", "ours", 1, 1, 2e-6), compiled)
    assert not as_exact(row("a", "ours", 1, 1, 1e-9), row("p", "peer", 1, 1))


def test_plans_at_the_bytes_of_exact_peers() -> None:
    peers = [
        ("torch checkpoint", 100, 0.0),  # less than plans are asked for
        ("checkpoint every k-th", 503, 0.0),
        ("save_on_cpu", 1000, 0.0),  # nothing to plan
        ("bitsandbytes 8-bit", 270, 0.003),  # not exact
        ("compile, budget 0.5", 500, 0.002),  # another kernel of batch normalization
        ("selective checkpoint", 503, 0.0),
    ]
    rows = [row(name, "peer", held, 1.0, error) for name, held, error in peers]
    for one in rows:
        one.saved_bytes = 1000
    rows.append(row("broken", "peer", None, None, failed="gone"))
    found = plans(rows)
    assert [one.name for one in found] == ["auto 50.3 %", "auto 55 % in the graph"]
    assert [(one.share, one.compiled) for one in found] == [(0.503, ""), (0.55, "graph")]
