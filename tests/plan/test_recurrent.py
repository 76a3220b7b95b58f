"""Options of a unit that is called again and again, from figures made up so that every number is known."""

from actstore.plan.build import kept
from actstore.plan.profile import Unit, UnitBytes, UnitFigures
from actstore.plan.recurrent import PROBE_SEGMENT, PROBE_SLOTS, recurrent_options, revolve_of, segments_of
from actstore.plan.solver.revolve import advances

CALLS = 160
SAVED, CHAINED, OUTSIDE = 1000, 80, 20  # bytes of one call: all, its input from the call before, its other input
UNIT = Unit("cell", "kind", CALLS, (), True)


def figures(decision, held, backward, work=0.0):
    return UnitFigures(decision, 320.0, backward, {"": UnitBytes(CALLS * SAVED, held)}, work_backward=work)


def measured():
    stored = CALLS * (CHAINED + OUTSIDE)
    segments = stored - (CALLS - CALLS // PROBE_SEGMENT) * CHAINED
    replays = CALLS - CALLS // PROBE_SEGMENT
    return {
        "keep": figures("keep", CALLS * SAVED, 480.0),
        "recompute": figures("recompute", stored, 960.0, 400.0),
        segments_of(PROBE_SEGMENT): figures(segments_of(PROBE_SEGMENT), segments, 960.0 + 3 * (CALLS + replays), 400.0),
    }


def options(found):
    return {option.decision: option for option in recurrent_options(UNIT, found, kept(found))}


def test_a_part_of_the_calls():
    half = options(measured())["recompute(first=80)"]
    assert half.held == 80 * (CHAINED + OUTSIDE) + 80 * SAVED
    assert half.backward == 240  # half of what all calls add
    assert half.backward_peak == half.held  # kept calls are gone when the first recomputation begins
    late = options(measured())["recompute(first=156)"]
    assert late.backward_peak == max(late.held, 156 * (CHAINED + OUTSIDE) + SAVED)


def test_segments():
    found = options(measured())[segments_of(16)]
    assert found.held == CALLS * OUTSIDE + (10 + 1) * CHAINED
    assert found.backward == 480 + 3 * (CALLS + CALLS - 10)  # each call looks for its inputs once
    assert found.backward_peak == found.held + 16 * CHAINED + SAVED


def test_revolve():
    decision = "recompute(schedule=revolve, slots=3)"
    found = options(measured())[decision]
    assert found.held == CALLS * OUTSIDE + 4 * CHAINED
    assert found.backward == 480 + 3 * (advances(CALLS, 3) + 1)


def test_what_a_replay_costs_under_revolve_is_measured_by_itself():
    found = measured()
    replays = advances(CALLS, PROBE_SLOTS) - (CALLS - 1)
    found[revolve_of(PROBE_SLOTS)] = figures(revolve_of(PROBE_SLOTS), 0, 960.0 + 2 * (CALLS + replays), 400.0)
    assert options(found)[revolve_of(3)].backward == 480 + 2 * (advances(CALLS, 3) + 1)
    assert options(found)[segments_of(16)].backward == 480 + 3 * (CALLS + CALLS - 10)


def test_nothing_is_replayed_where_inputs_from_the_call_before_are_small():
    found = measured()
    found[segments_of(PROBE_SEGMENT)] = figures(segments_of(PROBE_SEGMENT), CALLS * (CHAINED + OUTSIDE), 960.0)
    assert all("segment" not in decision and "revolve" not in decision for decision in options(found))


def test_without_a_recomputation_there_is_no_option():
    assert options({"keep": measured()["keep"]}) == {}
