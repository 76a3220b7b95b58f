"""State outside of a recomputed module that other code changes between forward and backward."""

import copy
from argparse import Namespace
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.errors import StateError
from tests.autograd.checks import check_drained, check_same, gc_off, same_bits
from tests.autograd.models import WIDTH


class Scaled(nn.Module):
    """Multiplies by what `read` finds."""

    rate = 2.0
    table = torch.ones(WIDTH)

    def __init__(self, read, **attributes):
        super().__init__()
        self.inner, self.read = nn.Linear(WIDTH, WIDTH), read
        vars(self).update(attributes)

    def forward(self, x):
        return torch.tanh(self.inner(x) * self.read(self))


@dataclass
class Config:
    rate: float = 2.0
    rows: list = field(default_factory=lambda: [1.0, 2.0])
    table: torch.Tensor = field(default_factory=lambda: torch.ones(WIDTH))
    inner: object = None
    generator: object = None


class Limited:
    limit = 3.0

    def scale(self):
        return self.limit


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate, self.table = 2.0, torch.ones(WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.ones(WIDTH))


RATE, ROWS, CONFIG = ContextVar("rate", default=2.0), ContextVar("rows"), ContextVar("config")
TABLE, OBJECT = ContextVar("table"), Config()


def set_of(owner, name, value):
    return partial(setattr, owner, name, value)


def case_class_attribute():
    kind = type("Own", (Scaled,), {"rate": 2.0})
    return kind(lambda module: module.rate), set_of(kind, "rate", 3.0)


def case_new_class_attribute():
    kind = type("Own", (Scaled,), {})
    return kind(lambda module: getattr(module, "extra", 1.0)), set_of(kind, "extra", 3.0)


def case_method():
    kind = type("Own", (Scaled,), {"scale": lambda module: 2.0})
    return kind(lambda module: module.scale()), set_of(kind, "scale", lambda module: 3.0)


def case_setting():
    config = Config()
    return Scaled(lambda module: module.config.rate, config=config), set_of(config, "rate", 3.0)


def case_namespaces():
    config = Namespace(inner=SimpleNamespace(rate=2.0))
    return Scaled(lambda module: module.config.inner.rate, config=config), set_of(config.inner, "rate", 3.0)


def case_new_setting():
    config = Config()
    return Scaled(lambda module: getattr(module.config, "extra", 1.0), config=config), set_of(config, "extra", 3.0)


def case_setting_in_a_list():
    config = Config()
    return Scaled(lambda module: module.configs[0]["a"].rate, configs=[{"a": config}]), set_of(config, "rate", 3.0)


def case_list_of_an_object():
    config = Config()
    return Scaled(lambda module: sum(module.config.rows), config=config), partial(config.rows.append, 3.0)


def case_class_of_an_object():
    kind = type("Own", (Limited,), {"limit": 2.0})
    return Scaled(lambda module: module.limited.scale(), limited=kind()), set_of(kind, "limit", 3.0)


def case_number_of_a_parent():
    parent = Parent()
    return Scaled(lambda module: module.parent[0].rate, parent=(parent,)), set_of(parent, "rate", 3.0)


def case_mode_of_a_parent():
    parent = Parent()
    return Scaled(lambda module: 2.0 if module.parent[0].training else 3.0, parent=[parent]), parent.eval


def case_table_of_a_parent_that_is_replaced():
    parent = Parent()
    return Scaled(lambda module: module.parent[0].table, parent=[parent]), set_of(parent, "table", torch.zeros(WIDTH))


def case_number_of_a_closure():
    scale = 2.0

    def change():
        nonlocal scale
        scale = 3.0

    return Scaled(lambda _: scale), change


def case_closure_of_a_class():
    scale = 2.0

    class Own(Scaled):
        def forward(self, x):
            return torch.tanh(super().forward(x) * scale)

    def change():
        nonlocal scale
        scale = 3.0

    return Own(lambda _: 1.0), change


def case_closure_of_a_hook():
    scale = [2.0]
    model = Scaled(lambda _: 1.0)
    model.inner.register_forward_hook(lambda module, args, y: y * scale[0])
    return model, partial(scale.__setitem__, 0, 3.0)


def case_object_of_a_bound_method():
    limited = Limited()
    return Scaled(partial(lambda scale, _: scale(), limited.scale)), set_of(limited, "limit", 4.0)


def case_context_variable():
    return Scaled(lambda _: RATE.get()), partial(RATE.set, 3.0)


def case_new_context_variable():
    variable = ContextVar("new")
    return Scaled(lambda _: variable.get(1.0)), partial(variable.set, 3.0)


def case_rows_of_a_context_variable():
    ROWS.set([1.0, 2.0])
    return Scaled(lambda _: sum(ROWS.get())), lambda: ROWS.get().append(3.0)


def case_setting_in_a_context_variable():
    config = Config()
    CONFIG.set(config)
    return Scaled(lambda _: CONFIG.get().rate), set_of(config, "rate", 3.0)


def case_object_of_a_context_variable():
    CONFIG.set(config := Config())
    return Scaled(lambda module: CONFIG.get().rate, config=config), lambda: CONFIG.set(Config(rate=3.0))


RETURNING = {name[5:]: case for name, case in list(globals().items()) if name.startswith("case_")}


@pytest.mark.parametrize("decision", ["recompute", "recompute(segment=2)"])
@pytest.mark.parametrize("name", RETURNING)
def test_plain_values_are_those_of_the_first_run(name, decision):
    copy_context().run(check_returning, name, decision)


def check_returning(name, decision):
    torch.manual_seed(0)
    block, change = RETURNING[name]()
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), block), torch.randn(5, WIDTH)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    store = ActivationStore(model, f"[0-9] : {decision}", min_bytes=0)
    with gc_off():
        with store:
            loss = model(x).square().sum()
        change()
        after = model(x)
        for again in (True, False):
            check_same(torch.autograd.grad(loss, list(model.parameters()), retain_graph=again), wanted)
        check_same(model(x), after)  # the change is there again
        del loss
        check_drained(store)


def written_in_a_parent():
    parent = Parent()
    return Scaled(lambda module: module.parent[0].mean * 1, parent=[parent]), parent.mean, r"Parent\.mean"


def weight_of_a_parent():
    parent = Parent()
    return Scaled(lambda module: module.parent[0].weight * 1, parent=(parent,)), parent.weight, r"Parent\.weight"


def written_in_a_closure():
    table = torch.ones(WIDTH)
    return Scaled(lambda _: table * 1), table, r"written_in_a_closure.*\.table"


def written_in_a_list():
    tables = [torch.ones(WIDTH)]
    return Scaled(lambda module: module.tables[0] * 1, tables=tables), tables[0], r"Scaled\.tables"


def written_in_an_object():
    config = Config()
    return Scaled(lambda module: module.config.table * 1, config=config), config.table, r"Config\.table"


def written_in_a_class():
    kind = type("Own", (Scaled,), {"table": torch.ones(WIDTH)})
    return kind(lambda module: module.table * 1), kind.table, r"Own\.table"


@pytest.mark.parametrize(
    "case",
    [
        written_in_a_parent, weight_of_a_parent, written_in_a_closure, written_in_a_list, written_in_an_object,
        written_in_a_class,
    ],
)  # fmt: skip
def test_the_use_of_a_tensor_that_other_code_writes_to_is_refused(case):
    block, table, words = case()
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), block), torch.randn(5, WIDTH)
    with ActivationStore(model, "1 : recompute", min_bytes=0):
        loss = model(x).square().sum()
        other = model[0](x).sum()
    with torch.no_grad():
        table.mul_(2)
    other.backward()
    with pytest.raises(StateError, match=rf"attribute={words}: other code changed it"):
        loss.backward()
    assert table[0] == 2
    model(x).sum().backward()


def tensor_of_a_context_variable():
    table = torch.ones(WIDTH)
    TABLE.set(table)
    return table


def gone_object_of_a_context_variable():
    TABLE.set(Config().table)


@pytest.mark.parametrize("case", [tensor_of_a_context_variable, gone_object_of_a_context_variable])
def test_the_use_of_a_context_variable_that_cannot_come_back_is_refused(case):
    def check():
        written, model, x = case(), nn.Sequential(Scaled(lambda _: TABLE.get() * 1)), torch.randn(5, WIDTH)
        if written is None:
            TABLE.set(copy.copy(OBJECT))
            model[0].read = lambda _: TABLE.get().rate
        with ActivationStore(model, "0 : recompute", min_bytes=0):
            loss = model(x).square().sum()
        if written is None:
            TABLE.set(None)
        else:
            written.mul_(2)
        with pytest.raises(StateError, match="attribute=ContextVar table: other code changed it"):
            loss.backward()

    copy_context().run(check)


def test_what_a_module_sets_in_the_context_it_sets_once():
    def check():
        def counts(_):
            RATE.set(RATE.get() + 1)
            return RATE.get()

        model, x = nn.Sequential(Scaled(counts), Scaled(counts)), torch.randn(5, WIDTH)
        plain = copy.deepcopy(model)
        with ActivationStore(model, "[0-9] : recompute", min_bytes=0):
            loss = model(x).square().sum()
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert RATE.get() == 4.0
        RATE.set(2.0)
        check_same(found, torch.autograd.grad(plain(x).square().sum(), list(plain.parameters())))

    copy_context().run(check)


@pytest.mark.parametrize("given", [lambda: iter([1.0, 2.0]), lambda: (k for k in (1.0, 2.0)), lambda: map(abs, [1.0])])
def test_an_iterator_among_the_arguments_is_refused(given):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, factors):
            return torch.tanh(self.inner(x) * len([*factors]))

    model, x = nn.ModuleList([Sums()]), torch.randn(5, WIDTH)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        with pytest.raises(StateError, match=r"0 \(recompute\) is given a .*iterator used up. Give it a list"):
            model[0](x, {"factors": given()})
        model[0](x, [1.0, 2.0]).sum().backward()


def test_an_object_that_other_code_replaces_is_refused():
    config = Config(inner=Config())
    model, x = nn.Sequential(Scaled(lambda module: module.config.inner.rate, config=config)), torch.randn(5, WIDTH)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        loss = model(x).square().sum()
    config.inner = Config(rate=3.0)
    with pytest.raises(StateError, match=r"attribute=Config\.inner: other code changed it"):
        loss.backward()
    assert config.inner.rate == 3.0


def test_what_forward_itself_changes_in_an_object_is_left_alone():
    """The second run changes it once more: the limits say so."""

    def counts(module):
        module.config.rate += 1
        return 1.0

    config = Config()
    model, x = nn.Sequential(Scaled(counts, config=config)), torch.randn(5, WIDTH)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        loss = model(x).square().sum()
    loss.backward()
    assert config.rate == 4.0


@pytest.mark.parametrize("decision", ["recompute", "recompute(segment=2)"])
def test_what_a_region_reaches_may_hold_its_graph(decision):
    """In forwards without a backward: an object, a closure and a context variable, which are gone afterwards."""
    model = nn.Sequential(*(Scaled(lambda module: module.config.rate * module.scale()) for _ in range(2)))
    store = ActivationStore(model, f"[0-9] : {decision}", min_bytes=0)

    def reads(rows):
        return lambda: 1.0 + 0 * len(rows)

    def check():
        for _ in range(3):
            config, kept = Config(), []
            for block in model:
                block.config, block.scale = config, reads(kept)
            CONFIG.set(config)
            with store:
                config.inner = model(torch.randn(5, WIDTH))
                kept.append(config.inner)
            config.table = config.inner * 2
        CONFIG.set(None)
        for block in model:
            del block.config, block.scale

    with gc_off():
        copy_context().run(check)
        check_drained(store)


@pytest.mark.parametrize("where", ["nested", "dataclass", "closure", "deque"])
def test_generators_in_objects_and_in_containers_of_containers(where):
    def run(policy):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        attributes = {
            "nested": {"draws": {"drop": [generator]}},
            "dataclass": {"config": Config(generator=generator)},
            "closure": {},
            "deque": {"draws": [[{"a": (generator,)}]]},
        }[where]
        model = nn.Sequential(Scaled(lambda _: torch.rand(WIDTH, generator=generator), **attributes))
        if where != "closure":
            model[0].read = {
                "nested": lambda module: torch.rand(WIDTH, generator=module.draws["drop"][0]),
                "dataclass": lambda module: torch.rand(WIDTH, generator=module.config.generator),
                "deque": lambda module: torch.rand(WIDTH, generator=module.draws[0][0]["a"][0]),
            }[where]
        x = torch.randn(5, WIDTH)
        with ActivationStore(model, policy, min_bytes=0):
            loss = model(x).square().sum()
        loss.backward()
        return [*(p.grad for p in model.parameters()), generator.get_state()]

    check_same(run("0 : recompute"), run("keep"))


COLLECTED = ContextVar("collected", default=None)


def collect(_module, _args, output):
    if COLLECTED.get() is not None:
        COLLECTED.get()["states"].append(output)


def collected(policy, read):
    """Return gradients of a model whose hooks collect outputs, as those of Transformers do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(read))
    for each in (model[0], model[1].inner):
        each.register_forward_hook(collect)
    token = COLLECTED.set({"states": [], "names": ["a"]})
    with ActivationStore(model, policy, min_bytes=0) as store:
        y = model(torch.randn(3, WIDTH))
    COLLECTED.reset(token)
    y.sum().backward()
    check_drained(store)
    return [each.grad for each in model.parameters()]


def test_a_collector_that_is_gone_in_backward_takes_outputs():
    wanted, found = (collected(policy, lambda _: 2.0) for policy in ("keep", "1 : recompute"))
    assert all(map(same_bits, found, wanted))


def test_what_a_collector_held_is_not_read_again():
    with pytest.raises(StateError, match=r"attribute=ContextVar collected\['states'\]\[0\]: other code changed it"):
        collected("1 : recompute", lambda _: COLLECTED.get()["states"][0])
