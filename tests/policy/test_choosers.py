"""Auto and Bits: their text reads back to equal values, and what cannot be is refused with the next step."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actstore import Auto, Bits
from actstore.errors import CapacityError, ConfigError
from actstore.policy import parse_chooser

NOISE = st.floats(0, 10).map(lambda noise: float(f"{noise:g}"))
BUDGETS = st.sampled_from(["20GiB", "1.5 GB", "160GiB/node", "4096"])
CHOOSERS = (
    st.builds(Auto, BUDGETS, NOISE)
    | st.builds(Auto, max_noise=NOISE, total=BUDGETS)
    | st.builds(Auto, BUDGETS, tiles=st.booleans())
    | st.builds(Bits, NOISE)
    | st.builds(Bits, held=BUDGETS)
)


@given(CHOOSERS)
def test_the_text_reads_back(chooser):
    assert parse_chooser(str(chooser)) == chooser
    assert eval(repr(chooser)) == chooser
    assert pickle.loads(pickle.dumps(chooser)) == chooser
    assert parse_chooser(f"  {str(chooser).replace('(', ' ( ').replace(', ', ',')} ") == chooser


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("auto(budget=20GiB)", Auto("20GiB")),
        ("auto(max_noise=0.1, budget=20GiB)", Auto("20GiB", 0.1)),
        ("auto(total=24GiB)", Auto(total="24GiB")),
        ("auto(1GiB, tiles=true)", Auto("1GiB", tiles=True)),
        ("auto(total=1GiB, tiles)", Auto(total="1GiB", tiles=True)),
        ("auto(1GiB, tiles=false)", Auto("1GiB")),
        ("bits(0.1)", Bits(0.1)),
        ("bits(held = 4GiB)", Bits(held="4GiB")),
    ],
)
def test_forms_of_the_text(text, wanted):
    assert parse_chooser(text) == wanted


@pytest.mark.parametrize("text", ["int8", "keep", "auto.* : int8", "autos(1)", "bits : keep", "auto(1GiB) @ host", ""])
def test_other_policies_are_not_read(text):
    assert parse_chooser(text) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("auto", ["policy='auto'", "a budget must be given", 'Auto("20GiB")']),
        ("auto()", ["a budget must be given"]),
        ("auto(max_noise=0.1)", ["a budget must be given"]),
        ("bits", ["a limit must be given", "Bits(max_noise=0.1)"]),
        ("bits(0.1, held=4GiB)", ["exactly one"]),
        ("auto(1GiB, total=2GiB)", ["exactly one", 'Auto(total="24GiB")']),
        ("auto(total=24)", ["Auto(total)='24'", "Write '24GiB'"]),
        ("auto(1GiB, 0.1)", ["'0.1' is unknown or given twice"]),
        ("auto(1GiB, budget=2GiB)", ["'budget=2GiB' is unknown or given twice"]),
        ("auto(1GiB, noise=0.1)", ["'noise=0.1' is unknown"]),
        ("auto(much)", ["Auto(budget)='much'", "must be a number of bytes"]),
        ("auto(1GiB, max_noise=some)", ["Auto(max_noise)='some'", "must be a fraction"]),
        ("auto(1GiB, tiles=8)", ["Auto(tiles='8'): must be true or false"]),
        ("auto(1GiB, tiles, tiles)", ["'tiles' is unknown or given twice"]),
        ("bits(0.1, tiles)", ["'tiles' is unknown"]),
        ("bits(-1)", ["Bits(max_noise)=-1.0"]),
    ],
)
def test_text_that_cannot_be(text, words):
    with pytest.raises(ConfigError) as info:
        parse_chooser(text)
    for word in words:
        assert word in str(info.value)


def test_a_budget_of_the_node_is_shared(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Auto("8MiB/node").budget_nbytes == Bits(held="8MiB/node").held_nbytes == 2 * 2**20
    assert Bits(0.1).held_nbytes is None


def test_a_total_leaves_a_budget_beside_other_tensors():
    auto = Auto(total="3KiB", max_noise=0.1)
    assert auto.beside(1024) == Auto(2048, 0.1)
    assert Auto(1024).beside(4096) == Auto(1024)
    with pytest.raises(CapacityError, match=r"temporary results take 3\.0 KiB, and leave nothing") as found:
        auto.beside(3072)
    assert found.value.facts["least"] == 3072
    with pytest.raises(ConfigError, match="bounds more than activations"):
        _ = auto.budget_nbytes
