"""The evaluator against a time-stepped reference, the linear program with its choice fixed, and cases done by hand."""

import random
from dataclasses import replace
from math import inf, nan

import pytest

from actstore.errors import ConfigError
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits, Links
from actstore.plan.solver.linear import Linear
from actstore.plan.solver.search import scores
from actstore.plan.solver.tables import Tables
from actstore.plan.solver.timeline import evaluate, evaluated
from tests.oracles.fluid import step_time
from tests.plan.chains import crowded_chain, random_chain, random_limits

KEEP = LayerOption("keep", 100, forward_peak=100, backward_peak=100)
OFFLOAD = LayerOption("raw @ host", 0, 100, 100, forward_peak=100, backward_peak=100)
DISK = LayerOption("raw @ disk", 0, 100, disk=100, forward_peak=100, backward_peak=100)


def chain(*options, out=inf, back=inf, disk_out=inf, disk_back=inf, on_host=False):
    layers = tuple(Layer(f"blocks.{i}", 10, 20, (option,)) for i, option in enumerate(options))
    return LayerChain(layers, Links(out, back, disk_out, disk_back, on_host))


def evaluation(of, **limits):
    return evaluate(of, [0] * len(of.layers), Limits(**{"device": inf, **limits}))


def random_case(seed, most_layers=9):
    """Half of them of any kind, half with little room beside a slow disk."""
    rng = random.Random(seed)
    if seed % 2:
        return crowded_chain(rng, rng.randint(2, most_layers))
    of = random_chain(rng, rng.randint(1, most_layers))
    return of, random_limits(rng, of), [rng.randrange(len(layer.options)) for layer in of.layers]


def test_equal_to_the_linear_program_with_its_choice_fixed():
    feasible = 0
    for seed in range(300):
        of, limits, choice = random_case(seed)
        tables = Tables(of, limits)
        found = evaluated(tables, choice)
        answer = Linear(tables, [[o] for o in choice]).relaxed()
        assert (answer.values is not None) == found.feasible, seed
        if found.feasible:
            feasible += 1
            assert tables.plain + answer.bound == pytest.approx(found.total, rel=1e-6), seed
    assert feasible > 100


def test_equal_to_small_steps_of_time():
    tick, feasible = 1 / 64, 0
    for seed in range(120):
        of, limits, choice = random_case(seed, most_layers=6)
        found = evaluate(of, choice, limits)
        stepped = step_time(of, choice, limits, tick)
        assert (stepped is None) == bool(found.broken), seed
        if stepped is not None:
            feasible += 1
            assert found.total == pytest.approx(stepped, abs=2 * tick * (len(of.layers) + 2)), seed
    assert feasible > 50


def test_a_batch_of_moves_is_as_one_by_one():
    for seed in range(150):
        of, limits, base = random_case(seed)
        rng, tables = random.Random(seed), Tables(of, limits)
        moves = []
        for _ in range(20):
            at = sorted(rng.sample(range(len(base)), rng.randint(1, min(3, len(base)))))
            moves.append(tuple((i, rng.randrange(tables.counts[i])) for i in at))
        found = scores(tables, base, moves)
        for move, total, breach in zip(moves, found.total, found.breach, strict=True):
            changed = dict(enumerate(base)) | dict(move)
            single = evaluated(tables, list(changed.values()))
            assert total == pytest.approx(single.total), (seed, move)
            assert (breach > 0) == bool(single.broken), (seed, move)


def test_stalls_fall_before_the_layer_that_does_not_fit():
    # at F3 100 B are kept and 100 are its own; of 100 queued 4 * 10 left during F2, and of the rest 40 fit: 5 ms
    found = evaluation(chain(OFFLOAD, KEEP, KEEP, out=4), device=240)
    assert found.stalls == ((0, 0, 5), (0, 0, 0))
    assert found.device == ((100, 200, 240), (100, 100, 200))
    assert found.drain == (0, 0)  # the last 40 left during F3
    assert found.total == 95


def test_directions_have_rates_of_their_own():
    of = chain(OFFLOAD, KEEP, KEEP, out=inf, back=4)
    found = evaluation(of, device=220)
    assert found.stalls[0] == (0, 0, 0)
    # 100 B come back, 80 of them during B2 and 20 before, beside B3: they fit there, or 10 of them wait for B3's end
    assert found.stalls[1] == (0, 0, 0)
    assert evaluation(of, device=210).stalls[1] == (0, 0, 2.5)


def test_what_the_last_layer_offloads_is_waited_for():
    found = evaluation(chain(OFFLOAD, out=10, back=5))
    assert found.drain == (10, 20)
    assert found.total == 60


def test_directions_that_hinder_each_other_by_more_than_half_cost_more_at_the_turn():
    of = chain(OFFLOAD, out=10, back=5)
    half, quarter = (replace(of, links=replace(of.links, both_ways=part)) for part in (0.5, 0.25))
    assert evaluation(half).total == 60  # one after the other
    assert (
        sum(evaluation(quarter).drain) == 10 / 0.25 + 10
    )  # 100 B come back beside those that leave, 10 ms' worth later
    for seed in range(40):
        of, limits, choice = random_case(seed)
        tables = Tables(replace(of, links=replace(of.links, both_ways=0.3, disk_both_ways=0.2)), limits)
        found = evaluated(tables, choice)
        assert scores(tables, choice, [((0, choice[0]),)]).total[0] == pytest.approx(found.total)
        assert found.total >= evaluate(of, choice, limits).total - 1e-9


def test_the_disk_is_behind_the_link():
    found = evaluation(chain(DISK, out=10, back=10, disk_out=5, disk_back=4))
    assert found.drain == (20, 25)
    assert found.host_peak == 0  # measured when layers start and end: nothing has crossed by then
    slow_link = evaluation(chain(DISK, out=5, back=4, disk_out=10, disk_back=10))
    assert slow_link.drain == (20, 25)


def test_without_room_in_host_memory_bytes_wait_on_the_device():
    of = chain(DISK, KEEP, KEEP, out=100, disk_out=5)
    free = evaluation(of, device=200)
    assert free.stalls[0] == (0, 0, 0)
    assert free.host_peak == 50  # 100 crossed in F2, and 50 went on to the disk
    tight = evaluation(of, device=200, host=20)
    assert tight.stalls[0] == (0, 0, 6)  # 30 B at the disk's 5 B/ms
    assert tight.host_peak == 20


def test_where_the_device_is_the_host_only_the_disk_counts():
    found = evaluation(chain(DISK, out=1, back=1, disk_out=10, disk_back=5, on_host=True), host=0)
    assert found.drain == (10, 20)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"device": 150}, "200 B of device memory in backward of blocks.1, where 150 B are allowed"),
        ({"host": 50}, "100 B of host memory, where 50 B are allowed"),
        ({"disk": 50}, "100 B on the disk, where 50 B are allowed"),
        ({"error": 0.5}, "error 1 where 0.5 is allowed"),
    ],
)
def test_a_broken_limit_is_named(limits, words):
    small = replace(KEEP, forward_peak=100, backward_peak=100, error=1)
    other = replace(OFFLOAD, link=200, disk=100, held=100)
    found = evaluation(chain(small, other), **limits)
    assert [str(breach) for breach in found.broken] in ([words], [words.replace("backward", "forward")])
    assert not found.feasible


def test_layers_that_take_no_time_and_no_bytes():
    nothing = LayerOption("keep", 0)
    found = evaluate(LayerChain((Layer("a", 0, 0, (nothing,)),) * 3), [0, 0, 0], Limits(0))
    assert found.total == 0
    assert found.feasible
    assert evaluate(LayerChain((), rest=7.0), [], Limits(0)).total == 7.0


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (replace(KEEP, held=-1), "held=-1: must be"),
        (replace(KEEP, link=nan), "link=nan: must be"),
        (replace(KEEP, host=inf), "host=inf: must be"),
        (replace(KEEP, forward=-11), "forward would take -1 ms"),
        (replace(KEEP, backward=nan), "backward would take nan ms"),
        (replace(KEEP, backward_peak=50), "holds 100 bytes, and its peak is 50"),
        (replace(DISK, link=10), "100 bytes go to the disk, and 10 cross the link"),
    ],
)
def test_an_option_that_cannot_be(option, words):
    with pytest.raises(ConfigError, match=words):
        evaluation(chain(option))


def test_limits_links_and_choices_that_cannot_be():
    of = chain(KEEP)
    with pytest.raises(ConfigError, match="the device limit is nan"):
        evaluate(of, [0], Limits(nan))
    with pytest.raises(ConfigError, match="the host limit is -1"):
        evaluate(of, [0], Limits(1, host=-1))
    with pytest.raises(ConfigError, match="`back`=0 bytes/ms: must be"):
        evaluation(chain(KEEP, back=0))
    with pytest.raises(ConfigError, match="layer a has no option"):
        evaluation(LayerChain((Layer("a", 1, 1, ()),)))
    with pytest.raises(ConfigError, match="forward of layer a takes inf ms"):
        evaluation(LayerChain((Layer("a", inf, 1, (KEEP,)),)))
    for choice in ([1], [-1], [], [0, 0]):
        with pytest.raises(ConfigError, match="1 layers need the index of one of their options each"):
            evaluate(of, choice, Limits(inf))
