import pickle

import pytest
from hypothesis import given

from actstore.codecs import Int8, Raw
from actstore.errors import ChainError
from actstore.policy import Derive, Encode, Keep, Offload, Recompute, parse_decision
from tests.policy.codecs import Options, Wrap, these_codecs
from tests.policy.strategies import decisions


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (Keep(), "keep"),
        (Encode(Raw()), "raw"),
        (Encode(Int8()), "int8"),
        (Offload(Int8(), "host"), "int8 @ host"),
        (Offload(Raw(), ("host", "disk")), "raw @ host > disk"),
        (Offload(Raw(), ["device", "host", "disk"]), "raw @ device > host > disk"),
        (Derive(), "derive"),
        (Derive(Offload(Raw(), "disk")), "derive(raw @ disk)"),
        (Derive(Encode(Int8())), "derive(int8)"),
        (Recompute(), "recompute"),
        (Recompute(Keep()), "recompute"),
        (Recompute(Encode(Int8())), "recompute(int8)"),
        (Recompute(Offload(Raw(), "disk")), "recompute(raw @ disk)"),
        (Recompute(segment=4), "recompute(segment=4)"),
        (Recompute(Offload(Raw(), "host"), segment=4), "recompute(raw @ host, segment=4)"),
        (Recompute(schedule="sqrt"), "recompute(schedule=sqrt)"),
        (Recompute(first=3, decisions="kept"), "recompute(first=3, decisions=kept)"),
        (Recompute(schedule="revolve", slots=10), "recompute(schedule=revolve, slots=10)"),
        (Recompute(Encode(Int8()), schedule="auto", first=9), "recompute(int8, schedule=auto, first=9)"),
        (Recompute(first=750), "recompute(first=750)"),
        (Encode(Options(flag=True, on=False)), "options(flag, on=false)"),
        (Encode(Options(count=64, ratio=0.25, mode="dither")), "options(count=64, ratio=0.25, mode=dither)"),
        (Encode(Wrap(inner=Options(count=2))), "wrap(options(count=2))"),
    ],
)
def test_text_says_what_differs_from_the_defaults(decision, text):
    assert str(decision) == text
    with these_codecs():
        assert parse_decision(text) == decision


@given(decisions())
def test_text_parses_back_to_an_equal_value(decision):
    with these_codecs():
        assert parse_decision(str(decision)) == decision


@given(decisions())
def test_a_decision_is_a_value(decision):
    copy = pickle.loads(pickle.dumps(decision))
    assert copy == decision
    assert hash(copy) == hash(decision)
    assert copy is not decision


def test_one_tier_may_be_given_alone():
    assert Offload(Raw(), "host") == Offload(Raw(), ("host",)) == Offload(Raw(), ["host"])
    assert Offload(Raw(), "host").tiers == ("host",)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Encode("int8"),
            "Encode takes a codec such as Int8() or Raw(), not 'int8'. Rules.parse takes text.",
        ),
        (lambda: Encode(Int8), "Encode takes a codec, not its class. Call it: Int8()."),
        (lambda: Offload(Raw, "host"), "Offload takes a codec, not its class. Call it: Raw()."),
        (lambda: Offload(Raw(), ()), "Offload needs a tier. Give 'host', 'disk' or both: ('host', 'disk')."),
        (lambda: Offload(Raw(), "cpu"), "'cpu' is not a tier. The tiers are device, group, host, disk."),
        (
            lambda: Offload(Raw(), ("disk", "host")),
            "the ladder 'disk > host' goes up. Each tier holds what the one before refuses: 'host > disk'.",
        ),
        (
            lambda: Offload(Raw(), ("host", "host")),
            "the ladder 'host > host' names a tier twice. Each tier holds what the one before refuses: 'host'.",
        ),
        (
            lambda: Offload(Raw(), "device"),
            "Offload to the device alone moves nothing. Write Encode(Raw()), whose payload stays on the device, "
            "or name a lower tier: 'host', 'disk'.",
        ),
        (
            lambda: Recompute(Recompute()),
            "the inputs of a recomputed module cannot be recomputed or derived themselves. Keep, encode or offload "
            "them, as in recompute(keep), recompute(int8), recompute(raw @ host).",
        ),
        (
            lambda: Derive(Derive()),
            "derive takes the decision on all other tensors, such as Keep() or Offload(Raw(), 'host'), not derive.",
        ),
        (
            lambda: Recompute(segment=0),
            "recompute(segment=0): must be a number of calls. Give an int >= 1.",
        ),
        (
            lambda: Recompute(segment=None),
            "recompute(segment=None): must be a number of calls. Give an int >= 1.",
        ),
        (
            lambda: Recompute(first=True),
            "recompute(first=True): must be a number of calls. Give an int >= 1.",
        ),
        (
            lambda: Recompute(schedule="revolve", slots=0),
            "recompute(slots=0): must be a number of inputs. Give an int >= 1.",
        ),
        (
            lambda: Recompute(schedule="binomial"),
            "schedule='binomial' of recompute: must be sqrt or revolve or auto. For segments of one "
            "length write segment=4.",
        ),
        (
            lambda: Recompute(segment=2, schedule="sqrt"),
            "segment=2 and schedule=sqrt both say which inputs of a chain are stored. Leave one out.",
        ),
        (
            lambda: Recompute(decisions="again"),
            "decisions='again' of recompute: must be kept or anew. Leave it out to keep them where the inputs are "
            "stored with a loss.",
        ),
        (
            lambda: Recompute(schedule="revolve"),
            "schedule=revolve needs the number of inputs that it may store. Write recompute(schedule=revolve, "
            "slots=10), or schedule=auto, which finds one.",
        ),
        (
            lambda: Recompute(slots=3),
            "slots=3 is for schedule=revolve. Write recompute(schedule=revolve, slots=3), or leave slots out.",
        ),
        (
            lambda: Recompute(Raw()),
            "Recompute takes the decision on its inputs, such as Keep() or Offload(Raw(), 'host'), not Raw().",
        ),
    ],
)
def test_what_cannot_work_cannot_be_built(build, message):
    with pytest.raises(ChainError) as caught:
        build()
    assert str(caught.value) == message
