"""Rules for tags inside of recomputed regions: recomputations go on from the stored tensor."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from actstore import tag
from tests.autograd.checks import check_same, gc_off
from tests.recompute.test_excepted import REGIONS, WIDTH, Stack, held, make, step
from tests.recompute.test_kept_results import FLASH, WAYS, Sides, Using, compare, runs

TAGS = ["qkv", "seen", "hidden", "drawn", "*"]


class Attention(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        qkv = tag(self.qkv(x), "qkv")
        heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in qkv.chunk(3, -1)]
        seen = tag(F.scaled_dot_product_attention(*heads, is_causal=True), "seen")
        return self.proj(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(bias), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        hidden = tag(F.gelu(self.up(self.norm2(x))), "hidden")
        return x + tag(F.dropout(self.down(hidden), 0.2), "drawn")


def model(bias=True):
    return Stack(lambda: Block(bias))


def policy(name, decision="keep", region="recompute"):
    return f"blocks.*/{name} : {decision}; blocks.* : {region}"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("decision", "region"), WAYS)
@pytest.mark.parametrize("name", TAGS)
def test_gradients_and_generators_are_those_of_plain_training(name, decision, region, bias):
    compare(model(bias), policy(name, decision, region))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", TAGS)
def test_autocast_and_backward_inside_of_the_context(name, inside):
    compare(model(), policy(name, "raw"), autocast=True, inside=inside)


@pytest.mark.parametrize(
    ("name", "spared"),
    [
        ("seen", {FLASH}),
        ("hidden", {"aten.gelu"}),
        ("qkv", {"aten.addmm"}),
        # Dropout multiplies, last of all that saves: its noise has no gradient, and so the second run goes to its end.
        ("drawn", {"aten.mul", "aten.add"}),
    ],
)
def test_the_operator_that_made_the_tensor_runs_once(name, spared):
    again, once = runs(model(), "blocks.* : recompute"), runs(model(), policy(name))
    assert {key: again[key] - once[key] for key in again if again[key] > once[key]} == dict.fromkeys(spared, 3)


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_without_a_bias_runs_once(bias):
    """PyTorch makes another tensor of its memory."""
    operator = "aten.addmm" if bias else "aten.mm"
    with_rule = runs(model(bias), policy("qkv"))[operator]
    assert runs(model(bias), "blocks.* : recompute")[operator] - with_rule == 3


def test_rules_of_a_part_decide():
    found = runs(
        model(), "blocks.0/seen : raw; blocks.*.attn/qkv : raw; blocks.*.attn/hidden : raw; blocks.* : recompute"
    )
    again = runs(model(), "blocks.* : recompute")
    assert again[FLASH] - found[FLASH] == 1
    assert again["aten.addmm"] - found["aten.addmm"] == 3
    assert again["aten.gelu"] == found["aten.gelu"]


def test_tensors_wait_where_the_rule_says():
    one = model()
    store = make(one, policy("hidden", "raw @ disk"))
    with store:
        loss = one(*one.batch()).sum()
    sites = [site for site in store.report().sites if "result of aten.gelu" in site.note]
    assert [(site.decision, site.stored_bytes) for site in sites] == [("raw @ disk", 4 * 6 * 32 * 4)] * 3
    loss.backward()


def test_a_rule_without_its_tag_holds_nothing():
    one = model()
    least = held(one, "blocks.* : recompute").held_bytes
    assert held(one, policy("other")).held_bytes == least
    assert held(one, policy("qkv")).held_bytes == least + 3 * 4 * 6 * 3 * WIDTH * 4


@pytest.mark.parametrize("decision", ["int8", "int8 @ disk"])
@pytest.mark.parametrize("name", ["qkv", "hidden"])
def test_lossy_tensors(name, decision):
    one = model()
    wanted, _ = step(copy.deepcopy(one))
    store = make(one, policy(name, decision))
    found, _ = step(one, store)
    check_same(found[0], wanted[0])
    check_same(found[-1], wanted[-1])
    gap = sum((a - b).double().square().sum() for a, b in zip(found[1:-1], wanted[1:-1], strict=True))
    assert 0 < gap < 1e-2 * sum(b.double().square().sum() for b in wanted[1:-1])


class TaggedSides(Sides):
    """The operator that decides made the tagged tensor: its decision is not repeated."""

    def forward(self, x):
        h = tag(F.relu(self.lin(x)), "positive")
        return F.leaky_relu(h - 0.2, 0.1) + F.hardtanh(h) + h.sort(-1).values


def test_decisions_of_an_operator_that_does_not_run_again():
    one = Stack(TaggedSides)
    wanted, _ = step(copy.deepcopy(one))
    found, _ = step(one, make(one, policy("positive", "int8")))
    for a, b in zip(found[1:-1], wanted[1:-1], strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


# -- tensors whose operator is unknown, or runs again -----------------------------------------------------------------


def _late(lin, other, x):
    y = lin(x)
    z = x
    for _ in range(12):
        z = z.sin()
    return other(tag(y, "y") * z).sin()


def _written(lin, other, x):
    y = tag(lin(x), "y")
    return other(F.relu(y, inplace=True)).sin()


def _written_before(lin, other, x):
    y = lin(x).mul_(2)
    return other(tag(y, "y").sin()).sin()


def _late_and_written(lin, other, x):
    y = lin(x)
    z = x
    for _ in range(12):
        z = z.sin()
    y = tag(y, "y")
    y = y.sigmoid_() if y.requires_grad else y.sigmoid()
    return other(y * z).sin()


def _ignored(lin, other, x):
    y = lin(x).sin()
    tag(y, "y")
    return other(y).cos()


def _grad_off(lin, other, x):
    with torch.no_grad():
        gate = tag(lin(x).sigmoid(), "y")
    return other(x * gate).sin()


USES = {
    "made long before": _late,
    "written after": _written,
    "written before": _written_before,
    "made long before and written after": _late_and_written,
    "what tag returns is ignored": _ignored,
    "a view": lambda lin, other, x: other(tag(lin(x).chunk(2, -1)[1], "y").repeat(1, 1, 2)).sin(),
    "a copy": lambda lin, other, x: other(tag(lin(x).transpose(0, 1).contiguous(), "y")).sin().transpose(0, 1),
    "the input": lambda lin, other, x: other(lin(tag(x, "y")).sin()).sin(),
    "twice": lambda lin, other, x: other(tag(tag(lin(x), "y"), "z").sin()).sin(),
    "without gradients": _grad_off,
    "several results": lambda lin, other, x: other(tag(lin(x).sort(-1).values, "y").sin()).sin(),
    "indices": lambda lin, other, x: other(lin(x).gather(-1, tag(x.argsort(-1), "y")).sin()).sin(),
    "drawn": lambda lin, other, x: F.dropout(other(tag(torch.native_dropout(lin(x), 0.3, True)[0], "y"))).sin(),
    "complex": lambda lin, other, x: other(torch.fft.irfft(tag(torch.fft.rfft(lin(x)), "y") * 2j, n=WIDTH)).sin(),
    "sparse": lambda lin, other, x: other(tag(lin(x)[0].to_sparse(), "y").to_dense()).sin() + x,
}


@pytest.mark.parametrize("region", [REGIONS[0], REGIONS[2]])
@pytest.mark.parametrize("decision", ["keep", "raw", "raw @ disk"])
@pytest.mark.parametrize("use", USES)
def test_what_a_region_does_with_tags(use, decision, region):
    one = Stack(lambda: Using(USES[use]), blocks=2)
    compare(one, policy("y", decision, region))


def test_a_tensor_that_was_made_long_before_comes_from_the_store():
    one = Stack(lambda: Using(_late), blocks=2)
    store = compare(one, policy("y", "raw"))
    sites = [site for site in store.report().sites if "tag y" in site.note]
    assert [site.stored_bytes for site in sites] == [4 * 6 * WIDTH * 4] * 2


@pytest.mark.parametrize("region", REGIONS[:3])
def test_tags_parts_and_operators(region):
    text = "blocks.*/seen : raw; blocks.*/@matmul : int8; blocks.*/hidden : keep; blocks.*.norm2 : keep; "
    text += f"blocks.* : {region}"
    one = model()
    step(one, make(one, text))
    compare(one, text.replace("int8", "raw @ disk"))


@pytest.mark.parametrize("names", [("@aten.gelu", "hidden"), ("hidden", "@aten.gelu")])
def test_the_first_rule_decides_about_a_tagged_result(names):
    """Where the tag's rule comes first, the payload of the operator's rule is freed when the tensor gets its tag."""
    one = model()
    report = held(
        one,
        "; ".join(f"blocks.*/{name} : {way}" for name, way in zip(names, ("expack", "raw"), strict=True))
        + "; blocks.* : recompute",
    )
    sites = [site for site in report.sites if "aten.gelu" in site.note and site.held_bytes]
    assert [site.decision for site in sites] == ["expack"] * 3


@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_models_own_inside_of_a_region(reentrant):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.part = nn.LayerNorm(WIDTH), Block()

        def forward(self, x):
            return x + checkpoint(self.part, self.norm(x), use_reentrant=reentrant).sin()

    compare(Stack(Own), policy("*", "raw"))


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("decision", ["keep", "raw @ disk"])
def test_two_backwards(decision, region):
    one = model()
    x = one.batch()[0].requires_grad_()

    def run(text):
        torch.manual_seed(1)
        if text is None:
            loss = one(x).square().sum()
        else:
            with make(one, text):
                loss = one(x).square().sum()
        first = torch.autograd.grad(loss, [x, *one.parameters()], retain_graph=True)
        return [*first, *torch.autograd.grad(loss, [x, *one.parameters()])]

    with gc_off():
        check_same(run(policy("*", decision, region)), run(None))
