"""The name by which Python calls C: found in the source of the caller, and empty where the source has none."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from functools import partial, reduce
from weakref import ref

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from actstore.base import call_site
from actstore.base.call_site import applied, applies, last_number, operator_name

ABS = torch.abs
INNER = partial(torch.abs)


class Holder:
    """Of functions. A property would run code to tell which it returns."""

    still = staticmethod(torch.abs)

    def __init__(self, activation, inner=None):
        self.activation = activation
        self.inner = inner

    @property
    def computed(self):
        return torch.abs


HOLDER = Holder(torch.sin, Holder(partial(partial(torch.clamp, max=1), min=0)))


SCRIPT = torch.jit.CompilationUnit("def f(x):\n    return torch.abs(x)\n").f


def unpacked(found):
    first, second = found
    return first + second


def divided(x):
    y = x.mul(1)
    y /= x
    return y


CASES = {  # and the names of what saves a tensor, in their order
    "x.abs": (lambda x: x.abs(), "abs"),
    "torch.abs": (lambda x: torch.abs(x), "abs"),  # noqa: PLW0108  (a call by its name)
    "abs": (lambda x: abs(x), "abs"),  # noqa: PLW0108
    "in a row": (lambda x: x.sin().abs().clamp(0), "sin abs clamp"),
    "in lines": (
        lambda x: x.sin().clamp(
            0,
            max=1,
        ),
        "sin clamp",
    ),
    "in an argument": (lambda x: torch.clamp(x.sin(), min=x.exp().max().item()), "sin exp max max clamp"),
    "positions": (lambda x: x.clamp(*[0, 1]), "clamp"),
    "keywords": (lambda x: x.clamp(**dict.fromkeys(["min"], 0)), "clamp"),
    "both": (lambda x: torch.clamp(*(x,), **dict.fromkeys(["min"], 0)), "clamp"),
    "in place": (lambda x: x.mul(1).clamp_(0), "clamp"),
    "an operator": (lambda x: x.detach() % x, "% %"),
    "an operator in place": (divided, "/ /"),
    "in a function of PyTorch's": (lambda x: F.hardtanh(x), "hardtanh"),  # noqa: PLW0108
    "of a group": (
        lambda x: torch.linalg.vector_norm(x, 3) + torch.special.gammaln(x).sum(),
        "vector_norm vector_norm gammaln",
    ),
    "a comprehension": (lambda x: [torch.abs(row) for row in (x,)], "abs"),
    "a variable of the module": (lambda x: ABS(x), "abs"),  # noqa: PLW0108
    "a variable": (lambda x, f=torch.abs: f(x), "abs"),
    "a method in a variable": (lambda x, f=torch.Tensor.abs: f(x), "abs"),
    "an overload in a variable": (lambda x, f=torch.ops.aten.abs.default: f(x), "abs"),
    "a partial in a variable": (lambda x: INNER(x), "abs"),  # noqa: PLW0108
    "variables in turn": (lambda x: [f(x) for f in (torch.sin, torch.abs)], "sin abs"),
    "an attribute": (lambda x: HOLDER.inner.activation(x), "clamp"),  # noqa: PLW0108
    "a static method": (lambda x: HOLDER.still(x), "abs"),  # noqa: PLW0108
    "a property": (lambda x: HOLDER.computed(x), ""),  # noqa: PLW0108
    "either": (lambda x: (torch.abs if x.dim() else torch.sin)(x), ""),
    "an item": (lambda x: [torch.abs][0](x), ""),  # noqa: PLW0108
    "getattr": (lambda x: getattr(x, "abs")(), ""),  # noqa: B009
    "map": (lambda x: next(map(torch.abs, [x])), ""),
    "map in a sum": (lambda x: sum(map(torch.abs, [x])), ""),
    "map in a list": (lambda x: [*map(torch.abs, [x])], ""),
    "map to variables": (lambda x: unpacked(map(torch.abs, [x, x])), " "),
    "reduce": (lambda x: reduce(torch.maximum, [x, x]), " "),
    "a sum of tensors": (lambda x: torch.sum(x * x), "* *"),
    "indexed": (lambda x: x[x.long()].view(2, 2).mT * 2, "getitem"),
    "an operator of a script": (SCRIPT, ""),
    "a partial": (lambda x: partial(torch.clamp, min=0)(x), ""),  # noqa: PLW0108
}


def names(function, x):
    seen = []

    def pack(tensor):
        seen.append(operator_name(sys._getframe(1)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    return " ".join(seen)


@pytest.mark.parametrize("name", CASES)
def test_names(name):
    """Also of calls that Python has specialized after some runs."""
    function, expected = CASES[name]
    x = torch.randn(4, requires_grad=True)
    assert {names(function, x) for _ in range(40)} == {expected}


NUMBERS = {
    "of a method": (lambda x: x.pow(2), 2),
    "of a function": (lambda x: torch.pow(x, -0.5), -0.5),
    "of an operator": (lambda x: x**3, 3),
    "of a keyword": (lambda x: x.pow(exponent=0.5), 0.5),
    "of a variable": (lambda x, n=2: x.pow(n), None),
    "of a variable, by an operator": (lambda x, n=-1: x**n, -1),
    "negated": (lambda x, n=2: x.pow(-n), None),
    "of either": (lambda x: x.pow(-0.5 if x.dim() else 2), None),
    "of a tuple": (lambda x: x.pow(*(2,)), None),
    "of a call": (lambda x: torch.pow(x, float(2)), None),
    "first": (lambda x: torch.pow(2, x), None),
    "left": (lambda x: 2**x, None),
    "divided": (lambda x: x.detach() / x, None),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_last_numbers(name):
    function, expected = NUMBERS[name]
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda _: seen.append(last_number(sys._getframe(1))), lambda _: None):
        for _ in range(40):
            function(torch.randn(4, requires_grad=True))
    assert set(seen) == {expected}


class Helped(TorchFunctionMode):
    """It calls what it stands for in a function of its own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.run(func, *args, **(kwargs or {}))

    def run(self, func, *args, **kwargs):
        return func(*args, **kwargs)


class Class(torch.Tensor):
    pass


# Whose name the source does not have, and a mode is given.
GIVEN = {
    "an operator": "remainder remainder",
    "an operator in place": "div div",
    "a property": "abs",
    "either": "abs",
    "an item": "abs",
    "getattr": "abs",
    "map": "abs",
    "map in a sum": "abs",
    "map in a list": "abs",
    "map to variables": "abs abs",
    "reduce": "maximum maximum",
    "a sum of tensors": "mul mul",
    "a partial": "clamp",
}
AROUND = {
    "a default device": lambda: torch.device("cpu"),
    "a mode": Helped,
    "two modes": lambda: Together(Helped(), torch.device("cpu")),
}


class Together(ExitStack):
    def __init__(self, *contexts):
        super().__init__()
        for context in contexts:
            self.enter_context(context)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", CASES)
def test_names_of_what_a_mode_stands_for(name, around):
    function, expected = CASES[name]
    x = torch.randn(4, requires_grad=True)
    with AROUND[around]():
        assert {names(function, x) for _ in range(40)} == {GIVEN.get(name, expected)}


def test_names_of_what_a_class_of_tensors_stands_for():
    x = torch.randn(4, requires_grad=True).as_subclass(Class)
    assert names(lambda x: x.sin().abs().clamp(0), x) == "sin abs clamp"


def test_a_variable_is_let_go_while_the_function_runs():
    alive = []

    def function(x, f=torch.abs):
        y = x * 2
        z = f(y)
        alive.append(ref(y))
        del y
        alive.append(alive[0]() is not None)
        return z

    with torch.autograd.graph.saved_tensors_hooks(lambda _: operator_name(sys._getframe(1)), lambda _: None):
        function(torch.randn(4, requires_grad=True))
    assert alive[1] is False


def test_without_positions_no_call_has_a_name():
    code = "import torch, sys; from actstore.base.call_site import operator_name\n"
    code += (
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: print(repr(operator_name(sys._getframe(1)))), int):\n"
    )
    code += "    torch.ones(2, requires_grad=True).abs()"
    run = subprocess.run(
        [sys.executable, "-X", "no_debug_ranges", "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout == "''\n"


def test_memory_of_calls_is_bounded(monkeypatch):
    from actstore.base import call_site

    monkeypatch.setattr(call_site, "_MAX_CALLS", 3)
    x = torch.randn(4, requires_grad=True)
    for _ in range(2):
        assert names(lambda x: x.sin().abs().cos().exp().clamp(0), x) == "sin abs cos exp clamp"
    assert len(call_site._known) <= 3


OF_C = isinstance(torch.autograd.Function.apply, type(len))  # from PyTorch 2.14 on


class Twice(torch.autograd.Function):
    """Tells what the frame that applies it is known for, from inside of its forward."""

    found: list = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        frame = sys._getframe(1)
        if not OF_C:
            frame = frame.f_back
        Twice.found.append((applies(frame), applied(frame)))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Own(Twice):
    @classmethod
    def of(cls, x):
        return cls.apply(x)


TWICE, HELD, PART = Twice.apply, Holder(Twice.apply), partial(Twice.apply)


@pytest.mark.parametrize(
    ("run", "function"),
    [
        (lambda x: Twice.apply(x), Twice),  # noqa: PLW0108
        (Own.of, Own),
        (lambda x, cls=Own: super(cls, cls).apply(x), Own),
        (lambda x: [Twice][0].apply(x), None),  # noqa: PLW0108
        *[
            (lambda x: TWICE(x), Twice),  # noqa: PLW0108
            (lambda x: HELD.activation(x), Twice),  # noqa: PLW0108
            (lambda x: PART(x), Twice),  # noqa: PLW0108
        ][: 3 * OF_C],
    ],
)
def test_a_function_is_known_by_the_call_in_the_source(run, function, monkeypatch):
    monkeypatch.setattr(call_site, "_APPLY_CODE", None)
    monkeypatch.setattr(Twice, "found", [])
    run(torch.ones(2, requires_grad=True))
    assert Twice.found == [(True, function)]


def test_other_calls_apply_nothing(monkeypatch):
    monkeypatch.setattr(call_site, "_APPLY_CODE", None)
    found = []

    def look(cls, t):
        torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(sys._getframe(1)) or t, lambda t: t).__enter__()
        try:
            return t.sin()
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    look(Twice, torch.ones(2, requires_grad=True))
    assert [(applies(frame), applied(frame)) for frame in found] == [(False, None)]
