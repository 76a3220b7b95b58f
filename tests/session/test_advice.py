"""The sentences of the report."""

from __future__ import annotations

import pytest

from actstore.session.advice import Figures, why

MIB = 2**20


@pytest.mark.parametrize(
    ("figures", "parts"),
    [
        ({"kept_still_alive": 50 * MIB, "alive_site": "blocks.3"},
         ["were stored, but that freed nothing: something else keeps these tensors alive, most of them at blocks.3;",
          "drop them before forward ends"]),
        ({"kept_still_alive": 50 * MIB}, ["keeps these tensors alive; look for"]),
        ({"kept_small": 50 * MIB, "min_bytes": 256 * 1024}, ["below min_bytes=256.0 KiB", "set min_bytes=0"]),
        ({"kept_no_room": 50 * MIB, "tiers": "host"}, ["found no room in host and", "raise host_budget"]),
        ({"kept_no_room": 50 * MIB}, ["found no room in the tiers and"]),
        ({"kept_protected": 50 * MIB}, ["may not be lossy", "give the rule a tier"]),
        ({"kept_by_policy": 50 * MIB}, ["the policy says so or no rule matches", "`* : int8`"]),
        ({"on_host": 50 * MIB}, ["host memory, which here is the compute device's own", "use `@ disk`"]),
        ({"in_flight": 50 * MIB}, ["had not left the device when forward ended", "store fewer bytes"]),
        ({"peak_held_bytes": 60 * MIB, "held_bytes": 10 * MIB}, ["at the peak of the step", "smaller blocks"]),
    ],
)  # fmt: skip
def test_each_cause_has_figure_cause_and_remedy(figures: dict[str, object], parts: list[str]) -> None:
    (sentence,) = why(Figures(saved_bytes=100 * MIB, **figures))  # type: ignore[arg-type]
    assert sentence.startswith("50.0 MiB (50 % of the saved bytes) ")
    for part in parts:
        assert part in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("figures", "parts"),
    [
        ({"first_step": True, "misses": 8, "fetches": 8}, ["this was the first step", "look at the next one"]),
        ({"misses": 5, "late": 1, "fetches": 8}, ["5 of 8 payloads were not asked for in advance", "same graph"]),
        ({"misses": 1, "late": 5, "fetches": 8}, ["5 of 8 payloads came late", "store fewer bytes"]),
        ({}, ["for room to offload into", "raise the budgets"]),
    ],
)
def test_stalls(figures: dict[str, object], parts: list[str]) -> None:
    (sentence,) = why(Figures(saved_bytes=100, stall_ms=20, step_ms=80, **figures))  # type: ignore[arg-type]
    assert sentence.startswith("Compute waited 20.0 ms of 80.0 ms (25 %)")
    for part in parts:
        assert part in sentence


def test_nothing_saved_at_all() -> None:
    (sentence,) = why(Figures())
    assert "saved 0 bytes" in sentence
    assert "with store:" in sentence


def test_nothing_amiss_needs_no_words() -> None:
    fine = Figures(
        saved_bytes=1000, held_bytes=100, peak_held_bytes=300, kept_small=99, in_flight=50, stall_ms=1, step_ms=100
    )
    assert why(fine) == []


def test_the_weightiest_three_in_their_order() -> None:
    found = why(
        Figures(
            saved_bytes=100, kept_small=15, in_flight=30, on_host=12, kept_no_room=20, stall_ms=25, step_ms=100, late=1
        )
    )
    assert [sentence.split()[0] for sentence in found] == ["30", "Compute", "20"]
