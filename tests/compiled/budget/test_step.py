"""Bytes and times of a step, operator by operator."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from actstore.compiled.budget.lane import TierLane
from actstore.compiled.budget.operator import Operator
from actstore.compiled.budget.step import RegionEvaluation, RegionStep
from tests.compiled.budget.random_steps import LANE, random_step


def step_of(*operators: Operator, returned: int, gradients: tuple[int, ...]) -> RegionStep:
    return RegionStep(operators, (returned,), gradients)


def chain() -> RegionStep:
    """input -> 1 -> 2 (a view) -> 3, and backward: 5 reads 3, 6 reads the view."""
    return step_of(
        Operator((), 0, given=True),
        Operator((0,), 1, 100, 1.0),
        Operator((1,), 1, view=True),
        Operator((2,), 3, 10, 2.0),
        Operator((), 4, 10, given=True, late=True),
        Operator((3, 4), 5, 7, 3.0, late=True),
        Operator((2, 5), 6, 50, 4.0, late=True),
        returned=3,
        gradients=(6,),
    )


def test_all_saved() -> None:
    found = chain().evaluate(frozenset({2, 3}))
    assert found.saved == {2, 3}
    assert not found.again
    assert found.held == {1: 100, 3: 10}
    assert found.forward == (1, 2, 3)
    assert found.backward == (5, 6)
    assert found.live == ([100, 100, 110], [127, 167])
    assert found.peak == 167
    assert found.ms == 10.0


def test_one_runs_again_right_before_it_is_read() -> None:
    found = chain().evaluate(frozenset({3}))
    assert found.saved == {0, 3}
    assert found.again == {1, 2}
    assert found.held == {3: 10}
    assert found.backward == (5, 1, 2, 6)
    assert found.live == ([100, 100, 110], [27, 117, 117, 167])
    assert found.ms == 11.0


def test_what_is_barred_is_saved() -> None:
    step = chain()
    operators = [*step.operators]
    operators[1] = Operator((0,), 1, 100, 1.0, barred=True)
    operators[2] = Operator((1,), 1, view=True)
    found = RegionStep(operators, step.returned, step.gradients).evaluate(frozenset())
    assert 1 in found.saved
    assert 1 not in found.again


def test_a_fused_operator_writes_nothing_for_fused_ones() -> None:
    step = step_of(
        Operator((), 0, given=True),
        Operator((0,), 1, 100, fused=True),
        Operator((1,), 2, 100, fused=True, inlined=True),
        Operator((2,), 3, 10, fused=True),
        returned=3,
        gradients=(),
    )
    assert step.evaluate(frozenset()).live[0] == [100, 100, 110]
    operators = [*step.operators[:3], Operator((2,), 3, 10)]
    assert RegionStep(operators, (3,), ()).evaluate(frozenset()).live[0] == [100, 200, 110]


def test_a_loop_takes_the_time_to_write_what_it_writes() -> None:
    step = step_of(
        Operator((), 0, given=True),
        Operator((0,), 1, 100, 1.0, 10.0, fused=True, inlined=True),
        Operator((1,), 2, 100, 2.0, 20.0, fused=True, inlined=True),
        Operator((), 3, 10, given=True, late=True),
        Operator((1, 3), 4, 50, 4.0, 40.0, fused=True, inlined=True, late=True),
        returned=2,
        gradients=(4,),
    )
    assert step.evaluate(frozenset({1})).times == ([11.0, 22.0], [44.0]), "forward writes what it saves"
    assert step.evaluate(frozenset()).times == ([1.0, 22.0], [1.0, 44.0])
    assert [each.again_ms for each in step.operators] == [0.0, 1.0, 2.0, 0.0, 4.0]


def interpreted(step: RegionStep, found: RegionEvaluation) -> tuple[list[int], list[int]]:
    """The bytes while each operator runs, by a naive interpreter that looks ahead at each moment.

    What waits in the tier, or as a payload, has left behind its last reader in forward, and comes back before the first
    one in backward.
    """
    operators = step.operators

    def needed_behind(run: tuple[int, ...], position: int, stays: set[int]) -> set[int]:
        later = {source for index in run[position:] for source in operators[index].inputs} | stays
        return {operators[index].owner for index in later}

    def size(owners: set[int]) -> int:
        return sum(operators[owner].nbytes for owner in owners)

    own = {index for index in found.saved if not operators[index].given}
    elsewhere = found.away.keys() | found.encoded.keys()
    stays = {*step.returned, *(index for index in own if operators[index].owner not in elsewhere)}
    buffers = (lambda moving: 0) if step.lane is None else step.lane.buffers(found.away.values(), found.window)
    gone, coded = set[int](), set[int]()

    def payloads(now: set[int]) -> int:
        """Bytes of payloads, and those to encode or to decode the ones of this moment."""
        return sum(found.encoded[owner] for owner in coded) + sum(operators[owner].code_workspace for owner in now)

    live: tuple[list[int], list[int]] = ([], [])
    exists = set[int]()
    for position, index in enumerate(found.forward):
        exists.add(operators[index].owner)
        free = exists - needed_behind(found.forward, position + 1, stays)
        gone |= found.away.keys() & free
        now = found.encoded.keys() & free - coded
        coded |= now
        live[0].append(size(exists) + buffers(size(gone)) + payloads(now))
        exists &= needed_behind(found.forward, position + 1, stays)
    kept = {("forward", operators[index].owner) for index in stays}
    kept |= {("forward", index) for index, each in enumerate(operators) if each.given and each.late}
    place: dict[int, tuple[str, int]] = {index: ("forward", operators[index].owner) for index in own}
    place |= {index: ("forward", index) for index, each in enumerate(operators) if each.given}
    for index in found.backward:
        view = operators[index].view
        place[index] = place[operators[index].inputs[0]] if view else ("backward", index)
    returned = {("forward", operators[index].owner) for index in step.returned}
    for position, index in enumerate(found.backward):
        kept.add(place[index])
        read = {place[source] for source in operators[index].inputs}
        kept |= {("forward", owner) for owner in elsewhere if ("forward", owner) in read}
        gone -= {owner for owner in found.away if ("forward", owner) in read}
        now = {owner for owner in coded if ("forward", owner) in read}
        live[1].append(sum(operators[owner].nbytes for _, owner in kept) + buffers(size(gone)) + payloads(now))
        coded -= now
        later = {source for each in found.backward[position + 1 :] for source in operators[each].inputs}
        kept &= {place[source] for source in later | set(step.gradients)} | returned
    return live


@pytest.mark.parametrize("seed", range(12))
def test_bytes_are_those_of_a_naive_interpreter(seed: int) -> None:
    step, plain = random_step(seed)
    for count in (0, 1, 2, len(plain)):
        for wanted in list(combinations(sorted(plain), count))[:10]:
            found = step.evaluate(frozenset(wanted))
            assert found.live == interpreted(step, found)


@pytest.mark.parametrize("seed", range(12))
def test_bytes_of_what_waits_in_a_tier_are_those_of_a_naive_interpreter(seed: int) -> None:
    step, plain = random_step(seed, lane=LANE)
    moved = 0
    for count in (1, 2, len(plain)):
        for wanted in list(combinations(sorted(plain), count))[:10]:
            there = step.evaluate(frozenset(wanted))
            movable = step.movable(there)
            for away in ({*movable}, {*movable[::2]}, {*movable[:1]}):
                for window in LANE.windows:
                    found = step.leaving(there, away, window)
                    assert found.away.keys() == away
                    assert found.held.keys() == there.held.keys() - away
                    assert found.live == interpreted(step, found)
                    assert found.ms >= there.ms
                    moved += bool(away)
    assert moved


@pytest.mark.parametrize("lane", [None, LANE], ids=["no tier", "a tier"])
@pytest.mark.parametrize("seed", range(12))
def test_bytes_of_payloads_are_those_of_a_naive_interpreter(seed: int, lane: TierLane | None) -> None:
    step, plain = random_step(seed, lane=lane, encodes=True)
    tried = 0
    for count in (1, 2, len(plain)):
        for wanted in list(combinations(sorted(plain), count))[:10]:
            there = step.evaluate(frozenset(wanted))
            encodable = step.encodable(there)
            for encoded in ({*encodable}, {*encodable[::2]}, {*encodable[:1]}):
                found = step.encoding(there, encoded)
                assert found.encoded == {owner: step.operators[owner].nbytes // 4 for owner in encoded}
                assert found.held == there.held | found.encoded
                assert found.live == interpreted(step, found)
                assert found.ms == there.ms + 2 * 0.25 * len(encoded)
                movable = set(step.movable(found))
                assert movable.isdisjoint(encoded)
                both = step.leaving(found, movable)
                assert both.away.keys() == movable if lane else both is found
                assert both.live == interpreted(step, both)
                assert step.encoding(both, encoded) == found
                assert step.encoding(both, set()) is there
                tried += bool(encoded) and (lane is None or bool(movable))
    assert tried


def test_what_is_returned_and_steps_without_a_loss_encode_nothing() -> None:
    operators = [replace(each, encoded=10 if each.owner == at else 0) for at, each in enumerate(chain().operators)]
    step = RegionStep(operators, (3,), (6,), encodes=True)
    assert step.encodable(step.evaluate(frozenset({2, 3}))) == [1]
    assert replace(step, encodes=False).encodable(step.evaluate(frozenset({2, 3}))) == []
    step = RegionStep(operators, (2,), (6,), encodes=True)
    assert step.encodable(step.evaluate(frozenset({2, 3}))) == [3]
    assert step.evaluate(frozenset({2, 3})).with_masks(7).peak == step.evaluate(frozenset({2, 3})).peak + 7


def test_what_cannot_wait_in_a_tier_stays() -> None:
    """What forward returns, what is saved in part alone, and what its owner does not let go."""
    operators = [*chain().operators]
    whole = [replace(each, movable=100 if each.owner == 1 else 0) for each in operators]
    for changed, movable in (
        (whole, [1]),
        (operators, []),
        ([*whole[:2], replace(whole[2], movable=40), *whole[3:]], []),
    ):
        step = RegionStep(changed, (3,), (6,), lane=LANE)
        assert step.movable(step.evaluate(frozenset({2, 3}))) == movable
    step = RegionStep(whole, (2,), (6,), lane=LANE)
    assert step.movable(step.evaluate(frozenset({2, 3}))) == []
    step = RegionStep(whole, (3,), (6, 2), lane=LANE)
    assert step.movable(step.evaluate(frozenset({2, 3}))) == [], "it is a gradient, too"
    assert chain().leaving(chain().evaluate(frozenset({2, 3})), {1}).held == {1: 100, 3: 10}, "no tier"


def test_parts_that_make_up_all_of_a_result_leave_as_one() -> None:
    step = step_of(
        Operator((), 0, given=True),
        Operator((0,), 1, 90, 1.0, movable=90),
        *(Operator((1,), 1, view=True, movable=30) for _ in range(3)),
        Operator((2, 3, 4), 5, 10, 2.0),
        Operator((), 6, 10, given=True, late=True),
        Operator((2, 3, 4, 6), 7, 7, 3.0, late=True),
        Operator((2, 3, 7), 8, 7, 3.0, late=True),
        returned=5,
        gradients=(8,),
    )
    step = replace(step, lane=LANE)
    assert step.leaving(step.evaluate(frozenset({2, 3, 4})), {1}).away == {1: 90}
    two = replace(
        step, operators=[*step.operators[:7], replace(step.operators[7], inputs=(2, 3, 6)), step.operators[8]]
    )
    assert two.leaving(two.evaluate(frozenset({2, 3})), {1}).away == {}
