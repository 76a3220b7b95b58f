"""`make test` runs some cases of each test, chosen by recorded durations; CONTRIBUTING.md names the slowest."""

import pytest

from tests.system import durations
from tests.system.closing import closing_line
from tests.system.durations import BOTH_S, CASE_S, CASES_S, SLOW_S, Duration, choose, left, measured, number_in_test


def test_the_file_is_what_the_program_writes(tmp_path):
    copy = tmp_path / "durations.txt"
    durations.write(durations.read(), copy)
    assert copy.read_text() == durations.FILE.read_text()
    assert all(each.seconds >= durations.RECORDED_S and each.cases for each in durations.read().values())


def test_most_functions_of_the_file_are_there():
    names = list(durations.read())
    assert sum(map(durations.exists, names)) >= 0.8 * len(names), "run python -m tests.system.durations"


def test_contributing_names_the_slowest():
    text = durations.CONTRIBUTING.read_text()
    assert durations.with_table(text, durations.read()) == text


@pytest.mark.parametrize(
    ("cases", "duration", "number"),
    [
        (40, None, 40),
        (1, Duration(CASE_S, 1), 1),
        (1, Duration(CASE_S + 1, 1), 0),
        (40, Duration(40 * CASES_S, 40), 1),
        (40, Duration(CASES_S, 40), 40),
        (40, Duration(4 * CASES_S, 40), 10),
        (3, Duration(4 * CASES_S, 40), 3),  # a part of the cases was collected
        (2, Duration(0.0, 0), 2),
    ],
)
def test_cases_of_a_function(cases, duration, number):
    assert number_in_test(cases, duration) == number


def test_chosen_cases_have_each_value_of_a_product():
    nodeids = [f"t.py::f[{a}-{b}-{c}]" for a in "abcd" for b in "xyz" for c in "01"]
    chosen = choose(nodeids, 6)
    assert len(chosen) == 6
    assert set("abcdxyz01") <= set("".join(chosen))
    assert chosen == choose(nodeids[::-1], 6)
    assert choose(nodeids, 24) == set(nodeids)


def test_each_test_runs_in_one_part():
    nodeids = [f"t.py::slow[{n}]" for n in range(9)] + ["t.py::fast", "t.py::whole"]
    recorded = {"t.py::slow": Duration(9 * CASES_S, 9), "t.py::whole": Duration(CASE_S * 2, 1)}
    more, slow = left(nodeids, recorded)
    assert len(more) == 9
    assert "t.py::whole" in more
    assert "t.py::fast" not in more
    assert not slow
    assert "t.py::whole" not in left(nodeids, recorded, ["t.py::whole"])[0]
    recorded["t.py::whole"] = Duration(SLOW_S + 1, 1)
    assert left(nodeids, recorded)[1] == {"t.py::whole"}
    assert not left(nodeids, recorded, ["t.py::whole"])[1]


def test_what_takes_long_in_all_is_slow_but_for_promises():
    nodeids = [f"t.py::many[{n}]" for n in range(100)]
    recorded = {"t.py::many": Duration(5 * BOTH_S, 100)}
    more, slow = left(nodeids, recorded)
    assert len(slow) == 80  # 20 take BOTH_S
    assert len(more | slow) == 99
    assert left(nodeids, recorded, ["t.py::many[3]"])[1] == set()


def test_durations_of_reports_are_added_by_function(tmp_path):
    report = tmp_path / "test.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a.test_b" name="test_c[x-[1]]" time="1.5"/>'
        '<testcase classname="tests.a.test_b" name="test_c[y]" time="0.25"/>'
        '<testcase classname="tests.a.test_b.TestC" name="test_d" time="2"/>'
        '<testcase classname="" name="tests.a.test_skipped" time="0"/></testsuite></testsuites>'
    )
    once = {"tests/a/test_b.py::test_c": Duration(1.75, 2), "tests/a/test_b.py::TestC::test_d": Duration(2.0, 1)}
    assert measured([report]) == once
    assert measured([report, report])["tests/a/test_b.py::test_c"] == Duration(3.5, 4)


def test_closing_lines_are_added():
    first = "x\n=== 3 passed, 2 skipped, 5 deselected in 61.50s (0:01:01) ===\n"
    second = "=== 1 passed in 3.25s ===\n=== 10 passed, 1 failed in 7.00s ===\n"
    assert closing_line([first, second]).strip("= ") == (
        "13 passed, 2 skipped, 5 deselected, 1 failed in 68.50s (0:01:08)"
    )
    with pytest.raises(ValueError, match="log 1: pytest printed no closing line"):
        closing_line([first, "make: error"])
