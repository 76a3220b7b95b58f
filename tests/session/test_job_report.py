"""The table of all ranks, from their figures."""

import pytest

from actstore import ActivationStore
from actstore.errors import StateError
from actstore.results import JobReport, RankReport

MIB = 2**20
RANKS = (
    RankReport(0, 8 * MIB, 2 * MIB, 4 * MIB, 0.0, 8 * MIB, "aaaaaaaa", "recompute 4"),
    RankReport(1, 9 * MIB, 3 * MIB, 6 * MIB, 2.5, 8 * MIB, "aaaaaaaa", "recompute 4"),
    RankReport(2, 9 * MIB, 3 * MIB, 7 * MIB, 1.0, None, "bbbbbbbb", "keep"),
)


def test_the_table():
    assert str(JobReport(RANKS)).splitlines() == [
        "rank     peak  of limit    saved     held   stall    policy  decisions",
        "0     4.0 MiB     50.0%  8.0 MiB  2.0 MiB  0.0 ms  aaaaaaaa  recompute 4",
        "1     6.0 MiB     75.0%  9.0 MiB  3.0 MiB  2.5 ms  aaaaaaaa  recompute 4",
        "2     7.0 MiB            9.0 MiB  3.0 MiB  1.0 ms  bbbbbbbb  keep",
        "nearest to its limit: rank 1, 6.0 MiB of 8.0 MiB",
        "waits longest for copies: rank 1, 2.5 ms",
        "the ranks run different policies",
    ]


def test_ranks_that_agree_and_have_no_limit():
    report = JobReport((RANKS[2], RANKS[2]))
    assert report.agrees
    assert report.nearest is None
    assert str(report).splitlines()[3:] == ["waits longest for copies: rank 2, 1.0 ms"]


def test_a_process_alone_has_no_job_report():
    with pytest.raises(StateError, match=r"without a process group. Call report\(\)"):
        ActivationStore().job_report()
