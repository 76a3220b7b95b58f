"""The simulator against the planner's timeline, against what can be worked out by hand, against published figures."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actstore.errors import CapacityError, ConfigError
from actstore.plan.hardware import GH200, PRESETS, Hardware
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits, Links
from actstore.plan.solver.solve import solve
from actstore.plan.solver.timeline import evaluate
from benchmarks.simulator import jobs, published
from benchmarks.simulator import run as benchmark
from benchmarks.simulator.lanes import Clock, Lane, Pool
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import Block, chosen, equal, options, recurrent, transformer

NO_LIMIT = Limits(inf)


@st.composite
def cases(draw: st.DrawFn) -> tuple[LayerChain, tuple[int, ...], Limits]:
    """A small chain with one option a layer, and a limit under which it runs."""
    sizes = st.integers(0, 40)
    layers = []
    for i in range(draw(st.integers(1, 7))):
        held, payload = float(draw(sizes)), float(draw(sizes))
        peaks = [held + payload + draw(sizes) for _ in range(2)]
        option = LayerOption(
            "any",
            held,
            link=payload,
            host=payload,
            forward=draw(st.integers(0, 2)),
            backward=draw(st.integers(0, 5)),
            forward_peak=peaks[0],
            backward_peak=peaks[1],
        )
        layers.append(Layer(f"l{i}", draw(st.integers(1, 9)), draw(st.integers(1, 18)), (option,)))
    chain = LayerChain(
        tuple(layers), Links(draw(st.integers(1, 12)), draw(st.integers(1, 12))), rest=draw(st.integers(0, 3))
    )
    choice = (0,) * len(layers)
    least = max([1.0, *(breach.needed for breach in evaluate(chain, choice, Limits(0)).broken)])
    return chain, choice, Limits(least + draw(st.integers(0, 120)))


@given(cases(), st.integers(1, 9))
@settings(max_examples=200)
def test_the_timeline_is_the_limit_of_small_chunks(
    case: tuple[LayerChain, tuple[int, ...], Limits], chunks: int
) -> None:
    """A chunk counts as a whole until it has left, and from when it begins to come back: never less memory than in the
    fluid timeline, and at most one chunk more. So the step lies between that of this limit and of a chunk less."""
    chain, choice, limits = case
    fluid = evaluate(chain, choice, limits)
    found = simulate(chain, choice, limits=limits, chunks=chunks, drain=True)
    assert found.ms >= fluid.total * (1 - 1e-9)
    assert found.device <= limits.device * (1 + 1e-6)
    [stage] = found.stages
    assert stage.compute + sum(stage.stalls.values()) + chain.rest == pytest.approx(found.ms)
    chunk = max(layer.options[0].link for layer in chain.layers) / chunks
    tighter = evaluate(chain, choice, Limits(limits.device - chunk))
    assume(tighter.feasible)
    assert found.ms <= tighter.total * (1 + 1e-9)


@given(cases())
@settings(max_examples=40)
def test_many_chunks_give_the_timeline(case: tuple[LayerChain, tuple[int, ...], Limits]) -> None:
    """Of a payload of 40 bytes a chunk has 0.2: so much longer each layer can wait at most, in either direction."""
    chain, choice, limits = case
    found = simulate(chain, choice, limits=limits, chunks=200, drain=True)
    slowest = min(chain.links.out, chain.links.back)
    assert found.ms == pytest.approx(evaluate(chain, choice, limits).total, abs=2 * len(choice) * 0.2 / slowest)


@given(cases(), st.integers(1, 12), st.integers(1, 12), st.integers(0, 200))
@settings(max_examples=40)
def test_many_chunks_give_the_timeline_of_two_hops(
    case: tuple[LayerChain, tuple[int, ...], Limits], out: int, back: int, room: int
) -> None:
    """Everything goes on to a disk, through host memory with little room or much."""
    chain, choice, limits = case
    options = [replace(layer.options[0], host=0.0, disk=layer.options[0].link) for layer in chain.layers]
    layers = tuple(replace(layer, options=(way,)) for layer, way in zip(chain.layers, options, strict=True))
    chain = replace(chain, layers=layers, links=replace(chain.links, disk_out=out, disk_back=back))
    limits = replace(limits, host=1 + room)
    fluid = evaluate(chain, choice, limits)
    found = simulate(chain, choice, limits=limits, chunks=200, drain=True)
    slowest = min(chain.links.out, chain.links.back, out, back)
    assert found.ms >= fluid.total * (1 - 1e-9)
    assert found.ms == pytest.approx(fluid.total, abs=4 * len(choice) * 0.2 / slowest)
    assert found.host <= limits.host * (1 + 1e-6)


@given(cases(), st.integers(1, 9))
@settings(max_examples=100)
def test_copies_beside_the_first_backward_never_cost(
    case: tuple[LayerChain, tuple[int, ...], Limits], chunks: int
) -> None:
    chain, choice, limits = case
    after, beside = (simulate(chain, choice, limits=limits, chunks=chunks, drain=drain) for drain in (True, False))
    assert beside.ms <= after.ms * (1 + 1e-9)


@given(cases(), st.integers(1, 5))
@settings(max_examples=100)
def test_the_disk_of_a_cpu_is_its_link(case: tuple[LayerChain, tuple[int, ...], Limits], chunks: int) -> None:
    chain, choice, limits = case
    moved = tuple(
        replace(layer, options=(replace(layer.options[0], link=0.0, host=0.0, disk=layer.options[0].link),))
        for layer in chain.layers
    )
    links = Links(disk_out=chain.links.out, disk_back=chain.links.back, on_host=True)
    on_disk = simulate(replace(chain, layers=moved, links=links), choice, limits=limits, chunks=chunks)
    by_link = simulate(chain, choice, limits=limits, chunks=chunks)
    assert (on_disk.ms, on_disk.device) == (by_link.ms, by_link.device)
    assert on_disk.stages[0].disk == pytest.approx(sum(layer.options[0].link for layer in chain.layers))


def test_chunks_bring_the_timeline_close() -> None:
    """One tensor a layer, the timeline is some per cent of a step too good; four chunks, under 0.8."""
    late: dict[int, float] = {}
    for rate in (10, 25, 50):
        chain = equal(32, 14, 28, options(900, 33, 14), Hardware(Links(rate, rate)))
        plan = solve(chain, Limits(2700), gap=0.01, time_limit=5)
        for chunks in (1, 4):
            found = simulate(chain, plan.choice, limits=Limits(2700), chunks=chunks, drain=True)
            late[chunks] = max(late.get(chunks, 0.0), found.ms / plan.evaluation.total - 1)
    assert 0.02 < late[1] < 0.06
    assert late[4] < 0.008


def test_lanes_share_a_pool_evenly() -> None:
    clock, pool = Clock(), Pool(10.0)
    ends: dict[str, float] = {}
    first, second, late = Lane(clock, inf, pool), Lane(clock, inf, pool), Lane(clock)
    clock.start(first, 100, lambda: ends.update(first=clock.now))
    clock.start(late, 5, lambda: clock.start(second, 100, lambda: ends.update(second=clock.now)))
    clock.run()
    assert ends == {"first": 15, "second": 20}
    assert first.busy_ms == second.busy_ms == 15


OFFLOADED = LayerOption("raw @ host", 0, link=60, host=60, forward_peak=60, backward_peak=60)
KEPT = LayerOption("keep", 60, forward_peak=60, backward_peak=60)


def pair(links: Links = Links(6, 3)) -> LayerChain:  # noqa: B008
    """Two layers of 10 ms forward and 20 backward; the first leaves in 10 ms and comes back in 20."""
    return LayerChain((Layer("a", 10, 20, (KEPT, OFFLOADED)), Layer("b", 10, 20, (KEPT, OFFLOADED))), links)


def test_copies_beside_compute_are_free() -> None:
    found = simulate(pair(), (1, 0))
    assert found.ms == 60
    assert found.stages[0].copies == {"out": 10, "back": 20, "write": 0, "read": 0}
    assert found.device == 120
    assert found.host == 60


def test_what_comes_late_is_a_stall() -> None:
    found = simulate(pair(), (1, 1))
    assert found.ms == 60 + 10 + 20  # b leaves after its forward and comes back before its backward; a, beside that
    assert found.stages[0].stalls == {"fetch": 30}


def test_no_room_is_a_stall() -> None:
    links = Links(3, 6)  # a leaves in 20 ms, and b's forward has no room beside it
    found = simulate(pair(links), (1, 0), limits=Limits(60), chunks=1)
    assert found.stages[0].stalls == {"memory": 20, "fetch": 10}
    assert found.ms == 60 + 20 + 10
    assert simulate(pair(links), (1, 0), limits=Limits(75), chunks=4).stages[0].stalls["memory"] == 15


def test_copies_slow_each_other_and_compute() -> None:
    slow = Hardware(Links(6, 3), beside_copies=0.5)
    assert simulate(pair(), (1, 0), slow).ms == pytest.approx(10 + (10 + 5) + (20 + 10) + 20)
    chain = equal(4, 1, 2, (OFFLOADED,), Hardware())
    ways = [Hardware(Links(6, 6), both_ways=factor) for factor in (1.0, 0.25)]
    free, slowed = (simulate(chain, (0,) * 4, hardware, stages=2, microbatches=4).ms for hardware in ways)
    assert slowed > free
    free, slowed = (simulate(chain, (0,) * 4, hardware, drain=True).ms for hardware in ways)
    assert slowed == free  # never at once


def test_each_copy_has_its_latency() -> None:
    found = simulate(pair(), (1, 0), Hardware(Links(6, 3), latency=0.5), chunks=4)
    assert found.stages[0].copies["out"] == pytest.approx(10 + 4 * 0.5)


def test_ranks_share_the_node() -> None:
    chain, choice = pair(), (1, 1)
    node = Hardware(Links(12, 12), Links(12, 12))
    assert simulate(chain, choice, node, ranks=4).ms == pytest.approx(simulate(chain, choice, Hardware(Links(3, 3))).ms)
    assert simulate(chain, choice, node, ranks=4).host == pytest.approx(4 * simulate(chain, choice, node).host)
    apart = simulate(chain, choice, node, ranks=2, skew=1000.0)
    assert apart.ms == pytest.approx(1000 + simulate(chain, choice, node).ms)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (4, 8), (4, 2)])
def test_a_pipeline_runs_1f1b(stages: int, microbatches: int) -> None:
    chain = equal(2 * stages, 5, 10, (KEPT,), Hardware())
    found = simulate(chain, (0,) * len(chain.layers), stages=stages, microbatches=microbatches)
    assert found.ms == (microbatches + stages - 1) * 30
    assert [stage.device for stage in found.stages] == [120 * min(stages - s, microbatches) for s in range(stages)]
    assert all(stage.stalls.get("pipeline", 0) <= (stages - 1) * 30 for stage in found.stages)


def test_a_pipeline_with_copies_keeps_the_limit() -> None:
    chain = equal(16, 5, 10, (KEPT, OFFLOADED), Hardware(Links(10, 10)))
    found = simulate(chain, (1, 1, 1, 0) * 4, limits=Limits(480), stages=4, microbatches=8, chunks=3)
    assert found.device <= 480 * (1 + 1e-6)
    assert found.ms >= 11 * 60
    kept = simulate(chain, (0,) * 16, stages=4, microbatches=8)
    assert (kept.ms, kept.device) == (11 * 60, 4 * 4 * 60)
    with pytest.raises(CapacityError, match=r"needs 960 B"):
        simulate(chain, (0,) * 16, limits=Limits(480), stages=4, microbatches=8)


def test_the_window_bounds_both_directions() -> None:
    chain = equal(6, 1, 2, (OFFLOADED,), Hardware(Links(6, 60)))
    free = simulate(chain, (0,) * 6)
    narrow = simulate(chain, (0,) * 6, window=60)
    assert free.device > narrow.device == 120
    assert narrow.stages[0].stalls["window"] > 0
    assert "window" not in free.stages[0].stalls


def test_the_second_hop_goes_through_host_memory() -> None:
    on_disk = LayerOption("raw @ disk", 0, link=60, disk=60, forward_peak=60, backward_peak=60)
    layers = (Layer("a", 10, 20, (on_disk,)), Layer("b", 10, 20, (KEPT,)), Layer("c", 10, 20, (KEPT,)))
    chain = LayerChain(layers, Links(60, 60, 3, 6))
    found = simulate(chain, (0, 0, 0), chunks=4)
    [stage] = found.stages
    assert found.ms == 90
    assert stage.copies == {"out": 1, "write": 20, "read": 10, "back": 1}
    assert stage.disk == stage.host == 60
    tight = simulate(chain, (0, 0, 0), limits=Limits(inf, host=15), chunks=4)
    assert tight.stages[0].host == 15
    slow = Links(60, 60, 6, 6)
    deep = LayerChain((*(Layer(f"d{i}", 10, 20, (on_disk,)) for i in range(6)), *layers[1:]), slow)
    ahead = simulate(deep, (0,) * 8, window=120)
    assert ahead.ms == deep.plain
    assert ahead.host <= 240


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"(forward|backward) of b needs 120 B of device memory, where 100 B"):
        simulate(pair(), (0, 0), limits=Limits(100))
    with pytest.raises(CapacityError, match=r"backward of a waits for ever \(fetch\).*where 30 B are allowed"):
        simulate(pair(), (1, 0), limits=Limits(inf, host=30))
    with pytest.raises(ConfigError, match="chunks=0"):
        simulate(pair(), (0, 0), chunks=0)
    with pytest.raises(ConfigError, match="2 layers need the index"):
        simulate(pair(), (0, 2))
    with pytest.raises(ConfigError, match="do not make 3 stages"):
        simulate(pair(), (0, 0), stages=3)


def test_a_thousand_layers() -> None:
    chain = equal(1024, 14, 28, options(900, 33, 14), Hardware(Links(25, 25)))
    choice = chosen(chain, ["raw @ host", "recompute", "keep", "recompute"] * 256)
    found = simulate(chain, choice, limits=Limits(260_000), ranks=2)
    assert found.events == 2 * (1 + 2 * 1024 + 2 * 256 * 4)
    assert found.device <= 260_000 * (1 + 1e-6)


@pytest.mark.parametrize("parallel", [1, 8])
def test_bytes_of_a_transformer_layer(parallel: int) -> None:
    """The formulas of Korthikanti et al., from the tensors one by one."""
    block = Block(6144, 64, 2048, 4, parallel)
    sbh, scores = 2048 * 4 * 6144, 5 * 64 * 2048 / 6144
    assert block.nbytes() == pytest.approx(sbh * (10 + 24 / parallel + scores / parallel))
    assert block.nbytes(core=False) == pytest.approx(sbh * (10 + 24 / parallel))
    shared = replace(block, sequence_parallel=True)
    assert shared.nbytes() == pytest.approx(sbh * (34 / parallel + scores / parallel))
    assert shared.nbytes(core=False) == pytest.approx(34 * sbh / parallel)
    assert block.boundary == 2 * sbh


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_a_model(name: str) -> None:
    hardware = PRESETS[name]
    chain = transformer(Block(1024, 16, 1024, 4), 12, hardware, 0.4)
    found = simulate(chain, chosen(chain, ["keep"] * 6 + ["raw @ host"] * 6), hardware, Limits(hardware.memory))
    assert found.ms >= chain.plain
    assert found.host > 0
    assert recurrent(8, 512, 32, hardware, 0.2).plain > 0
    assert (hardware.links.back > 2 * hardware.links.out) == (hardware is GH200)


def test_published_figures() -> None:
    compared = [row for row in published.rows() if not row.fitted]
    assert [row for row in compared if row.ours != pytest.approx(row.published, rel=0.1)] == []


def test_offloaded_inputs_are_useless_where_the_peak_is_in_the_recomputation() -> None:
    plain, offloaded = published.short_context("recompute"), published.short_context("recompute(raw @ host)")
    assert offloaded.device == plain.device
    assert offloaded.stages[0].at == "backward of layers.0"
    assert offloaded.ms >= plain.ms
    assert published.long_context("recompute(raw @ host)").device < 0.8 * published.long_context("recompute").device


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_group_keeps_an_input_once_and_reads_the_rest(ranks: int) -> None:
    block = Block(hidden=1024, heads=8, sequence=512, tensor_parallel=ranks)
    chain = jobs.with_group(transformer(block, 6, jobs.A100_SXM, 0.5), block)
    choice = chosen(chain, [jobs.GROUP] * 6)
    option = chain.layers[0].options[choice[0]]
    assert ranks * option.held == block.boundary == option.held + option.link
    again = simulate(chain, chosen(chain, ["recompute"] * 6), jobs.over(inf))
    assert simulate(chain, choice, replace(jobs.over(inf), latency=0.0)).ms == pytest.approx(again.ms)
    rate = option.link / (100 * again.ms)  # of a link that reads one input in a hundred steps
    late = simulate(chain, choice, replace(jobs.over(rate), latency=0.0))
    assert 600 < late.ms / again.ms < 601
    assert late.stalled == pytest.approx(late.ms - again.ms)
    assert late.host == 0


@pytest.mark.parametrize("nodes", [1, 8, 128])
def test_the_slowest_node(nodes: int) -> None:
    drawn = np.random.default_rng(0).normal(1, 0.1, (20_000, nodes)).min(axis=1)
    assert jobs.slowest(nodes, 0.1) == pytest.approx(np.median(drawn), abs=0.003)
    assert jobs.slowest(nodes, 0.0) == 1


def test_a_slower_node() -> None:
    machine = jobs.slower(jobs.A100_SXM, 0.5, 8)
    assert machine.links.out == machine.links.back == 100e6 / 8 / 2
    assert jobs.slower(jobs.A100_SXM, 1.0, 1).links == jobs.A100_SXM.links


def test_the_tables_of_the_page_are_those_of_the_result() -> None:
    """No figure is typed: `python -m benchmarks.simulator.run --page` mends it."""
    page = benchmark.PAGE.read_text()
    assert benchmark.filled(page, json.loads(benchmark.RESULT.read_text())["simulated"]) == page
