"""What a frame calls, told by its instruction: here Python is called back by C functions that ask for an index."""

from __future__ import annotations

import operator
import sys
from functools import partial, reduce
from types import SimpleNamespace

import pytest

from actstore.autograd import calls
from actstore.autograd.calls import UNKNOWN, named


class Asked:
    """A number that notes who asks for it: C code, with the innermost frame being that of the case."""

    def __init__(self):
        self.notes = []

    def __index__(self):
        frame = sys._getframe(1)
        found = named(frame, {"index", "insert"}.__contains__)
        arguments = [
            found.call.argument(frame, number, name, "none") for number, name in enumerate(("a", "b", "ndigits"))
        ]
        self.notes.append((found.name, found.fixed, arguments))
        return 1


def method(c, x):
    return x.values.insert(c, 5)


def method_with_keyword(c, x):
    return int.from_bytes(b"1", "big") + round(2.5, ndigits=c)


def of_an_expression(c, x):
    return x.values.copy().insert(c, 5)


def of_either(c, x):
    return (x.values if x.yes else []).insert(c, 5)


def with_either(c, x):
    return x.values.insert(c, 5 if x.yes else 6)


def with_computed(c, x):
    return x.values.insert(c, len(x.values) * 2)


def with_attributes(c, x):
    return x.values.insert(c, x.inner.five)


def of_a_module(c, x):
    return operator.index(c)


def by_a_variable(c, x):
    f = operator.index
    return f(c)


def by_an_attribute(c, x):
    return x.act(c)


def by_a_bound_method(c, x):
    f = x.values.insert
    return f(c, 5)


def by_a_partial(c, x):
    return x.partial(c)


def by_map(c, x):
    return list(map(operator.index, [c]))


def by_what_is_made(c, x):
    return SimpleNamespace(f=operator.index).f(c)


def with_a_star(c, x):
    return operator.index(*[c])


def with_a_tuple(c, x):
    arguments = (c, 5)
    return x.values.insert(*arguments)


def with_a_tuple_and_keywords(c, x):
    arguments, none = (c, 5), {}
    return x.values.insert(*arguments, **none)


def with_more_than_a_tuple(c, x):
    rest = (5,)
    return x.values.insert(c, *rest)


def in_a_comprehension(c, x):
    return [x.values.insert(each, 5) for each in [c]]


def in_a_handler(c, x):
    try:
        raise KeyError
    except KeyError:
        return x.values.insert(c, 5)


def in_a_block(c, x):
    with pytest.MonkeyPatch.context():
        for number in range(5, 6):
            x.values.insert(c, number)


def within_another(c, x):
    return str(x.values.insert(c, 5))


def as_a_slice(c, x):
    return x.values[c]


def by_an_operator(c, x):
    return x.values * c


LIST = "the list"
CASES = {
    method: ("insert", True, [LIST, "c", 5]),
    method_with_keyword: ("round", True, [2.5, "none", "c"]),
    of_an_expression: ("insert", True, [UNKNOWN, "c", 5]),
    of_either: ("", False, [UNKNOWN] * 3),
    with_either: ("insert", True, [LIST, UNKNOWN, UNKNOWN]),
    with_computed: ("insert", True, [LIST, "c", UNKNOWN]),
    with_attributes: ("insert", True, [LIST, "c", 5]),
    of_a_module: ("index", True, ["c", "none", "none"]),
    by_a_variable: ("index", False, ["c", "none", "none"]),
    by_an_attribute: ("index", False, ["c", "none", "none"]),
    by_a_bound_method: ("insert", False, [UNKNOWN, "c", 5]),
    by_a_partial: ("index", False, [UNKNOWN] * 3),
    by_map: ("", False, [UNKNOWN, "none", "none"]),
    by_what_is_made: ("", False, [UNKNOWN] * 3),
    with_a_star: ("index", True, [UNKNOWN] * 3),
    with_a_tuple: ("insert", True, [LIST, "c", 5]),
    with_a_tuple_and_keywords: ("insert", True, [LIST, "c", 5]),
    with_more_than_a_tuple: ("insert", True, [LIST, UNKNOWN, UNKNOWN]),
    in_a_comprehension: ("insert", True, [LIST, "c", 5]),
    in_a_handler: ("insert", True, [LIST, "c", 5]),
    in_a_block: ("insert", True, [LIST, "c", 5]),
    within_another: ("insert", True, [LIST, "c", 5]),
    as_a_slice: ("BINARY_SUBSCR", True, [UNKNOWN] * 3),
    by_an_operator: ("*", True, [LIST, "c", "none"]),
}


def test_calls(monkeypatch):
    monkeypatch.setattr(calls, "ORIGINS", ["_operator", "builtins"])  # Python's stand for PyTorch's here
    monkeypatch.setattr(calls, "_known", {})
    found = {}
    for case in CASES:
        c = Asked()
        x = SimpleNamespace(values=[1, 2, 3], yes=True, act=operator.index, inner=SimpleNamespace(five=5))
        x.partial = partial(operator.index)
        case(c, x)
        ((name, fixed, arguments),) = c.notes
        shown = ["c" if a is c else LIST if a is x.values else a for a in arguments]
        found[case.__name__] = name, fixed, shown
    assert found == {case.__name__: wanted for case, wanted in CASES.items()}


@pytest.mark.parametrize(
    "calling", [lambda c: next(map(operator.index, [c])), lambda c: reduce(operator.getitem, [[1, 2], c])]
)
def test_functions_that_call_what_they_are_given_are_not_told(calling):
    c = Asked()
    calling(c)
    assert c.notes[0][:2] == ("", False)


def test_nothing_is_held():
    """Before Python 3.13 looking at a local variable fills a dict that lives as long as the frame."""

    class Large:
        gone = False

        def __del__(self):
            Large.gone = True

    def function(c):
        large, f = Large(), operator.index
        f(c)
        del large
        assert Large.gone

    c = Asked()
    function(c)
    assert c.notes[0][0] == "index"


def test_a_dict_of_locals_stays_whole():
    def function(c):
        f = operator.index
        mine = locals()
        f(c)
        return mine

    c = Asked()
    assert set(function(c)) >= {"c", "f"}
