import pytest
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.units import format_nbytes, parse_budget, parse_nbytes
from actstore.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("4096 b", 4096),
        ("1KB", 1000),
        ("1 KiB", 1024),
        ("  20GiB  ", 20 * 2**30),
        ("20gib", 20 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("1.5MiB", 3 * 2**19),
        ("2TB", 2 * 10**12),
        ("2TiB", 2**41),
        ("0.5 KiB", 512),
    ],
)
def test_bytes_are_read(text, nbytes):
    assert parse_nbytes(text) == nbytes
    assert type(parse_nbytes(text)) is int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "budget=-1: must be 0 or more bytes."),
        (True, "budget=True: must be a number of bytes. Give an int or text such as '20GiB'."),
        (1.5, "budget=1.5: must be a number of bytes. Give an int or text such as '20GiB'."),
        (None, "budget=None: must be a number of bytes. Give an int or text such as '20GiB'."),
    ],
)
def test_what_is_not_a_number_of_bytes_is_refused(value, message):
    with pytest.raises(ConfigError) as caught:
        parse_nbytes(value, "budget")
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["", " ", "GiB", "20 gigs", "-1", "1e9", "1,5GB", "20GiB/s", "0x10", "1..5", "ten"])
def test_text_that_is_no_size_is_refused_with_the_units(text):
    with pytest.raises(ConfigError) as caught:
        parse_nbytes(text, "disk")
    assert str(caught.value) == (
        f"disk={text!r}: must be a number of bytes. Write a number and one of B, KB, MB, GB, TB (powers of 1000) or "
        "KiB, MiB, GiB, TiB (powers of 1024), such as '20GiB'."
    )


@given(st.integers(0, 2**53))
def test_an_int_is_what_it_is_as_text_too(nbytes):
    assert parse_nbytes(nbytes) == parse_nbytes(str(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (20 * 2**30, "20.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_bytes_are_written_for_people(nbytes, text):
    assert format_nbytes(nbytes) == text


@given(st.integers(0, 2**50))
def test_what_is_written_reads_back_within_its_precision(nbytes):
    assert abs(parse_nbytes(format_nbytes(nbytes)) - nbytes) <= max(0.05 / 1.0 * nbytes, 0.5)


@pytest.mark.parametrize(
    ("text", "ranks", "nbytes"),
    [
        ("256GiB/node", "8", 32 * 2**30),
        ("256GiB/node", None, 256 * 2**30),
        (" 256 GiB / NODE ", "1", 256 * 2**30),
        ("100/node", "3", 33),
        ("20GiB", "8", 20 * 2**30),
        (4096, "8", 4096),
    ],
)
def test_a_budget_is_for_a_process_or_shared_by_those_of_a_node(monkeypatch, text, ranks, nbytes):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert parse_budget(text, "host_budget") == nbytes


@pytest.mark.parametrize("ranks", ["0", "-1", "", "two", "1.5"])
def test_a_number_of_processes_that_is_none_is_refused(monkeypatch, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with pytest.raises(ConfigError) as caught:
        parse_budget("256GiB/node", "host_budget")
    assert str(caught.value) == (
        f"host_budget='256GiB/node' needs the number of processes of this node. LOCAL_WORLD_SIZE={ranks!r}: must be "
        "an int >= 1. Start with torchrun, set LOCAL_WORLD_SIZE, or give a budget for one process such as '32GiB'."
    )
    assert parse_budget("256GiB", "host_budget") == 256 * 2**30


def test_a_budget_without_a_unit_is_refused():
    with pytest.raises(
        ConfigError, match=r"^Auto\(budget\)='20': must have a unit\. Write '20GiB', or an int for bytes\.$"
    ):
        parse_budget("20", "Auto(budget)")
    assert parse_budget("0") == parse_budget(0) == 0
    assert parse_budget(20) == 20
    assert parse_budget("26214400") == 25 * 2**20


@pytest.mark.parametrize("text", ["/node", "x/node", "20GiB/rank", "20GiB/node/node", "-1/node"])
def test_a_share_of_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match=r"host_budget='.*': must be a number of bytes"):
        parse_budget(text, "host_budget")
