"""A tensor that is like the last one of its site goes the same way, without the questions that were asked then.

Whatever such a tensor may be, the outcome is that of a store which never saw another one: the same gradients, the same
figures, the same notes. And each of the conditions is there for a reason: without it one of these cases fails.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu
from torch.nn.utils.parametrize import register_parametrization

from actstore import ActivationStore, tag
from actstore.autograd import hooks
from actstore.autograd.hooks import Scope
from actstore.store.store import Store
from tests.autograd.checks import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

SHAPE = (8, 8)


class Saves(nn.Module):
    """One call of a function, in a module of its own."""

    def forward(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        return run(*args)


class Model(nn.Module):
    """Two modules: one that saves before the one that is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.site = Saves(), Saves()

    def forward(self, run: Callable[[Model], Tensor]) -> Tensor:
        return run(self)


class Case(NamedTuple):
    """Two forwards that save at one site: one that is repeated, and one that is not like it."""

    usual: Callable[[Model], Tensor]
    other: Callable[[Model], Tensor]
    policy: Any = "raw"
    during: Callable[[ActivationStore], AbstractContextManager[Any]] = lambda _: nullcontext()  # of the other
    outside: bool = False  # the other does not run in the model


class Outcome(NamedTuple):
    """What a forward and its backward have left."""

    tensors: list[Tensor | None]  # the output, and the gradients of all leaves
    figures: list[tuple[Any, ...]]  # of each site

    def is_like(self, other: Outcome) -> bool:
        pairs = zip(self.tensors, other.tensors, strict=True)
        return self.figures == other.figures and all(_alike(a, b) for a, b in pairs)


def _alike(found: Tensor | None, wanted: Tensor | None) -> bool:
    if found is not None and wanted is not None and found.is_meta:
        return wanted.is_meta
    return type(found) is type(wanted) and same_bits(found, wanted)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(shape or SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return known(values)


def known(values: Tensor) -> Tensor:
    """A leaf whose gradient is looked at."""
    LEAVES.append(values.requires_grad_())
    return values


LEAVES: list[Tensor] = []


def at_site(model: Model, h: Tensor) -> Tensor:
    result: Tensor = model.site(torch.square, h)
    return result


def doubled(model: Model) -> Tensor:
    return at_site(model, leaf() * 2)


def doubled_half(dtype: torch.dtype) -> Callable[[Model], Tensor]:
    return lambda model: at_site(model, leaf(dtype=dtype) * 2)


def added(values: Tensor) -> Callable[[Model], Tensor]:
    """Saves the sum of a tensor that needs no gradient and of one that does."""
    return lambda model: at_site(model, values + leaf(1)).abs()


def negative(model: Model) -> Tensor:
    lazy = torch._neg_view(leaf().detach().clone()).detach()
    h = lazy.add_(leaf(1))
    assert (h.is_neg(), h.grad_fn.name()) == (True, "AddBackward0")
    return at_site(model, h).abs()


def conjugate(model: Model) -> Tensor:
    lazy = torch.randn(SHAPE, dtype=torch.complex64, generator=torch.Generator().manual_seed(3)).conj().detach()
    h = lazy.add_(leaf(1))
    assert (h.is_conj(), h.grad_fn.name()) == (True, "AddBackward0")
    return at_site(model, h).abs()


def on_no_device(model: Model) -> Tensor:
    return at_site(model, known(torch.ones(SHAPE, device="meta")) * 2)


def zeros(model: Model) -> Tensor:
    return at_site(model, known(torch._efficientzerotensor(SHAPE)) * 2)


def nested(model: Model) -> Tensor:
    h = model.site(torch.relu, torch.nested.as_nested_tensor([leaf()], layout=torch.strided))
    return torch.nested.to_padded_tensor(h, 0.0)


def one_batch(model: Model) -> Tensor:
    return model.site(torch.relu, leaf(1, 8, 8))


class Mine(Tensor):
    pass


def of_a_class(model: Model) -> Tensor:
    return at_site(model, leaf().as_subclass(Mine) * 2).as_subclass(Tensor)


def in_more_memory(model: Model) -> Tensor:
    h = leaf() * 2
    h.untyped_storage().resize_(2 * h.nbytes)
    return at_site(model, h)


def less_than_its_memory(model: Model) -> Tensor:
    h = leaf(4, 8) * 2
    h.untyped_storage().resize_(2 * h.nbytes)
    return at_site(model, h)


def kept_before(model: Model) -> Tensor:
    h = leaf() * 2
    return torch.cos(h) + at_site(model, h)


def saved_before(model: Model) -> Tensor:
    h = leaf() * 2
    return model.before(torch.cos, h) + at_site(model, h)


def another_saved_before(model: Model) -> Tensor:
    return model.before(torch.cos, leaf(seed=1) * 2) + at_site(model, leaf() * 2)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def computed_weight(model: Model) -> Tensor:
    layer = nn.Linear(*SHAPE, bias=False)
    known(nn.init.ones_(layer.weight))
    register_parametrization(layer, "weight", Twice())
    return at_site(model, layer.weight)


def two_added(model: Model) -> Tensor:
    return at_site(model, leaf() + 1) + model.before(torch.square, leaf(seed=1) + 1)


def tagged(model: Model) -> Tensor:
    return at_site(model, tag(leaf() * 2, "mine"))


def scaled(values: Tensor) -> Callable[[Model], Tensor]:
    """Saves a tensor that needs no gradient alone."""
    return lambda model: model.site(torch.mul, values, leaf() * 2)


def masked(*shape: int) -> Callable[[Model], Tensor]:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) > 0.5
    return lambda model: model.site(torch.masked_fill, leaf(*shape) * 2, mask, 0.5)


def square_or_clamp(x: Tensor, clamps: bool) -> Tensor:
    return x.clamp(0) if clamps else x.square()


def from_backward(model: Model) -> Tensor:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return at_site(model, grad * 2)

    x = leaf()
    y: Tensor = Doubled.apply(x)
    (grad,) = torch.autograd.grad(y, x, leaf(seed=2), create_graph=True)
    return grad


CASES = {
    "another dtype": Case(doubled, lambda model: at_site(model, leaf(8, 4, dtype=torch.float64).view(8, 4) * 2)),
    "another dtype of one width": Case(doubled_half(torch.float16), doubled_half(torch.bfloat16)),
    "another shape": Case(doubled, lambda model: at_site(model, leaf(4, 16) * 2)),
    "other strides": Case(doubled, lambda model: at_site(model, leaf().t() * 2)),
    "another device": Case(doubled, on_no_device),
    "more memory": Case(doubled, in_more_memory),
    "negative": Case(added(torch.ones(SHAPE)), negative),
    "conjugate": Case(added(torch.ones(SHAPE, dtype=torch.complex64)), conjugate),
    "implicit zeros": Case(doubled, zeros),
    "nested": Case(one_batch, nested),
    "a class": Case(doubled, of_a_class),
    "less than its memory": Case(doubled, less_than_its_memory),
    "kept before": Case(doubled, kept_before, "int8", outside=True),
    "kept small before": Case(another_saved_before, saved_before, "before : keep; * : raw"),
    "stored before": Case(another_saved_before, saved_before),
    "a computed weight": Case(doubled, computed_weight, "int8"),
    "tagged": Case(doubled, tagged, "*/mine : keep; * : raw"),
    "in a backward": Case(doubled, from_backward),
    "a leaf": Case(doubled, lambda model: at_site(model, leaf())),
    "a leaf in place of a constant": Case(scaled(torch.ones(SHAPE)), lambda m: at_site(m, leaf()), "int8 @ host"),
    "a result in place of a constant": Case(scaled(torch.ones(SHAPE)), doubled, "int8 @ host"),
    "a constant in place of a result": Case(doubled, scaled(torch.ones(SHAPE)), "int8 @ host"),
    "integers in place of a mask": Case(masked(8, 8), scaled(torch.ones(SHAPE, dtype=torch.uint8)), "int8 @ host"),
    "another mask": Case(masked(8, 8), masked(4, 16), "int8"),
    "another producer": Case(doubled, lambda model: at_site(model, leaf(8, 8, 3).var(-1)), "int8"),
    "a reader that decides": Case(doubled, lambda model: model.site(leaky_relu, leaf() * 2), "int8"),
    "a reader that the same function calls": Case(
        lambda model: model.site(square_or_clamp, leaf() * 2, False),
        lambda model: model.site(square_or_clamp, leaf() * 2, True),
        "int8",
    ),
    "outside": Case(lambda _: (leaf() * 2).sin(), lambda _: (leaf() * 2).sin(), "int8", outside=True),
    "another is lossy": Case(doubled, doubled, "int8", lambda store: store._store.lossy_only_at("before[0]")),
    "too many": Case(doubled, doubled, "raw", lambda _: at_most_nodes(0)),
    "another producer, and as many nodes as may be": Case(doubled, two_added, "raw", lambda _: at_most_nodes(2)),
}  # fmt: skip


def as_ours(function: Any) -> FunctionType:
    """The function with the module name of the package: what looks for a caller passes over it."""
    names = function.__globals__ | {"__name__": "actstore.watched"}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


@contextmanager
def at_most_nodes(count: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "MAX_NODES_INSPECTED", count)
        yield


def outcome(case: Case, *, repeats: int) -> Outcome:
    """The other forward of a case, after the usual one has run so many times."""
    model = Model()
    store = ActivationStore(model, case.policy, min_bytes=0)
    for _ in range(repeats):
        with store:
            y = model(case.usual)
        y.sum().backward()
    LEAVES.clear()
    with case.during(store), store:
        y = case.other(model) if case.outside else model(case.other)
    accounts = store._store.ledger.accounts()
    figures = [(str(a.site), a.count, a.saved, a.stored, a.held, a.where, a.note) for a in accounts if a.count]
    gradients = torch.autograd.grad(y.sum(), LEAVES, allow_unused=True) if y.requires_grad else ()
    store.close()
    return Outcome([y.detach(), *gradients], sorted(figures))


def holds(case: Case) -> bool:
    return outcome(case, repeats=2).is_like(outcome(case, repeats=0))


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_that_is_not_like_the_last_one_is_looked_at(name):
    assert holds(CASES[name])


@pytest.mark.parametrize("policy", ["int8(axis=token)", "int4", "zmask", "raw @ host", "int8 @ host"])
def test_any_codec_and_tier(policy):
    case = Case(doubled, doubled, policy)
    assert outcome(case, repeats=3).is_like(outcome(case, repeats=0))


@pytest.mark.parametrize("name", [name for name in CASES if name != "conjugate"])  # complex tensors never follow
def test_the_usual_tensor_follows(name, monkeypatch):
    followed, follow = set(), Scope._follow

    def watched(*args):
        handle = follow(*args)
        if handle is not None:
            followed.add(str(handle.account.site))
        return handle

    monkeypatch.setattr(Scope, "_follow", as_ours(watched))
    case = CASES[name]
    outcome(case, repeats=3)
    assert followed & {"site[0]", "(top)[0]"}
    like = case._replace(other=case.usual, during=lambda _: nullcontext(), outside=False)
    assert outcome(like, repeats=3).is_like(outcome(like, repeats=0))


def parse() -> tuple[ast.FunctionDef, list[ast.If]]:
    """The source of `Scope._follow`, and where it says that more must be asked."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(Scope._follow))).body
    assert isinstance(function, ast.FunctionDef)
    return function, [
        node for node in function.body if isinstance(node, ast.If) and ast.unparse(node.body[0]) == "return None"
    ]


CONDITIONS = [ast.unparse(part) for node in parse()[1] for part in getattr(node.test, "values", [node.test])]


def without(condition: str) -> Any:
    """`Scope._follow`, but for one of its conditions."""
    function, decisions = parse()
    for node in decisions:
        parts = [part for part in getattr(node.test, "values", [node.test]) if ast.unparse(part) != condition]
        node.test = ast.BoolOp(ast.Or(), [*parts, ast.Constant(False), ast.Constant(False)])
    names: dict[str, Any] = {}
    source = "from __future__ import annotations\n" + ast.unparse(function)
    exec(compile(source, "<without>", "exec"), vars(hooks), names)
    return names["_follow"]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_each_condition_is_needed(condition, monkeypatch):
    put = Store.put

    def careful(self, entry, src, *rest):
        if src.is_meta or src._is_zerotensor():
            raise RuntimeError("no memory to read")
        return put(self, entry, src, *rest)

    monkeypatch.setattr(Store, "put", careful)
    assert all(map(survives, CASES.values()))
    monkeypatch.setattr(Scope, "_follow", without(condition))
    assert not all(map(survives, CASES.values()))


def survives(case: Case) -> bool:
    try:
        return holds(case)
    except (AttributeError, RuntimeError, TypeError):
        return False


def test_the_same_site_on_two_threads():
    """Another thread saves a smaller tensor at the site while the larger one is encoded."""
    model = Model()
    store = ActivationStore(model, "raw", min_bytes=0)
    inside, go = threading.Event(), threading.Event()
    put = Store.put

    def slow(self, *args):
        weak = put(self, *args)
        inside.set()
        assert go.wait(60)
        return weak

    def step(rows):
        x = torch.randn(rows, 8, requires_grad=True)
        with store:
            y = model(lambda model: at_site(model, x * 2))
        junk = [torch.full_like(x, torch.nan) for _ in range(8)]  # memory that was freed has other values now
        del junk
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert same_bits(gradient, 8 * x)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setattr(Store, "put", slow)
        larger = thread.submit(step, 64)
        assert inside.wait(60)
        patch.setattr(Store, "put", put)
        step(32)
        go.set()
        larger.result()
    step(64)
    step(32)
