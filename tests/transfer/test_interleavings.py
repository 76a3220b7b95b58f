"""Random programs on the simulated accelerator: see tests/transfer/programs.py for what each proves."""

from collections import Counter

import pytest

from actstore.transfer.parcel import NEXT, Parcel, ParcelState
from tests.transfer.programs import Options, check, small_memory

PROGRAMS = 20_000
CHUNK = 400
USUAL = 10  # chunks; `make test-slow` runs the others
CHUNKS = [range(first, first + CHUNK) for first in range(0, PROGRAMS, CHUNK)]

pytestmark = pytest.mark.filterwarnings("ignore:the system refused:RuntimeWarning")  # some programs have it refused


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_memory(monkeypatch)


@pytest.fixture
def all_freed():
    """Not that of the folder, which remembers all that was ever made: each program checks for itself."""


def test_usual_and_slow_runs_have_twenty_thousand_programs():
    assert len({seed for chunk in CHUNKS for seed in chunk}) >= 20_000


USUAL_AND_SLOW = [*CHUNKS[:USUAL], *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in CHUNKS[USUAL:])]


@pytest.mark.parametrize("seeds", USUAL_AND_SLOW, ids=lambda seeds: f"from {seeds[0]}")
def test_programs(seeds, disk_folder):
    run = 0
    for seed in seeds:
        try:
            check(seed, disk_folder)
        except BaseException as error:
            error.add_note(f"this was the program of seed {seed}")
            raise
        run += 1
    assert run == CHUNK


@pytest.mark.parametrize("ladder", [("device",), ("host",), ("host", "disk")], ids=" > ".join)
def test_threads_and_late_lengths(ladder, disk_folder):
    for seed in range(100):
        check(seed, disk_folder, Options(ladder=ladder, threads=True, variable=True, lanes=3))


def test_programs_come_through_every_state(monkeypatch, disk_folder):
    seen = Counter()
    turn = Parcel.turn

    def watched(self, state):
        seen[self.state, state] += 1
        turn(self, state)

    monkeypatch.setattr(Parcel, "turn", watched)
    for seed in range(150):
        check(seed, disk_folder)
    rare = {(ParcelState.FETCHING, ParcelState.RESIDENT)}  # a read that failed
    assert {(state, after) for state, following in NEXT.items() for after in following} - set(seen) <= rare
