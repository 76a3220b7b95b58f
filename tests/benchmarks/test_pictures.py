"""The pictures: their texts can be read, and their marks are where the figures are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from actstore.bench import plot
from actstore.bench.result import Result, RowResult
from actstore.trace import Event
from actstore.trace import picture as timeline
from actstore.trace.summary import Summary
from benchmarks import largest
from benchmarks.suite import breakdown, convergence, scaling
from tests.bench.figures import MADE_UP, MIB
from tests.bench.legible import faults

CROWD = [  # name, time, held: as crowded as a real run
    ("save_on_cpu", 0.97, 200), ("torchtune offload", 1.02, 200), ("TRL offload", 1.01, 200), ("compile", 0.8, 150),
    ("compile, budget 0.5", 0.9, 80), ("checkpoint every k-th", 1.25, 30), ("selective checkpoint", 1.2, 90),
    ("checkpoint_sequential", 1.3, 25), ("DeepSpeed checkpoint", 1.5, 17), ("torch checkpoint", 1.47, 17),
    ("DeepSpeed cpu_checkpointing", 1.55, 16), ("bitsandbytes 8-bit", 1.67, 53),
]  # fmt: skip


@pytest.mark.parametrize("name", list(MADE_UP))
def test_texts_can_be_read(name: str) -> None:
    draw = {"breakdown": breakdown, "scaling": scaling, "largest": largest, "convergence": convergence}[name].draw
    assert faults(draw(MADE_UP[name])) == []


def test_texts_of_a_front_can_be_read(result: Result) -> None:
    result.rows += [RowResult(name, "peer", ratio=x, held_bytes=y * MIB, bit_equal=True) for name, x, y in CROWD]
    assert faults(plot.draw(result)) == []


def test_texts_of_a_timeline_can_be_read() -> None:
    ms = 1_000_000
    events = [
        Event("forward", 0, 40 * ms), Event("recompute", 45 * ms, 60 * ms), Event("encode", 5 * ms, 6 * ms),
        Event("backward", 40 * ms, 100 * ms), Event("decode", 70 * ms, 72 * ms), Event("stall", 60 * ms, 70 * ms),
        Event("offload", 10 * ms, 30 * ms, "a", 0, "disk", 40 * ms),
        Event("fetch", 50 * ms, 70 * ms, tier="host", nbytes=9),
    ]  # fmt: skip
    assert faults(timeline.draw(events, Summary.of(events), "step 7 on a device with a rather long name")) == []


def test_faults_are_found() -> None:
    figure = Figure(figsize=(3, 2))
    figure.text(0.5, 0.5, "one")
    figure.text(0.5, 0.5, "other")
    figure.text(0.98, 0.9, "far out")
    assert faults(figure) == ["'far out' is cut off", "'one' lies upon 'other'"]


def test_a_front_leaves_out_what_is_beaten() -> None:
    assert plot.front([(1.2, 50), (1.0, 200), (1.1, 200), (1.3, 50), (1.4, 10)]) == [(1.0, 200), (1.2, 50), (1.4, 10)]


def test_bars_of_a_step_stand_end_to_end() -> None:
    axes = breakdown.draw(MADE_UP["breakdown"]).axes[0]
    for bars in zip(*axes.containers, strict=True):
        edges = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]
        assert edges[0][0] == 0
        assert [end for _, end in edges[:-1]] == pytest.approx([start for start, _ in edges[1:]])


@pytest.mark.parametrize("losses", [[3.0, 2.0, 1.0], [float(step) for step in range(100)]])
def test_a_curve_keeps_the_mean(losses: list[float]) -> None:
    x, y = convergence.smooth(losses)
    assert len(x) == len(y) <= convergence.POINTS
    assert sum(y) / len(y) == pytest.approx(sum(losses) / len(losses), rel=0.03)


def test_a_loss_that_is_not_finite_is_far_astray() -> None:
    def row(*losses: Any) -> RowResult:
        return RowResult("a", "ours", losses=list(losses))

    assert convergence.astray(row(1.0, None), row(1.0, 1.0)) == float("inf")
    assert convergence.astray(row(1.0, 1.5), row(1.0, 1.0)) == 0.5
