"""Recomputed modules: same bits, inputs in the store, and a model that is left as it was."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.errors import PolicyError
from tests.autograd.checks import check_drained, check_same, gc_off, train_step
from tests.autograd.models import WIDTH, Block, Mlp, build
from tests.recompute.regions import Runs

RECOMPUTE = ["recompute", "recompute(raw)", "recompute(raw @ host)", "recompute(raw @ disk)"]


class Counted(nn.Module):
    """Counts how often it runs; a tensor by name and one in a container take part."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Linear(WIDTH, WIDTH), Runs()

    def forward(self, x, *rest, gate=None, parts=(), mode="tanh"):
        self.seen.append((torch.is_autocast_enabled("cpu"), mode))
        y = getattr(self.inner(x), mode)()
        for part in (*rest, *parts, *(() if gate is None else (gate,))):
            y = y * part.sin()
        return y


def make(model, policy="inner : recompute(raw)", **options):
    return ActivationStore(model, policy, min_bytes=0, **options)


def wrap(module):
    return nn.ModuleDict({"inner": module})


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_forward_runs_once_more_in_backward(decision):
    model, x = wrap(Counted()), torch.randn(3, WIDTH, requires_grad=True)
    with make(model, f"inner : {decision}"):
        y = model["inner"](x)
    assert len(model["inner"].seen) == 1
    found = torch.autograd.grad(y.sum(), x)
    assert len(model["inner"].seen) == 2
    check_same(found, torch.autograd.grad(model["inner"](x).sum(), x))


def test_nothing_is_recomputed_without_gradients():
    model, x = wrap(Counted()), torch.randn(3, WIDTH)
    store = make(model)
    with store, torch.no_grad():
        model["inner"](x)
    assert len(model["inner"].seen) == 1
    assert store.report().stored_bytes == 0


@pytest.mark.parametrize("decision", RECOMPUTE[1:])
def test_tensors_by_name_and_in_containers_reach_the_store(decision):
    model = wrap(Counted())
    x, a, b, c = (torch.randn(3, WIDTH, requires_grad=True) for _ in range(4))
    store = make(model, f"inner : {decision}")

    def call(*, module=model["inner"]):
        return module(x * 1, a * 1, gate=b * 1, parts=[c * 1], mode="sigmoid").sum()

    with gc_off():
        with store:
            y = call()
        assert store.report().stored_bytes == 4 * x.nbytes
        found = torch.autograd.grad(y, (x, a, b, c))
        del y
        check_drained(store)
    check_same(found, torch.autograd.grad(call(), (x, a, b, c)))


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("decision", [*RECOMPUTE, "recompute(segment=2)"])
def test_arguments_that_are_one_tensor_are_one_again(decision):
    """nn.MultiheadAttention asks whether they are, and goes another way."""
    model, x = nn.Sequential(SelfAttention(), SelfAttention()), (torch.randn(2, 5, WIDTH),)
    plain = train_step(model, x)
    check_same(train_step(model, x, make(model, f"*.inner : {decision}")), plain)


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_only_the_inputs_are_held(decision):
    model, batch = build("transformer")
    plain, store = make(model, "keep"), make(model, f"blocks.* : {decision}")
    for one in (plain, store):
        with one:
            loss = model(*batch).square().mean()
        del loss
    assert store.report().saved_bytes == plain.report().saved_bytes
    assert store.report().held_bytes < 0.3 * plain.report().held_bytes


def test_the_peak_includes_the_recomputation():
    model, batch = build("transformer")
    one_block, store = make(model, "keep"), make(model, "blocks.* : recompute")
    with one_block:
        loss = model(*batch).square().mean()
    inside = sum(s.saved_bytes for s in one_block.report().sites if s.site.startswith("blocks.1"))
    del loss
    with store:
        loss = model(*batch).square().mean()
    held = store.report().held_bytes
    assert store.report().peak_held_bytes == held
    loss.backward()
    assert held + 0.5 * inside < store.report().peak_held_bytes <= held + inside


@pytest.mark.parametrize("decision", [*RECOMPUTE, "recompute(int8)"])
def test_dropout_is_the_same_again(decision):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.5), nn.Linear(64, WIDTH)))
    x = torch.randn(6, WIDTH, requires_grad=True)
    torch.manual_seed(7)
    with make(model, f"inner : {decision}"):
        y = model["inner"](x * 1)
    after = torch.rand(3)
    torch.manual_seed(3)  # the generator moves on before backward
    before = torch.get_rng_state()
    found = torch.autograd.grad(y.sum(), x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    plain = model["inner"](x * 1)
    check_same(torch.rand(3), after)
    check_same(y, plain)
    check_same(found, torch.autograd.grad(plain.sum(), x))


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_autocast_at_forward_counts(decision):
    model, x = wrap(Counted()), torch.randn(3, WIDTH, requires_grad=True)
    with make(model, f"inner : {decision}"), torch.autocast("cpu", torch.bfloat16):
        y = model["inner"](x)
    found = torch.autograd.grad(y.float().sum(), x)
    assert model["inner"].seen == [(True, "tanh")] * 2
    with torch.autocast("cpu", torch.bfloat16):
        y = model["inner"](x)
    check_same(found, torch.autograd.grad(y.float().sum(), x))


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_retain_graph_and_double_backward(decision):
    model, x = wrap(Counted()), torch.randn(3, WIDTH, requires_grad=True)
    with make(model, f"inner : {decision}"):
        y = model["inner"](x * 1).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    check_same(torch.autograd.grad(y, x, retain_graph=True), first)
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    found = torch.autograd.grad(grad.square().sum(), x)
    (grad,) = torch.autograd.grad(model["inner"](x * 1).square().sum(), x, create_graph=True)
    check_same(found, torch.autograd.grad(grad.square().sum(), x))


class SlopeOfWritten(nn.Module):
    """Adds its own slope. A view of what it writes to is gone: autograd reads the output of the sigmoid twice."""

    def __init__(self):
        super().__init__()
        self.seen = Runs()

    def forward(self, x):
        self.seen.append(None)
        y = x * 1
        y[..., 1:].sigmoid_()
        y = y.sin()
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0].exp()


@pytest.mark.parametrize("decision", [*RECOMPUTE, "recompute(schedule=revolve, slots=1)"])
def test_a_backward_that_reads_a_tensor_twice_has_it_from_one_run_more(decision):
    model, x = wrap(SlopeOfWritten()), torch.randn(3, WIDTH, requires_grad=True)
    wanted = torch.autograd.grad(model["inner"](x * 1).square().sum(), x)
    runs = len(model["inner"].seen)
    store = make(model, f"inner : {decision}")
    with store:
        y = model["inner"](x * 1).square().sum()
    for again in (True, False):
        check_same(torch.autograd.grad(y, x, retain_graph=again), wanted)
    del y
    check_drained(store)
    assert len(model["inner"].seen) - runs >= 1 + 2 * 2


def test_an_input_that_changed_is_an_error():
    model, x = wrap(Counted()), torch.randn(3, WIDTH, requires_grad=True)
    for decision in RECOMPUTE:
        with make(model, f"inner : {decision}"):
            h = x * 1
            y = model["inner"](h)
        with torch.no_grad():
            h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# -- the module itself ------------------------------------------------------------------------------------------------


def test_the_signature_stays_and_the_attribute_goes():
    model = wrap(Counted())
    module = model["inner"]
    signature, doc = inspect.signature(module.forward), module.forward.__doc__
    with make(model):
        assert "forward" in module.__dict__
        assert inspect.signature(module.forward) == signature
        assert (module.forward.__name__, module.forward.__doc__) == ("forward", doc)
        assert inspect.unwrap(module.forward).__func__ is Counted.forward
    assert "forward" not in module.__dict__
    assert module.forward.__func__ is Counted.forward


def test_a_forward_of_the_instance_comes_back():
    model = wrap(Counted())
    own = functools.partial(Counted.forward, model["inner"], mode="sigmoid")
    model["inner"].forward = own
    x = torch.randn(3, WIDTH, requires_grad=True)
    with make(model):
        y = model["inner"](x)
    assert model["inner"].__dict__["forward"] is own
    check_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(own(x).sum(), x))


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_an_exception_gives_the_forward_back(where, error):
    model = wrap(Counted())

    def fail(*_):
        raise error

    handle = model["inner"].inner.register_forward_hook(fail)
    run = (lambda: model["inner"](torch.randn(3, WIDTH))) if where == "inside" else fail
    with pytest.raises(type(error)), make(model):
        run()
    error.__traceback__ = None
    handle.remove()
    assert "forward" not in model["inner"].__dict__


def test_nested_entries_give_the_forward_back_at_the_last_exit():
    model = wrap(Counted())
    store = make(model)
    with store:
        with store:
            assert "forward" in model["inner"].__dict__
        assert "forward" in model["inner"].__dict__
    assert "forward" not in model["inner"].__dict__


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_model_can_be_copied(when, duplicate):
    model = wrap(Mlp())
    store = make(model, "inner.blocks.* : recompute(raw)")
    x = torch.randn(3, WIDTH, requires_grad=True)
    if when == "before":
        twin = duplicate(model)
    with store:
        y = model["inner"](x)
        if when == "during":
            twin = duplicate(model)
    if when == "after":
        twin = duplicate(model)
    wanted = torch.autograd.grad(y.sum(), x)
    check_same(torch.autograd.grad(twin["inner"](x).sum(), (x, *twin.parameters()))[:1], wanted)  # its own parameters
    assert all(block.forward.__self__ is block for block in twin["inner"].blocks)
    with make(twin, "inner.blocks.* : recompute(raw)") as other:
        y = twin["inner"](x)
    assert other.report().stored_bytes > 0
    check_same(torch.autograd.grad(y.sum(), x), wanted)


def test_state_dict_inside_the_context():
    model = wrap(Mlp())
    names = list(model.state_dict())
    with make(model, "inner.blocks.* : recompute"):
        assert list(model.state_dict()) == names


# -- which modules ----------------------------------------------------------------------------------------------------


def regions(store, model):
    """The modules whose forward is wrapped."""
    with store:
        return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def test_bare_recompute_finds_the_blocks():
    model, _ = build("transformer")
    assert regions(make(model, "recompute"), model) == ["blocks.0", "blocks.1"]
    assert regions(make(model, "blocks.0 : keep; * : recompute"), model) == ["blocks.1"]
    stack = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert regions(make(stack, "recompute"), stack) == ["0", "2"]


def test_a_pattern_wraps_the_outermost_matches():
    model, _ = build("transformer")
    assert regions(make(model, "blocks.1 : recompute"), model) == ["blocks.1"]
    assert regions(make(model, "*.norm? : recompute"), model) == [f"blocks.{i}.norm{j}" for i in (0, 1) for j in (1, 2)]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("*.qkv : recompute(raw); * : recompute", ["*.qkv", "inside the recomputed region", "blocks.0.qkv"]),
        ("blocks.* : recompute; blocks.0.qkv : int8", ["can never apply", "blocks.0.qkv", "blocks.*"]),
        ("blocks : recompute", ["ModuleList", "no forward of its own", "'blocks.* : recompute'"]),
        ("blocks.7 : recompute", ["blocks.7", "matches no module", "blocks.0"]),
        ("block.* : recompute", ["block.*", "blocks.*"]),
        ("recompute(recompute)", ["cannot be recomputed or derived themselves"]),
    ],
)
def test_conflicts_are_errors_when_the_store_is_built(policy, words):
    model, _ = build("transformer")
    with pytest.raises(ValueError, match=r"\w") as info:
        make(model, policy)
    for word in words:
        assert word in str(info.value)


@pytest.mark.parametrize("policy", ["recompute", "* : recompute(raw)", "blocks.* : recompute"])
def test_without_a_model_there_is_nothing_to_recompute(policy):
    with pytest.raises(PolicyError, match=r"no model was given.*ActivationStore\(model, policy\)"):
        ActivationStore(policy=policy)


def test_a_model_without_blocks():
    with pytest.raises(PolicyError, match="repeated blocks of the model, and it has none"):
        ActivationStore(nn.Linear(3, 3), "recompute")


def test_segments_of_a_mixed_policy():
    model, batch = build("transformer")
    store = make(model, "blocks.0 : recompute(raw @ disk); blocks.1.down : int8; blocks.1 : raw; * : keep")
    with store:
        loss = model(*batch).square().mean()
    by_site = {site.site: site for site in store.report().sites}
    assert "raw @ disk" in by_site["blocks.0[0]"].decision
    assert by_site["blocks.1.down[0]"].stored_bytes < by_site["blocks.1.up[0]"].stored_bytes * 2
    assert not any(name.startswith("blocks.0.") for name in by_site)
    loss.backward()


def test_blocks_shared_by_two_parents_are_wrapped_once():
    block = Block()
    model = nn.ModuleDict({"a": nn.ModuleList([block]), "b": nn.ModuleList([block])})
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    with make(model, "a.* : recompute(raw)"):
        y = model["b"][0](model["a"][0](x))
    found = torch.autograd.grad(y.sum(), x)
    check_same(found, torch.autograd.grad(block(block(x)).sum(), x))


def test_two_steps_then_plain():
    model, batch = build("transformer")
    store = make(model, "recompute(raw)")
    for seed in (1, 2):
        check_same(train_step(model, batch, store, seed=seed), train_step(model, batch, seed=seed))


@pytest.mark.parametrize("entered", [False, True])
def test_rules_are_for_the_modules_that_have_the_names_now(entered):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)))
    store = ActivationStore(model, "1 : recompute; * : keep", min_bytes=0)
    x = torch.ones(4, 8)

    def sites():
        with store:
            loss = model(x).sum()
        loss.backward()
        return {site.site.rpartition("[")[0] for site in store.report().sites if site.saved_bytes}

    if entered:
        assert "1" in sites()
    model[1] = copy.deepcopy(model[0])
    found = sites()
    assert "1" in found
    assert not any(name.startswith("1.") for name in found)
    assert "forward" not in vars(model[1])
    model[1] = nn.Identity()
    sites()
    model[1] = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    assert "1" in sites()


@pytest.mark.parametrize("policy", ["raw @ disk", "recompute", "1 : recompute; * : keep"])
def test_lazy_modules_make_their_weights_in_the_first_forward(policy):
    def steps(policy):
        torch.manual_seed(0)
        block = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh())
        model, x = nn.Sequential(nn.LazyLinear(8), block, nn.Linear(8, 1)), torch.randn(6, 4)
        store = ActivationStore(model, policy, min_bytes=0)
        for _ in range(2):
            with store:
                loss = model(x).square().sum()
            loss.backward()
        return [*(weight.grad for weight in model.parameters()), *model.buffers()], store.report()

    (found, report), (wanted, _) = steps(policy), steps("keep")
    assert all(map(torch.equal, found, wanted))
    assert (report.held_bytes < report.saved_bytes) == ("recompute" in policy)


def test_lazy_modules_under_a_lossy_policy():
    model = nn.Sequential(nn.LazyLinear(64), nn.GELU(), nn.LazyLinear(1))
    store = ActivationStore(model, "int8", min_bytes=0)
    with store:
        loss = model(torch.randn(64, 64)).sum()
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
