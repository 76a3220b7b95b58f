"""What a recomputed module changes beside its weights it changes once; each run finds what the first one found."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from actstore import ActivationStore
from actstore.errors import StateError
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.autograd.models import WIDTH

RECOMPUTE = ["recompute", "recompute(raw @ disk)", "recompute(segment=2)", "recompute(schedule=revolve, slots=1)"]


class Changing(nn.Module):
    """Computes with what `change` leaves in its attributes."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change = nn.Linear(WIDTH, WIDTH), change
        self.register_buffer("sum", torch.zeros(WIDTH))
        self.register_buffer("other", torch.ones(3))
        self.step, self.pair, self.name = 0, (1, 2.0), "a"
        self.mean = torch.zeros(WIDTH)
        self.rows, self.recent, self.chosen = [1.0], deque([1.0], maxlen=3), {1}
        self.cache, self.ordered, self.groups, self.counts = {}, OrderedDict(), defaultdict(list), Counter()
        self.late = None

    def forward(self, x):
        return torch.tanh(self.inner(x) * self.change(self, x))


def counts(module, x):
    module.step += 1
    return module.step


def names(module, x):
    module.pair, module.name = (*module.pair, module.step), module.name + "b"
    return len(module.pair) + len(module.name)


def appends(module, x):
    module.rows.append(float(x.detach().mean()))
    module.recent.append(module.rows[-1])
    module.chosen.add(len(module.rows))
    return sum(module.rows) + sum(module.recent) + len(module.chosen)


def fills(module, x):
    module.cache[len(module.cache)] = module.ordered[len(module.ordered)] = x.detach().mean(0)
    module.counts["runs"] += 1
    module.groups["all"] = [*module.groups["all"], 1]
    return torch.stack([*module.cache.values(), *module.ordered.values()]).sum(0) * module.counts["runs"]


def writes_a_buffer(module, x):
    module.sum.add_(x.detach().mean(0))
    return module.sum.clone()


def writes_a_buffer_that_autograd_saves(module, x):
    module.sum.add_(x.detach().mean(0))
    return module.sum


def writes_a_buffer_unseen(module, x):
    """No version tells, as with `torch.distributed.all_reduce`."""
    module.sum.data.add_(x.detach().mean(0))
    return module.sum.clone()


def writes_a_buffer_unseen_from_its_third_call_on(module, x):
    module.step += 1
    before = module.sum.clone()
    if module.step > 2:
        module.sum.data.add_(x.detach().mean(0))
    return module.sum - 0.5 * before + 1


def writes_a_tensor_unseen_from_its_third_call_on(module, x):
    module.step += 1
    before = module.mean.clone()
    if module.step > 2:
        module.mean.data.add_(x.detach().mean(0))
    return module.mean - 0.5 * before + 1


def writes_and_replaces_a_buffer(module, x):
    module.sum.add_(x.detach().mean(0))
    module.sum = module.sum * 0.5
    return module.sum


def replaces_a_tensor(module, x):
    module.mean = 0.9 * module.mean + x.detach().mean(0)
    return module.mean


def writes_a_tensor(module, x):
    module.mean.mul_(0.9).add_(x.detach().mean(0))
    return module.mean.clone()


def adds_and_deletes(module, x):
    if hasattr(module, "once"):
        del module.once
        return 2
    module.once = 3
    return module.once


def begins(module, x):
    """Sets itself up in its first call."""
    if module.late is None:
        module.late = x.detach().std(0)
    return module.late


CHANGES = [
    counts, names, appends, fills, writes_a_buffer, writes_a_buffer_that_autograd_saves, writes_a_buffer_unseen,
    writes_a_buffer_unseen_from_its_third_call_on, writes_a_tensor_unseen_from_its_third_call_on,
    writes_and_replaces_a_buffer, replaces_a_tensor, writes_a_tensor, adds_and_deletes, begins,
]  # fmt: skip


def model_of(change, count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Changing(change) for _ in range(count)))


def left_in(model):
    """Tensors and other values, apart, in the order of names."""
    tensors, others = list(model.buffers()), []
    for module in model:
        for name in sorted(set(vars(module)) - set(vars(nn.Module())) - {"change", "forward"}):
            value = vars(module)[name]
            if isinstance(value, dict):
                tensors += [each for each in value.values() if isinstance(each, torch.Tensor)]
                value = list(value)
            (tensors if isinstance(value, torch.Tensor) else others).append(value)
    return tensors, others


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("decision", RECOMPUTE)
def test_what_a_module_changes_it_changes_once(decision, change):
    model = model_of(change)
    plain = copy.deepcopy(model)
    store = ActivationStore(model, f"[0-9] : {decision}", min_bytes=0)
    for seed in range(3):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))
        with store:
            loss = model(x).square().sum()
        wanted = plain(x).square().sum()
        for again in (True, False):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=again)
            check_same(found, torch.autograd.grad(wanted, list(plain.parameters()), retain_graph=again))
        (tensors, others), (wanted_tensors, wanted_others) = left_in(model), left_in(plain)
        check_same(tensors, wanted_tensors)
        assert others == wanted_others


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_two_calls_each_find_what_they_found(decision):
    model = model_of(lambda module, x: counts(module, x) + appends(module, x) + writes_a_buffer(module, x))
    plain, x = copy.deepcopy(model), torch.randn(5, WIDTH)
    with ActivationStore(model, f"[0-9] : {decision}", min_bytes=0):
        loss = model(x).sum() + model(2 * x).exp().sum()
    wanted = plain(x).sum() + plain(2 * x).exp().sum()
    leaves = [list(each.parameters()) for each in (model, plain)]
    check_same(torch.autograd.grad(loss, leaves[0]), torch.autograd.grad(wanted, leaves[1]))
    assert [(block.step, block.rows) for block in model] == [(block.step, block.rows) for block in plain]
    check_same(list(model.buffers()), list(plain.buffers()))


def keeps_its_output(module, x):
    """A loss of its own, as mixtures of experts leave it."""
    module.late = module.inner(x).square().mean()
    return 1


def test_what_a_module_leaves_with_a_graph_is_that_of_the_first_run():
    model, x = model_of(keeps_its_output), torch.randn(5, WIDTH)
    plain = copy.deepcopy(model)
    store = ActivationStore(model, "[0-9] : recompute", min_bytes=0)
    for _ in range(2):
        with store:
            y = model(x).sum()
            left = [block.late for block in model]
            loss = y + sum(left)
        wanted = plain(x).sum() + sum(block.late for block in plain)
        found = torch.autograd.grad(loss, list(model.parameters()))
        check_same(found, torch.autograd.grad(wanted, list(plain.parameters())))
        assert all(block.late is each for block, each in zip(model, left, strict=True))


def test_what_a_module_leaves_with_a_graph_does_not_hold_earlier_graphs():
    model, x = model_of(keeps_its_output), torch.randn(5, WIDTH)
    store = ActivationStore(model, "[0-9] : recompute(raw)", min_bytes=0)
    live = []
    with gc_off():
        for _ in range(4):
            with store:
                model(x)
            live.append(store.report().live_bytes)
        assert live[1:] == live[:-1]
        for block in model:
            block.late = None
        check_drained(store)


def continues(module, x):
    """A state with a graph, which the second run would need as it was."""
    state = module.inner(x) if module.late is None else module.late * 0.5
    module.late = state.tanh()
    return state


def test_a_large_tensor_that_forward_replaces_does_not_wait():
    def replaces(module, x):
        old, module.late = module.late, torch.ones(2**18 + 1)
        return 1 if old is None else old[0]

    model, x = model_of(replaces, 1), torch.randn(5, WIDTH)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        model(x).sum().backward()
        loss = model(x).sum()
    with pytest.raises(StateError, match=r"attribute=Changing\.late: .* at most 1 MiB"):
        loss.backward()


def test_a_state_with_a_graph_is_refused_where_the_second_run_reads_it():
    model, x = model_of(continues, 1), torch.randn(5, WIDTH)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        first, second = model(x), model(x)
    left = model[0].late
    with pytest.raises(StateError, match=r"attribute=Changing\.late: .* keep in place of recompute"):
        second.sum().backward()
    assert model[0].late is left
    del first, second, left
    model[0].late = None


def test_a_list_of_values_with_a_graph_is_refused_where_the_second_run_reads_them():
    def sums(module, x):
        module.rows.append(module.inner(x).mean())
        return sum(module.rows)

    model, x = model_of(sums, 1), torch.randn(5, WIDTH)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        _, second = model(x).sum(), model(x).sum()
    left = list(model[0].rows)
    with pytest.raises(StateError, match=r"attribute=Changing\.rows\[1\]"):
        second.backward()
    assert all(a is b for a, b in zip(model[0].rows, left, strict=True))
    model[0].rows.clear()


def decays(module, x):
    with torch.no_grad():
        module.inner.bias.mul_(0.5)
    return 2


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_weight_that_forward_changes_each_time_is_refused(decision):
    model, x = model_of(decays), torch.randn(5, WIDTH)
    values = [block.inner.bias.detach() * 0.5 for block in model]
    with ActivationStore(model, f"[0-9] : {decision}", min_bytes=0):
        loss = model(x).sum()
    with pytest.raises(StateError, match=r"inner\.bias of a Changing that is recomputed: .* other values"):
        loss.backward()
    check_same([block.inner.bias.detach() for block in model], values)


def test_a_buffer_that_forward_changes_later_is_refused_once():
    """The first forwards show what a module writes to. What it writes to later, no copy was made of."""

    def writes(module, x):
        module.step += 1
        if module.step > 2:
            module.sum.add_(1)
        return 1 + module.sum[:WIDTH]

    model, x = model_of(writes, 1), torch.randn(5, WIDTH)
    model[0].sum = torch.zeros(2048)  # of a smaller one a copy waits
    store = ActivationStore(model, "0 : recompute", min_bytes=0)
    for _ in range(2):
        with store:
            loss = model(x).sum()
        loss.backward()
    with store:
        loss = model(x).sum()
    with pytest.raises(StateError, match="sum of a Changing that is recomputed"):
        loss.backward()
    check_same(model[0].sum, torch.ones(2048))
    plain = copy.deepcopy(model)
    with store:
        loss = model(x).sum()
    found = torch.autograd.grad(loss, list(model.parameters()))
    check_same(found, torch.autograd.grad(plain(x).sum(), list(plain.parameters())))
    check_same(model[0].sum, torch.full((2048,), 2.0))


def test_buffers_over_one_memory_are_refused_unless_they_get_the_same_again():
    class Halves(nn.Module):
        def __init__(self, step):
            super().__init__()
            self.inner, self.step = nn.Linear(WIDTH, WIDTH), step
            both = torch.ones(2, WIDTH)
            self.register_buffer("first", both[0])
            self.register_buffer("second", both[1])

        def forward(self, x):
            self.first.mul_(self.step)
            return torch.tanh(self.inner(x) + self.second)

    x = torch.randn(5, WIDTH)
    for step in (1, 2):
        model = nn.Sequential(Halves(step))
        with ActivationStore(model, "0 : recompute", min_bytes=0):
            loss = model(x).sum()
        if step == 1:
            loss.backward()
        else:
            with pytest.raises(StateError, match="first of a Halves"):
                loss.backward()
        check_same(model[0].first, torch.full((WIDTH,), float(step)))


class Watches(nn.Module):
    """Hooks of a forward, whose handles wait in an attribute and in a list until they are removed."""

    def __init__(self, reads):
        super().__init__()
        self.inner, self.reads = nn.Linear(WIDTH, WIDTH), reads
        self.handle, self.handles, self.seen = None, [], []

    def forward(self, x):
        y = self.inner(x).tanh()
        self.handle = self.inner.weight.register_hook(lambda grad: self.seen.append("weight"))
        self.handles.append(register_multi_grad_hook((x, y), lambda grads: self.seen.append("both")))
        if self.reads:  # it runs again here
            assert y.grad_fn._saved_result.shape == y.shape
        return y * y

    def remove(self):
        for handle in (self.handle, *self.handles):
            handle.remove()
        self.handles.clear()


@pytest.mark.parametrize("policy", ["keep", *RECOMPUTE])
@pytest.mark.parametrize("reads", [False, True])
def test_hooks_of_a_second_run_are_removed(policy, reads):
    """Its handles are dropped with the attributes that it has set: hooks of a weight would stay for ever."""
    model = nn.Sequential(Watches(reads), Watches(False))
    with gc_off():
        store = ActivationStore(model, f"[0-9] : {policy}", min_bytes=0)
        for _ in range(2):
            with store:
                loss = model(torch.randn(4, WIDTH, requires_grad=True)).sum()
            loss.backward()
            for watching in model:
                assert sorted(watching.seen) == ["both", "weight"]
                watching.remove()
                watching.seen.clear()
                assert not watching.inner.weight._backward_hooks
        del loss
        check_drained(store)
        store.close()


class Toggles(nn.Module):
    """Changes something for as long as its operators run. A second run ends before it is undone."""

    def __init__(self, change, undo):
        super().__init__()
        self.inner, self.change, self.undo = nn.Linear(WIDTH, WIDTH), change, undo
        self.is_busy, self.stack = False, []

    def forward(self, x):
        self.change(self)
        y = torch.tanh(self.inner(x))
        self.undo(self)
        return y


TOGGLED = {
    "attribute": (lambda m: setattr(m, "is_busy", True), lambda m: setattr(m, "is_busy", False)),
    "new attribute": (lambda m: setattr(m, "scratch", 1.0), lambda m: delattr(m, "scratch")),
    "deleted attribute": (lambda m: delattr(m, "is_busy"), lambda m: setattr(m, "is_busy", False)),
    "container": (lambda m: m.stack.append(1), lambda m: m.stack.pop()),
    "mode of a part": (lambda m: m.inner.eval(), lambda m: m.inner.train()),
}


@pytest.mark.parametrize("toggled", TOGGLED)
@pytest.mark.parametrize("policy", RECOMPUTE)
def test_what_a_forward_undoes_is_undone_after_a_second_run_that_ends_early(policy, toggled):
    model = nn.Sequential(Toggles(*TOGGLED[toggled]), Toggles(*TOGGLED[toggled]))
    with ActivationStore(model, f"[0-9] : {policy}", min_bytes=0):
        loss = model(torch.randn(4, WIDTH, requires_grad=True)).sum()
    loss.backward()
    for module in model:
        assert (module.is_busy, module.stack, module.inner.training) == (False, [], True)
        assert not hasattr(module, "scratch")
