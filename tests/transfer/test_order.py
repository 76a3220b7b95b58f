"""The order in which payloads come back: foreseen from the last time, else the last one first."""

from hypothesis import given
from hypothesis import strategies as st

from actstore.transfer.order import MAX_LESSONS, Lessons, TransferRun

WINDOW = 100


class Thing:
    """Stands for a berth."""

    def __init__(self, serial):
        self.serial = serial


def forward(run, sites, nbytes=40):
    serials = []
    for site in sites:
        serial = run.number(site, nbytes)
        if serial == 0:
            run.keep_soon(WINDOW)
        run.berths[serial] = Thing(serial)
        serials.append(serial)
    return serials


def foreseen(run):
    """What `upcoming` offers, in order."""
    found = []
    while (berth := run.upcoming()) is not None:
        found.append(berth.serial)
        run.passed()
    return found


def backward(run, order):
    for serial in order:
        run.ask(serial)
        run.forget(serial)


def test_the_first_time_the_last_comes_first():
    run = TransferRun(Lessons())
    assert forward(run, "abcd") == [0, 1, 2, 3]
    assert foreseen(run) == []
    run.ask(3)
    assert foreseen(run) == [2, 1, 0]


@given(st.permutations(range(6)))
def test_the_order_is_learned(order):
    lessons = Lessons()
    first = TransferRun(lessons)
    forward(first, "abcdef")
    backward(first, order)
    again = TransferRun(lessons)
    forward(again, "abcdef", nbytes=41)  # other sizes, same sites
    again.ask(order[0])
    assert foreseen(again) == list(order[1:])


def test_what_is_needed_first_is_known_in_forward():
    lessons = Lessons()
    first = TransferRun(lessons)
    forward(first, "abcdef")
    backward(first, [2, 5, 4, 3, 1, 0])
    again = TransferRun(lessons)
    forward(again, "abc")
    assert again.soon == {2, 5}  # 80 of 100 bytes
    forward(again, "x")
    assert again.soon == set()  # another forward after all
    large = TransferRun(lessons)
    forward(large, "a")
    assert large.soon == {2, 5}


def test_one_payload_at_least_is_needed_first():
    lessons = Lessons()
    first = TransferRun(lessons)
    forward(first, "abc", nbytes=2 * WINDOW)
    backward(first, [1, 0, 2])
    again = TransferRun(lessons)
    forward(again, "a")
    assert again.soon == {1}


def test_another_forward_is_not_foreseen_by_this_one():
    lessons = Lessons()
    first = TransferRun(lessons)
    forward(first, "abcd")
    backward(first, [0, 1, 2, 3])
    for sites in ("abc", "abcde", "abxd"):
        run = TransferRun(lessons)
        last = forward(run, sites)[-1]
        run.ask(last)
        assert foreseen(run) == list(range(last - 1, -1, -1))


def test_a_jump_moves_the_look_ahead():
    run = TransferRun(Lessons())
    forward(run, "abcdef")
    run.ask(5)
    run.ask(2)
    assert foreseen(run) == [1, 0]
    run.ask(4)
    assert not run.expects(4)
    assert run.expects(1)
    assert foreseen(run) == []  # nothing is offered twice


def test_what_is_gone_or_was_asked_for_is_not_offered():
    run = TransferRun(Lessons())
    forward(run, "abcde")
    run.ask(4)
    run.forget(3)
    run.ask(1)
    run.ask(1)
    assert foreseen(run) == [0]


def test_a_context_without_an_end_begins_anew_when_all_is_used():
    run = TransferRun(Lessons())
    for _ in range(3):
        serials = forward(run, "abc")
        assert serials == [0, 1, 2]
        run.ask(0)
        backward(run, [0, 2, 1])
    assert forward(run, "abc") == [0, 1, 2]
    run.ask(0)
    assert foreseen(run) == [2, 1]


def test_forwards_that_follow_on_each_other_before_their_backwards():
    run = TransferRun(Lessons())
    forward(run, "ab")
    run.ask(1)
    assert forward(run, "ab") == [2, 3]
    run.ask(3)
    assert foreseen(run) == [2, 0]


def test_a_backward_that_uses_a_part_foresees_that_part():
    lessons = Lessons()
    first = TransferRun(lessons)
    forward(first, "abcd")
    backward(first, [3, 1])
    first.forget(0)
    first.forget(2)
    again = TransferRun(lessons)
    forward(again, "abcd")
    again.ask(3)
    assert foreseen(again) == [1]


def test_lessons_are_few():
    lessons = Lessons()
    for i in range(MAX_LESSONS + 5):
        run = TransferRun(lessons)
        forward(run, [i])
        backward(run, [0])
    assert len(lessons._of) == MAX_LESSONS


def test_a_lesson_tells_what_differed_from_the_one_before():
    lessons = Lessons()

    def train(sites, order):
        lessons.differed = ""
        run = TransferRun(lessons)
        forward(run, sites)
        backward(run, order)
        return lessons.differed

    assert train("abc", [2, 1, 0]) == "forward"  # the first of its kind
    assert train("abc", [2, 1, 0]) == ""
    assert train("abc", [2, 0, 1]) == "backward"
    assert train("abc", [2, 0, 1]) == ""
    assert train("abcd", [3, 2, 1, 0]) == "forward"
    assert train("xyz", [2, 1, 0]) == "forward"
    assert train("abcd", [3, 2, 1, 0]) == ""  # its own last lesson
