"""Operators that rules name inside of recomputed regions: they run once, and gradients are those of plain training."""

import copy
import gc
from collections import Counter
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from actstore import SampleErrors
from actstore.errors import MutationError, StateError
from actstore.recompute import recomputed_module
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.recompute.regions import Runs
from tests.recompute.test_excepted import (
    EXACT,
    LOSSY,
    MODELS,
    REGIONS,
    WIDTH,
    Branch,
    Stack,
    check_three_backwards,
    held,
    make,
    step,
)

WORDS = ["@sdpa", "@matmul", "@conv", "@norm", "@activation", "@aten.*", "@aten.add", "@aten.topk"]
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


class Operators(TorchDispatchMode):
    """A mode that counts operators."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count[operator._schema.name.replace("::", ".")] += 1
        return operator(*args, **(kwargs or {}))


def policy(word, decision="keep", region="recompute"):
    return f"blocks.*/{word} : {decision}; blocks.* : {region}"


def compare(model, text, **options):
    """Train a step with a policy and without: bits are equal, and nothing is left."""
    wanted, _ = step(copy.deepcopy(model), **options)
    store = make(model, text)
    with gc_off():
        found, _ = step(model, store, **options)
        check_same(found, wanted)
        check_drained(store)
    assert not _get_current_dispatch_mode_stack()
    return store


def runs(model, text=None):
    """How often each operator runs in a step."""
    with Operators() as mode:
        step(model, text and make(model, text))
    return mode.count


# -- equality ---------------------------------------------------------------------------------------------------------


WAYS = [*((decision, REGIONS[0]) for decision in EXACT), *(("raw", region) for region in REGIONS[1:])]


@pytest.mark.parametrize(("decision", "region"), WAYS)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_buffers_and_generators_are_those_of_plain_training(name, word, decision, region):
    compare(MODELS[name](), policy(word, decision, region))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", MODELS)
def test_autocast_and_backward_inside_of_the_context(name, word, inside):
    compare(MODELS[name](), policy(word, "raw"), autocast=True, inside=inside)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("word", WORDS)
def test_with_and_without_an_early_stop(word, early):
    with set_checkpoint_early_stop(early):
        compare(MODELS["gpt"](), policy(word))


@pytest.mark.parametrize(
    ("name", "word", "operator"),
    [
        ("gpt", "@sdpa", FLASH),
        ("gpt", "@matmul", "aten.addmm"),
        ("gpt", "@activation", "aten.gelu"),
        ("gpt", "@norm", "aten.native_layer_norm"),
        ("gpt", "@aten.gelu", "aten.gelu"),
        ("resnet", "@conv", "aten.convolution"),
        ("experts", "@aten.topk", "aten.topk"),
    ],
)
def test_an_operator_that_a_rule_names_runs_once(name, word, operator, monkeypatch):
    monkeypatch.setattr(recomputed_module, "compiles", bool)  # earlier tests may have called torch.compile
    model = MODELS[name]()
    plain, again, once = runs(model), runs(model, "blocks.* : recompute"), runs(model, policy(word))
    assert once[operator] == plain[operator]
    assert (again[operator] > plain[operator]) == (operator != "aten.topk")  # routing is kept without a rule


def test_it_runs_once_in_two_backwards():
    model = MODELS["gpt"]()
    with Operators() as mode:
        with make(model, policy("@sdpa")):
            loss = model(*model.batch()).sum()
        for retain in (True, False):
            loss.backward(retain_graph=retain)
    assert mode.count[FLASH] == 3


def test_rules_of_a_part_and_of_all():
    model = MODELS["gpt"]()
    count = runs(model, "blocks.*.mlp/@matmul : keep; blocks.0/@sdpa : raw; blocks.* : recompute")
    assert count[FLASH] == 5
    assert count["aten.addmm"] == 1 + 3 * (2 + 2 * 2)  # stem, those of mlp once, those of attention twice


def test_a_rule_for_operators_everywhere():
    """Outside of regions it says where the tensors wait that such operators made."""
    model = MODELS["gpt"]()
    store = compare(model, "*/@matmul : raw @ disk; blocks.1 : recompute; * : keep")
    found = {site.site: site.decision for site in store.report().sites}
    assert found["blocks.0.mlp.1[0]"] == "raw @ disk"
    assert found["blocks.1.mlp.0[0]"] == "raw @ disk"


# -- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", LOSSY)
@pytest.mark.parametrize("word", ["@matmul", "@activation", "@conv", "@aten.*"])
@pytest.mark.parametrize("name", MODELS)
def test_lossy_results(name, word, decision):
    """Decisions of the region are those of the first run, and no random number differs."""
    model = MODELS[name]()
    wanted, _ = step(copy.deepcopy(model))
    store = make(model, policy(word, decision))
    found, _ = step(model, store)
    check_same(found[0], wanted[0])
    check_same(found[-1], wanted[-1])
    gap = sum((a - b).double().square().sum() for a, b in zip(found[1:-1], wanted[1:-1], strict=True))
    assert gap < 1e-2 * sum(b.double().square().sum() for b in wanted[1:-1])
    if (name, word) in (("gpt", "@matmul"), ("gpt", "@activation"), ("resnet", "@conv"), ("experts", "@aten.*")):
        assert gap > 0
        assert any("int8" in site.decision for site in store.report().sites)


class Sides(nn.Module):
    """Operators that decide by a float, each on a lossy result."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.lin(x)
        return F.leaky_relu(h, 0.1) + F.relu(h - 0.5) + F.hardtanh(h) + F.hardswish(h) + h.sort(-1).values


@pytest.mark.parametrize("region", REGIONS)
def test_a_lossy_result_is_not_cut_down_to_what_one_reader_needs(region):
    model = Stack(Sides)
    wanted, _ = step(copy.deepcopy(model))
    found, _ = step(model, make(model, policy("@matmul", "int8", region)))
    for a, b in zip(found[1:-1], wanted[1:-1], strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


def test_decisions_made_anew_are_left_alone():
    model = Stack(Sides)
    store = make(model, policy("@matmul", "int8", "recompute(decisions=anew)"))
    step(model, store)
    assert not any("decisions of" in site.note for site in store.report().sites)
    store = make(model, policy("@matmul", "int8"))
    step(model, store)
    assert any("decisions of" in site.note for site in store.report().sites)


@pytest.mark.parametrize("decision", ["keep", "int8"])
@pytest.mark.parametrize("word", WORDS)
def test_lossy_inputs_of_the_region(word, decision):
    model = MODELS["experts" if word == "@aten.topk" else "gpt"]()
    wanted, _ = step(copy.deepcopy(model))
    found, _ = step(model, make(model, policy(word, decision, "recompute(int8)")))
    check_same(found[-1], wanted[-1])
    gap = sum((a - b).double().square().sum() for a, b in zip(found[1:-1], wanted[1:-1], strict=True))
    assert gap < 1e-2 * sum(b.double().square().sum() for b in wanted[1:-1])


def test_sampled_errors():
    model = MODELS["gpt"]()
    store = make(model, policy("@matmul", "int8"), observe=[SampleErrors(every=1)])
    for _ in range(2):
        step(model, store)
    assert any(site.error for site in store.report().sites)


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_results_are_held_once_and_the_report_names_them():
    model = MODELS["gpt"]()
    least, kept = held(model, "blocks.* : recompute"), held(model, policy("@sdpa"))
    rows = 4 * 6
    assert kept.held_bytes == least.held_bytes + 3 * 4 * (rows * WIDTH + rows * 2)  # and one logsumexp for each head
    assert kept.saved_bytes == least.saved_bytes
    notes = {site.site: site.note for site in kept.sites if "result of" in site.note}
    assert notes == {
        f"blocks.{i}.part[{j}]": f"result of {FLASH}, which recomputations read" for i in range(3) for j in range(2)
    }


def test_a_result_that_no_recomputation_reads_is_not_held():
    model = Stack(lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))
    least, kept = held(model, "blocks.* : recompute"), held(model, policy("@matmul"))
    assert kept.held_bytes == least.held_bytes
    compare(model, policy("@matmul"))


def test_a_result_waits_where_its_rule_says():
    model = MODELS["gpt"]()
    store = make(model, policy("@aten.gelu", "raw @ disk"))
    with store:
        loss = model(*model.batch()).sum()
    sites = [site for site in store.report().sites if "result of aten.gelu" in site.note]
    assert [(site.site, site.decision, site.stored_bytes) for site in sites] == [
        (f"blocks.{i}.mlp.1[0]", "raw @ disk", 4 * 6 * 32 * 4) for i in range(3)
    ]
    loss.backward()


# -- what regions do with results -------------------------------------------------------------------------------------


class Using(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.lin, self.other, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.lin, self.other, x)


def _written_view(lin, other, x):
    y = lin(x)
    y.transpose(0, 1)[1:].mul_(2)
    return y.sin() + other(y).cos()


def _grad_off(lin, other, x):
    with torch.no_grad():
        gate = lin(x).sigmoid()
        gate += 1
    return other(x * gate).sin()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x @ weight).mul_(2)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight.T, 2 * (x.flatten(0, -2).T @ grad.flatten(0, -2))


def _detached(lin, other, x):
    y = lin(x)
    y.detach().mul_(2)
    return other(y.sin())


USES = {
    "in place": lambda lin, other, x: other(F.relu(lin(x), inplace=True)).sin(),
    "in place twice": lambda lin, other, x: other(lin(x).mul_(2).add_(x).sin()).sin(),
    "in place on a view": _written_view,
    "in place on what it is detached from": _detached,
    "returned": lambda lin, other, x: lin(other(x).sin()),
    "views": lambda lin, other, x: (lin(x).chunk(2, -1)[1].exp() * x[..., :8]).repeat(1, 1, 2),
    "without gradients": _grad_off,
    "in a function": lambda lin, other, x: other(Twice.apply(x.sin(), lin.weight)).sin(),
    "several results": lambda lin, other, x: other(x.sort(-1).values + x.topk(WIDTH, -1)[0]) + x.cummin(-1).values,
    "weights": lambda lin, other, x: F.linear(x, lin.weight @ other.weight).sin(),
    "empty": lambda lin, other, x: lin(x[:0]).sum() + other(x).sin(),
    "complex": lambda lin, other, x: other(torch.fft.irfft(torch.fft.rfft(lin(x)) * 2j, n=WIDTH)).sin(),
    "drawn": lambda lin, other, x: (
        other(torch.native_dropout(lin(x), 0.3, True)[0] * F.dropout(x)).sin() * F.dropout(x)
    ),
    "rrelu": lambda lin, other, x: F.dropout(other(F.rrelu(lin(x), training=True))).sin(),
    "attention with dropout": lambda lin, other, x: F.dropout(
        other(F.scaled_dot_product_attention(lin(x), x, x, dropout_p=0.2))
    ),
    "same twice": lambda lin, other, x: (y := lin(x)).sin() * y.cos() + other(y + y).exp(),
}


@pytest.mark.parametrize("region", [REGIONS[0], REGIONS[2]])
@pytest.mark.parametrize("decision", ["keep", "raw"])
@pytest.mark.parametrize("word", ["@matmul", "@aten.*"])
@pytest.mark.parametrize("use", USES)
def test_what_a_region_does_with_results(use, word, decision, region):
    model = Stack(lambda: Using(USES[use]), blocks=2)
    compare(model, policy(word, decision, region))


@pytest.mark.parametrize("decision", ["keep", "raw"])
@pytest.mark.parametrize("region", REGIONS[:3])
def test_the_output_of_a_region_may_change(decision, region):
    class Changing(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = block(x).mul_(0.5) + 1
            return x

    model = Changing(lambda: Using(lambda lin, other, x: ((y := lin(x)).sin() + other(y).cos(), y)[1]), blocks=2)
    compare(model, policy("@matmul", decision, region))


@pytest.mark.parametrize("decision", ["keep", "raw"])
def test_a_result_that_changes_after_the_region(decision):
    """The memory of a kept one is the tensor's, which must not change; a stored one is as it was."""
    seen = []

    def show(lin, other, x):
        y = lin(x)
        seen.append(y.detach())
        return other(y.sin()).sin()

    model = Stack(lambda: Using(show), blocks=1)
    with make(model, policy("@matmul", decision)):
        loss = model(*model.batch()).sum()
    seen[0].mul_(2)
    if decision == "keep":
        with pytest.raises(MutationError, match=r"blocks\.0\.lin"):
            loss.backward()
    else:
        loss.backward()
    del loss


def test_drawn_results_leave_generators_as_they_were():
    """The operator draws in the first run only, and what is drawn after it is the same."""
    model = Stack(lambda: Using(USES["drawn"]))
    assert runs(model, policy("@aten.native_dropout"))["aten.native_dropout"] == 3
    compare(model, policy("@aten.native_dropout"))
    generator = torch.Generator()

    def draw(lin, other, x):
        return other(x.sin() * torch.rand(x.shape, generator=generator)).sin() * torch.rand(x.shape)

    compare_with = []
    for text in (None, policy("@aten.*"), policy("@aten.rand*", "raw", "recompute(segment=2)")):
        generator.manual_seed(7)
        model = Stack(lambda: Using(draw))
        for block in model.blocks:
            block.generator = generator
        compare_with.append([*step(model, text and make(model, text))[0], generator.get_state()])
    for found in compare_with[1:]:
        check_same(found, compare_with[0])


def test_running_statistics_change_once():
    """Batch norm writes to them, which its schema does not say: it runs again."""
    model = MODELS["resnet"]()
    plain, found = runs(model), runs(model, policy("@norm"))
    assert found["aten.native_batch_norm"] == runs(model, "blocks.* : recompute")["aten.native_batch_norm"]
    assert plain["aten.native_batch_norm"] == 6
    for _ in range(2):
        compare(model, policy("@norm", "raw"))


# -- other rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("decision", ["keep", "raw @ disk", "derive"])
@pytest.mark.parametrize("name", MODELS)
def test_parts_and_operators(name, decision, region):
    text = f"blocks.*/@aten.add : {decision}; blocks.*.part : {decision}; blocks.*/@norm : raw; blocks.* : {region}"
    compare(MODELS[name](), text)


def test_operators_of_a_part_follow_its_own_rules():
    model = MODELS["gpt"]()
    store = compare(
        model, "blocks.*/@sdpa : raw; blocks.*.part : keep; blocks.*/@aten.gelu : raw; blocks.* : recompute"
    )
    found = {site.site.partition("[")[0] for site in store.report().sites if site.decision == "raw"}
    assert found == {f"blocks.{i}.{part}" for i in range(3) for part in ("part.proj", "part", "mlp.1")}


def test_regions_inside_of_a_part():
    model = MODELS["gpt"]()
    text = (
        "blocks.*.part/@matmul : raw; blocks.*.part.proj : recompute(raw); blocks.*.part : keep; blocks.* : recompute"
    )
    compare(model, text)


@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_models_own_inside_of_a_region(reentrant):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.part = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

        def forward(self, x):
            return x + checkpoint(self.part, self.norm(x), use_reentrant=reentrant).sin()

    compare(Stack(Own), policy("@aten.*", "raw"))


def test_a_compiled_part_runs_uncompiled():
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)
            self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
            self.part.compile(backend="aot_eager")

        def forward(self, x):
            return x + self.part(self.lin(x)).sin()

    model = Stack(Compiled, blocks=1)
    assert runs(model, policy("@aten.gelu"))["aten.gelu"] == 1


# -- errors and graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", ["keep", "raw @ disk"])
def test_an_exception_in_forward_leaves_nothing(decision):
    model = MODELS["gpt"]()
    store = make(model, policy("@aten.*", decision))
    handle = model.blocks[1].mlp[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), store:
        model(*model.batch())
    handle.remove()
    gc.collect()
    check_drained(store)
    assert not _get_current_dispatch_mode_stack()
    check_same(step(model, store)[0], step(model)[0])


def test_an_exception_in_the_recomputation_leaves_nothing():
    model = MODELS["gpt"]()
    store = make(model, policy("@matmul", "raw"))
    runs = count(-1)
    model.blocks[1].mlp[1].register_forward_pre_hook(lambda *_: 1 / next(runs) and None)
    with store:
        loss = model(*model.batch()).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    assert not _get_current_dispatch_mode_stack()
    del loss
    gc.collect()
    check_drained(store)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("decision", ["keep", "raw @ disk", "int8"])
def test_a_graph_without_backward_is_freed_at_once(decision, region):
    model = MODELS["gpt"]()
    store = make(model, policy("@aten.*", decision, region))
    with gc_off():
        with store:
            loss = model(*model.batch()).sum()
        del loss
        check_drained(store)


@pytest.mark.parametrize(("decision", "region"), WAYS)
def test_two_backwards_and_second_derivatives(decision, region):
    model = Stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)))
    x = model.batch()[0].requires_grad_()

    def run(text):
        torch.manual_seed(1)
        if text is None:
            loss = model(x).square().sum()
        else:
            with make(model, text):
                loss = model(x).square().sum()
        parameters = list(model.blocks[0].parameters())
        first = torch.autograd.grad(loss, [x, *parameters], retain_graph=True)
        second = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
        return [*first, *second]

    for word in ("@matmul", "@aten.*"):
        check_same(run(policy(word, decision, region)), run(None))


class Chunks(nn.Module):
    """Writes to a result by way of chunks, as GRU cells do on a CPU: no version of the result tells."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        first, second = self.linear(x).unsafe_chunk(2, -1)
        return first.sigmoid_() * second.tanh()


@pytest.mark.parametrize("decision", [*EXACT, *LOSSY])
@pytest.mark.parametrize("build", [Chunks, lambda: nn.GRUCell(WIDTH, WIDTH)], ids=["chunks", "gru"])
def test_writes_that_no_version_tells(build, decision):
    """Each backward finds the result as it was."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.Sequential(build(), nn.Tanh(), build())})
    x = torch.randn(4, WIDTH, requires_grad=True)
    store = make(model, policy("@matmul", decision))
    check_three_backwards(model, x, store, exact=decision in EXACT)


def test_a_region_that_goes_another_way():
    ways = Runs()
    ways.append(lambda lin, other, x: lin(x).sin())
    ways.append(lambda lin, other, x: other(torch.bmm(x, x.transpose(1, 2)) @ x).sin())

    def go(*args):
        return ways[0](*args)

    model = Stack(lambda: Using(go), blocks=1)
    with make(model, policy("@matmul")):
        loss = model(*model.batch()).sum()
    ways.reverse()
    with pytest.raises(StateError, match=r"its operator 1 of those that rules name is aten\.bmm of 4x6x16, and was"):
        loss.backward()


def test_interleaved_steps():
    model = MODELS["gpt"]()
    batches = [torch.randn(4, 6, WIDTH) for _ in range(2)]

    def run(store):
        torch.manual_seed(1)
        losses = []
        for batch in batches:
            if store is None:
                losses.append(model(batch).sum())
            else:
                with store:
                    losses.append(model(batch).sum())
        return [g for loss in losses for g in torch.autograd.grad(loss, list(model.parameters()))]

    check_same(run(make(model, policy("@aten.*", "raw"))), run(None))


def test_a_shared_part():
    model = MODELS["resnet"]()
    part = Branch()
    for block in model.blocks:
        block.part = part
    compare(model, "blocks.0.part/@conv : raw; blocks.* : recompute")


class ReadEarly(nn.Module):
    """Reads in forward what its own operator has saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = F.dropout(self.linear(x), 0.2).exp()
        return y * y.grad_fn._saved_result.detach()


@pytest.mark.parametrize("rule", ["blocks.*/@matmul : keep", "blocks.*.linear : keep"])
def test_a_region_that_is_read_before_its_forward_has_ended_is_refused(rule):
    compare(Stack(ReadEarly), "blocks.* : recompute")
    model = Stack(ReadEarly)
    with pytest.raises(StateError, match="was read before its forward ended"):
        step(model, make(model, f"{rule}; blocks.* : recompute"))
