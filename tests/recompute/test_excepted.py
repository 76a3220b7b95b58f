"""Parts of recomputed regions that another rule decides: they run once, and gradients are those of plain training."""

import copy
import gc
import os
from collections import Counter
from itertools import count
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from actstore import ActivationStore, Disk, SampleErrors, Verify
from actstore.errors import MutationError, PolicyError, StateError
from tests.autograd.checks import check_drained, check_same, gc_off, train_step

WIDTH = 16
EXACT = ["keep", "raw", "raw @ host", "raw @ disk", "derive", "derive(raw @ disk)", "expack"]
LOSSY = ["int8", "int8 @ disk"]
REGIONS = ["recompute", "recompute(raw @ disk)", "recompute(segment=2)", "recompute(schedule=revolve, slots=1)"]


class Counting(nn.Module):
    """A part that counts its calls."""

    calls: ClassVar[Counter] = Counter()

    def count(self):
        Counting.calls[type(self).__name__] += 1


class Attention(Counting):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        self.count()
        heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.drop(self.proj(seen.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.part, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, WIDTH))

    def forward(self, x):
        x = x + self.part(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.part = Branch()

    def forward(self, x):
        return F.relu(x + self.part(F.relu(self.bn1(self.conv1(x)), inplace=True)), inplace=True)


class Branch(Counting):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        self.count()
        return self.bn(self.conv(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.part, self.head = nn.LayerNorm(WIDTH), Lstm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y, (h, c) = self.part(self.norm(x))
        return x + torch.tanh(self.head(y) * h[-1][:, None] + c[-1][:, None])


class Lstm(Counting):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        self.count()
        return self.lstm(x)


class Expert(Counting):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        self.count()
        return self.net(x)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.part = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x):
        h = self.norm(x).flatten(0, -2)
        weights, chosen = self.gate(h).softmax(-1).topk(2)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.part):
            token, slot = torch.where(chosen == e)
            out = out.index_add(0, token, expert(h[token]) * weights[token, slot, None])
        return x + out.view_as(x)


class Stack(nn.Module):
    def __init__(self, make, blocks=3, shape=(4, 6, WIDTH)):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(shape[-1], shape[-1])
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.shape = shape

    def batch(self):
        return (torch.randn(self.shape, generator=torch.Generator().manual_seed(3)),)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {
    "gpt": lambda: Stack(Block),
    "resnet": lambda: Stack(Residual, shape=(2, 4, 8, 8)),
    "lstm": lambda: Stack(Recurrent),
    "experts": lambda: Stack(Mixture),
}


def policy(decision, region="recompute"):
    return f"blocks.*.part : {decision}; blocks.* : {region}"


def make(model, text, **options):
    return ActivationStore(model, text, min_bytes=0, **options)


def step(model, store=None, **options):
    """Loss, gradients, buffers, the state of the generator, and calls of the parts."""
    Counting.calls.clear()
    found = train_step(model, model.batch(), store, **options)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return [found.loss, *found.grads.values(), *buffers.values(), torch.get_rng_state()], dict(Counting.calls)


def compare(model, text, **options):
    """Train a step with a policy and without: bits and calls are equal, and nothing is left."""
    wanted, calls = step(copy.deepcopy(model), **options)
    store = make(model, text)
    with gc_off():
        found, again = step(model, store, **options)
        check_same(found, wanted)
        assert again == calls
        check_drained(store)
    return store


# -- equality ---------------------------------------------------------------------------------------------------------


def check_three_backwards(model, x, store, *, exact):
    """Three backwards of one graph of `model["blocks"]` find the same, plain autograd's where the policy is exact."""
    leaves = [x, *model.parameters()]
    with gc_off():
        with store:
            loss = model["blocks"](x).square().sum()
        found = [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(3)]
        check_same(found[1], found[0])
        check_same(found[2], found[0])
        if exact:
            check_same(found[0], torch.autograd.grad(model["blocks"](x).square().sum(), leaves))
        del loss
        check_drained(store)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("decision", EXACT)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_buffers_generators_and_calls_are_those_of_plain_training(name, decision, region):
    store = compare(MODELS[name](), policy(decision, region))
    sites = {site.site: site for site in store.report().sites}
    assert any(".part" in site for site in sites)
    assert not any(".mlp" in site or ".norm" in site for site in sites)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_and_backward_inside_of_the_context(name, inside):
    compare(MODELS[name](), policy("raw"), autocast=True, inside=inside)


@pytest.mark.parametrize("decision", LOSSY)
@pytest.mark.parametrize("name", MODELS)
def test_a_lossy_part_loses_what_it_saves_and_nothing_else(name, decision):
    model = MODELS[name]()
    wanted, calls = step(copy.deepcopy(model))
    store = make(model, policy(decision))
    found, again = step(model, store)
    assert again == calls
    check_same(found[0], wanted[0])
    check_same(found[-1], wanted[-1])
    gap = sum((a - b).double().square().sum() for a, b in zip(found[1:-1], wanted[1:-1], strict=True))
    assert 0 < gap < 1e-2 * sum(b.double().square().sum() for b in wanted[1:-1])
    outputs = [site for site in store.report().sites if "its output" in site.note]
    assert outputs
    assert not any("int8" in site.decision for site in outputs)


@pytest.mark.parametrize("decision", ["keep", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_lossy_inputs_of_the_region(name, decision):
    """Decisions inside of the part are not recorded, and the part stores its input itself."""
    model = MODELS[name]()
    wanted, calls = step(copy.deepcopy(model))
    store = make(model, policy(decision, "recompute(int8)"))
    found, again = step(model, store)
    assert again == calls
    check_same(found[-1], wanted[-1])
    gap = sum((a - b).double().square().sum() for a, b in zip(found[1:-1], wanted[1:-1], strict=True))
    assert gap < 1e-2 * sum(b.double().square().sum() for b in wanted[1:-1])


class Gated(nn.Module):
    """All that backward needs of the part is exact, although its region comes back with an error."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.part = nn.Sequential(nn.LeakyReLU(0.1), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return F.relu(self.part(x * self.scale) - 0.1).sum()


def test_a_kept_part_is_exact_in_a_lossy_region_and_decisions_after_it_are_those_of_the_first_run():
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList([Gated()])})
    x = torch.randn(64, WIDTH, requires_grad=True)
    block = model["blocks"][0]
    block(x).backward()
    wanted = [p.grad.clone() for p in block.part.parameters()]
    model.zero_grad()
    store = make(model, policy("keep", "recompute(int4)"))
    with store:
        loss = block(x * 1)
    notes = [site.note for site in store.report().sites if "decisions of" in site.note]
    assert [note.count("relu") for note in notes] == [1]
    assert "leaky" not in notes[0]
    loss.backward()
    check_same([p.grad for p in block.part.parameters()], wanted)


# -- bytes ------------------------------------------------------------------------------------------------------------


def held(model, text):
    store = make(model, text)
    with store:
        loss = model(*model.batch()).sum()
    report = store.report()
    assert report.held_bytes == sum(site.held_bytes for site in report.sites)
    del loss
    return report


def test_the_input_of_a_part_is_not_stored_and_its_output_once():
    model = MODELS["gpt"]()
    plain, part, least = held(model, "keep"), held(model, policy("keep")), held(model, "recompute")
    saved = sum(site.saved_bytes for site in plain.sites if ".part" in site.site)
    hidden = 4 * 6 * WIDTH * 4
    own = 3 * (saved - hidden) // 3  # of three blocks, of each without the input of qkv
    assert own == saved - hidden
    assert part.held_bytes == least.held_bytes + saved - 3 * hidden + 3 * hidden
    assert part.saved_bytes == plain.saved_bytes


class Last(nn.Module):
    """Nothing is saved after the part."""

    def __init__(self):
        super().__init__()
        self.norm, self.part = nn.LayerNorm(WIDTH), Expert()

    def forward(self, x):
        return x + self.part(self.norm(x))


def test_operators_that_store_the_output_are_none_of_the_region():
    """A checksum of the payload is such operators: rules for operators of the region do not see them."""
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()))
    policy = "*/@aten.* : keep; 0.0 : raw @ disk; 0 : recompute"
    store = ActivationStore(model, policy, min_bytes=0, observe=[Verify()])
    x = torch.randn(4, WIDTH)
    wanted = train_step(model, (x,))
    check_same(train_step(model, (x,), store).loss, wanted.loss)


@pytest.mark.parametrize("early", [True, False])
def test_an_output_that_no_recomputation_reads_is_not_held(early):
    model = Stack(Last)
    report = held(model, policy("keep"))
    outputs = [site for site in report.sites if "its output" in site.note]
    assert [site.held_bytes for site in outputs] == [0] * 3
    with set_checkpoint_early_stop(early):
        compare(model, policy("keep"))


def test_the_decision_of_the_part_says_where_its_output_waits():
    model = MODELS["gpt"]()
    sites = held(model, policy("int8 @ disk")).sites
    outputs = [site for site in sites if "its output" in site.note]
    assert len(outputs) == 3
    assert all(site.stored_bytes == 4 * 6 * WIDTH * 4 and site.site.endswith("]") for site in outputs)
    assert any("int8 @ disk" in site.decision and ".part.proj" in site.site for site in sites)


def test_nothing_is_left_after_close(tmp_path):
    model = MODELS["gpt"]()
    store = make(model, policy("raw @ disk"), tiers=[Disk(tmp_path)])
    step(model, store)
    store.close()
    assert not any(files for _, _, files in os.walk(tmp_path))
    assert all("forward" not in vars(module) for module in model.modules())


# -- arguments and outputs --------------------------------------------------------------------------------------------


class Part(Counting):
    def __init__(self, function):
        super().__init__()
        self.lin, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, *args, **kwargs):
        self.count()
        return self.function(self.lin, *args, **kwargs)


class Around(nn.Module):
    def __init__(self, function, around):
        super().__init__()
        self.part, self.first, self.around = Part(function), nn.Linear(WIDTH, WIDTH), around

    def forward(self, x):
        return self.around(self.part, self.first(x))


def _nested(lin, x, *, rest, mask=None):
    y = lin(x) * rest["a"][0].sigmoid()
    return {"y": y, "rest": [None, (y.tanh(), 3)], "mask": mask}


def _use_nested(part, h):
    out = part(h, rest={"a": [h.exp(), "word"]}, mask=None)
    assert out["mask"] is None
    return out["y"].sin() * out["rest"][1][0].cos() * out["rest"][1][1]


def _chunks(lin, x):
    return lin(x).tanh().chunk(2, -1)


def _base_and_view(lin, x):
    y = lin(x) + 1
    return y, y[..., :4]


def _use_base_and_view(part, h):
    base, view = part(h)
    view.mul_(2)  # the base sees it
    return base.sin() * 2


def _inplace(part, h):
    y = part(h)
    y.mul_(h.sigmoid())
    y += 1
    return F.relu(y, inplace=True).exp()


def _expanded(lin, x):
    return lin(x).mean(1, keepdim=True).expand(-1, 5, -1)


def _both(function):
    """Use the two parts of an output."""
    return lambda part, h: function(*part(h), h)


CASES = {
    "nested": (_nested, _use_nested),
    "in place on the output": (lambda lin, x: lin(x), _inplace),
    "in place on a view of it": (lambda lin, x: lin(x).transpose(0, 1), lambda part, h: part(h)[1:].mul_(2).sin()),
    "chunks": (_chunks, _both(lambda a, b, h: a.sin() * b)),
    "base and view": (_base_and_view, _use_base_and_view),
    "twice the same": (lambda lin, x: (y := lin(x), y), _both(lambda a, b, h: a.sin() * b.cos() * (a is b))),
    "its input": (lambda lin, x: (x, lin(x)), _both(lambda a, b, h: a.sin() * b.cos() * (a is h))),
    "a view of its input": (lambda lin, x: (x[:2], lin(x)), _both(lambda a, b, h: a.sin() * b[:2].cos())),
    "detached": (lambda lin, x: (lin(x), lin(x).detach()), _both(lambda a, b, h: a.sin() * b.cos())),
    "one memory, detached": (lambda lin, x: (y := lin(x), y.detach()), _both(lambda a, b, h: a.sin() * b.cos())),
    "a weight": (lambda lin, x: (lin(x), lin.weight), _both(lambda a, w, h: F.linear(a.sin(), w).sin())),
    "integers": (lambda lin, x: (lin(x), lin(x).argmax(-1)),
                 _both(lambda a, i, h: a.sin().gather(-1, i[..., None]).sin())),
    "expanded": (_expanded, lambda part, h: part(h).sin()),
    "one column": (lambda lin, x: lin(x)[..., 0], lambda part, h: part(h).sin().exp()),
    "saved and returned": (lambda lin, x: lin(x).tanh(), lambda part, h: part(h).sin()),
    "empty": (lambda lin, x: lin(x[:0]), lambda part, h: part(h).sin().sum() + h.sin()),
    "repeated": (lambda lin, x: lin(x).tanh(), lambda part, h: part(part(h).sin()).sin()),
    "no gradients": (lambda lin, x: lin(x), lambda part, h: _without(part, h).sin() * h.sin()),
    "views as arguments": (lambda lin, a, b: lin(a).sin() * b.sin(),
                           lambda part, h: part(h.transpose(0, 1), h[:, 0]).sin()),
    "arguments twice": (lambda lin, a, b, c: lin(a) * (a is b) * c, lambda part, h: part(h, h, c=h).sin()),
    "complex": (lambda lin, x: torch.fft.fft(lin(x)), lambda part, h: part(h).conj().abs().sin()),
    "conjugate": (lambda lin, x: torch.fft.fft(lin(x)).conj(), lambda part, h: part(h).abs().sin()),
}  # fmt: skip


def _without(part, h):
    with torch.no_grad():
        return part(h)


@pytest.mark.parametrize("region", REGIONS[:3])
@pytest.mark.parametrize("decision", ["keep", "raw", "raw @ disk", "derive"])
@pytest.mark.parametrize("case", CASES)
def test_arguments_and_outputs(case, decision, region):
    model = Stack(lambda: Around(*CASES[case]), blocks=1)
    compare(model, policy(decision, region))


def test_a_region_that_writes_to_the_output_reads_a_copy():
    """Two backwards: the first must not write to what the second reads."""
    model = Stack(lambda: Around(*CASES["in place on the output"]), blocks=2)
    wanted = torch.autograd.grad(model(*model.batch()).sum(), list(model.parameters()))
    for decision in EXACT:
        with make(model, policy(decision)):
            loss = model(*model.batch()).sum()
        for retain in (True, False):
            check_same(torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain), wanted)


def _unsafe_chunks(part, h):
    y = part(h)
    first, second = y.unsafe_chunk(2, -1)
    return torch.cat([first.sigmoid_() * second.mul_(2), second], -1) + y.mean()


def _data(part, h):
    y = part(h)
    y.data.mul_(1.5)
    return y.sin()


def _array(part, h):
    y = part(h)
    y.detach().numpy()[..., 1:] *= 2
    return y.sin()


class Nested(nn.Module):
    """A part whose output comes from a module inside of it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.inner(x)


class Silent(nn.Module):
    def __init__(self, part, write):
        super().__init__()
        self.part, self.write = part, write

    def forward(self, x):
        return self.write(self.part, x)


@pytest.mark.parametrize("decision", [*EXACT, "int8", "int8 @ disk"])
@pytest.mark.parametrize("write", [_unsafe_chunks, _data, _array])
@pytest.mark.parametrize("part", [lambda: nn.Linear(WIDTH, WIDTH), Nested], ids=["linear", "nested"])
def test_writes_to_the_output_that_no_version_tells(part, write, decision):
    """Each backward finds the output as the part had returned it."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.Sequential(Silent(part(), write), nn.Tanh(), Silent(part(), write))})
    x = torch.randn(4, WIDTH, requires_grad=True)
    check_three_backwards(model, x, make(model, policy(decision)), exact=decision in EXACT)


def test_what_autograd_has_saved_must_not_change_as_in_plain_training():
    model = Stack(lambda: Around(lambda lin, x: lin(x).tanh(), lambda part, h: part(h).mul_(2).sin()), blocks=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(*model.batch()).sum().backward()
    with make(model, policy("keep")):
        loss = model(*model.batch()).sum()
    with pytest.raises(MutationError, match=r"blocks\.0\.part"):
        loss.backward()
    del loss


# -- what is refused --------------------------------------------------------------------------------------------------


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            (lambda lin, x: lin(x.mul_(2)), lambda part, h: part(h + 1).sin()),
            ["write to its arguments", "inplace=False"],
        ),
        ((lambda lin, x: Opaque(lin(x)), lambda part, h: part(h).tensor.sin()), ["Opaque", "register_pytree_node"]),
    ],
    ids=["writes to its argument", "opaque output"],
)
def test_what_a_part_must_not_do(case, words):
    model = Stack(lambda: Around(*case), blocks=1)
    store = make(model, policy("keep"))
    with pytest.raises(StateError) as caught, store:
        model(*model.batch())
    for word in ["part=blocks.0.part", *words]:
        assert word in str(caught.value)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "use", [lambda y, aux: y.sin() + aux, lambda y, aux: aux * y, lambda y, aux: y.sin() * aux.mean()]
)
def test_a_region_that_reads_an_attribute_that_its_part_has_set(use):
    """The next call has put another tensor there."""

    def keep(lin, x):
        lin.aux = lin(x)
        return lin.aux.sin()

    model = Stack(lambda: Around(keep, lambda part, h: use(part(h), part.lin.aux).sin()), blocks=1)
    with make(model, policy("keep")):
        loss = model(*model.batch()).sum()
        aux = model.blocks[0].part.lin.aux
    with pytest.raises(StateError, match=r"attribute=Linear\.aux: .* Return the tensor from the part"):
        loss.backward()
    assert model.blocks[0].part.lin.aux is aux
    del loss, aux, model.blocks[0].part.lin.aux


def leaves_plain(lin, x):
    lin.count = getattr(lin, "count", 0) + 1
    return lin(x).sin()


def test_a_region_reads_the_plain_value_that_its_part_has_set():
    model = Stack(lambda: Around(leaves_plain, lambda part, h: (part(h) * part.lin.count).sin()))
    plain = copy.deepcopy(model)
    with make(model, policy("keep")):
        loss = model(*model.batch()).sum() + model(*model.batch()).exp().sum()
    wanted = plain(*model.batch()).sum() + plain(*model.batch()).exp().sum()
    leaves = [list(each.parameters()) for each in (model, plain)]
    check_same(torch.autograd.grad(loss, leaves[0]), torch.autograd.grad(wanted, leaves[1]))
    assert [block.part.lin.count for block in model.blocks] == [2] * len(model.blocks)


def appends(lin, x):
    lin.rows.append(float(x.detach().mean()))
    return lin(x).sin()


def replaces_a_list(lin, x):
    lin.rows = [*lin.rows, float(x.detach().mean())]
    return lin(x).sin()


@pytest.mark.parametrize("keep", [appends, replaces_a_list])
@pytest.mark.parametrize(
    "use",
    [
        lambda rows: rows[0],
        sum,
        len,
        lambda rows: 1.0 if rows else 2.0,
        lambda rows: rows.index(min(rows)),
    ],
)
def test_a_region_that_reads_an_object_that_its_part_has_changed(keep, use):
    def around(part, h):
        y = part(h)
        return (y * use(part.lin.rows)).sin()

    model = Stack(lambda: Around(keep, around), blocks=1)
    lin = model.blocks[0].part.lin
    lin.rows = []
    with make(model, policy("keep")):
        loss = model(*model.batch()).sum()
    rows = list(lin.rows)
    with pytest.raises(StateError, match=r"attribute=Linear\.rows: .* leave its rule out"):
        loss.backward()
    assert lin.rows == rows
    assert len(rows) == 1


def test_a_part_that_changes_a_list_that_it_is_given_is_an_error():
    class Collects(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, rows):
            rows.append(1.0)
            return self.lin(x)

    class Collecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Collects()

        def forward(self, x):
            rows = []
            return self.part(x, rows).sin() * len(rows)

    model = Stack(Collecting, blocks=1)
    with (
        pytest.raises(StateError, match=r"part=blocks\.0\.part: .* must not write to its arguments"),
        make(model, policy("keep")),
    ):
        model(*model.batch())


def test_an_attribute_that_nothing_reads_stays():
    def keep(lin, x):
        lin.aux = lin(x).detach()
        return lin(x).sin()

    model = Stack(lambda: Around(keep, lambda part, h: part(h).sin()))
    compare(model, policy("keep"))


def test_a_recompute_directly_inside_is_refused():
    model = MODELS["gpt"]()
    with pytest.raises(PolicyError, match=r"the region runs again as a whole. Leave that rule out"):
        make(model, "blocks.*.mlp : recompute(raw); blocks.* : recompute")


def test_a_region_that_calls_other_parts_in_its_second_run():
    model = Stack(lambda: Around(lambda lin, x: lin(x), lambda part, h: part(h).sin()), blocks=1)
    block = model.blocks[0]
    block.other = Part(lambda lin, x: lin(x))
    chosen = ["part", "other"]
    block.around = lambda _, h: getattr(block, chosen.pop(0))(h).sin()
    with make(model, "blocks.*.part : keep; blocks.*.other : keep; blocks.* : recompute"):
        loss = model(*model.batch()).sum()
    chosen[:] = ["other"]
    with pytest.raises((StateError, RuntimeError), match="goes another way than its first"):
        loss.backward()


# -- modules ----------------------------------------------------------------------------------------------------------


def test_regions_inside_of_a_part():
    model = MODELS["gpt"]()
    text = "blocks.*.part.proj : recompute(raw); blocks.*.part : keep; blocks.* : recompute"
    store = compare(model, text)
    assert any(site.site.startswith("blocks.0.part.proj") for site in store.report().sites)


def test_parts_of_regions_inside_of_a_part():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.part = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())

        def forward(self, x):
            return x + self.part(self.norm(x)).sin()

    model = Stack(Outer)
    text = "*.part.1.part : raw; blocks.*.part.1 : recompute; blocks.*.part : keep; blocks.* : recompute(raw)"
    compare(model, text)


def test_a_part_that_two_blocks_share():
    model = MODELS["gpt"]()
    for block in model.blocks[1:]:
        block.part = model.blocks[0].part
    compare(model, "blocks.0.part : raw; blocks.* : recompute")


def test_a_part_outside_of_its_region_runs_as_ever():
    model = MODELS["gpt"]()
    model.register_forward_pre_hook(lambda module, args: (module.blocks[0].part(args[0]),))
    compare(model, policy("raw"))


def test_hooks_of_a_part():
    model = MODELS["gpt"]()
    seen = []
    for block in model.blocks:
        block.part.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        block.part.register_forward_hook(lambda module, args, output: output.sin() + args[0])
        block.part.register_full_backward_hook(lambda module, grads, _: seen.append(grads[0].sum().item()))
    compare(model, policy("keep"))
    assert seen[:3] == seen[3:]
    assert len(seen) == 6


def test_buffers_that_a_part_changes():
    class Tallied(Counting):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(WIDTH)
            self.register_buffer("tally", torch.ones(()))
            self.register_buffer("replaced", torch.ones(WIDTH))

        def forward(self, x):
            self.count()
            self.tally += 1
            self.replaced = x.detach().mean(0)
            return self.bn(x)

    class Reading(nn.Module):
        """The region reads what the part has written."""

        def __init__(self):
            super().__init__()
            self.part = Tallied()

        def forward(self, x):
            y = self.part(x.sin())
            return (y * self.part.tally * self.part.replaced).sin() * self.part.bn.running_mean

    model = Stack(Reading, shape=(8, WIDTH))
    compare(model, policy("keep"))
    for _ in range(2):
        compare(model, policy("raw", "recompute(segment=2)"))


def test_a_changed_buffer_that_the_region_reads_is_an_error():
    class Tallied(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("tally", torch.ones(()))

        def forward(self, x):
            self.tally += 1
            return x.sin()

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Tallied()

        def forward(self, x):
            return self.part(x.sin()) * self.part.tally

    model = Stack(Reading, blocks=1)
    with make(model, policy("keep")):
        first, _ = model(*model.batch()), model(*model.batch())
    with pytest.raises(MutationError, match="tally"):
        first.sum().backward()
    del first


def test_generators_of_a_part():
    class Noisy(Counting):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(7)

        def forward(self, x):
            self.count()
            return x * torch.rand(x.shape, generator=self.generator) * torch.rand(x.shape)

    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Noisy()

        def forward(self, x):
            x = F.dropout(x.sin())
            x = self.part(x).sin()
            return x * torch.rand(x.shape, generator=self.part.generator) * F.dropout(x.sin())

    model = Stack(Drawing)
    states = []
    for text in (None, *(policy("raw", region) for region in REGIONS)):
        one = Stack(Drawing)
        found, _ = step(one, make(one, text) if text else None)
        states.append([*found, *(block.part.generator.get_state() for block in one.blocks)])
    for state in states[1:]:
        check_same(state, states[0])
    assert model is not None


# -- errors, graphs and threads of control ----------------------------------------------------------------------------


@pytest.mark.parametrize("decision", ["keep", "raw @ disk"])
@pytest.mark.parametrize("where", ["part", "after"])
def test_an_exception_in_forward_leaves_nothing(where, decision):
    def fail(module, x, *_):
        raise KeyError(where)

    model = MODELS["gpt"]()
    store = make(model, policy(decision))
    target = model.blocks[1].part.proj if where == "part" else model.blocks[1].mlp
    handle = target.register_forward_pre_hook(fail)
    with pytest.raises(KeyError), store:
        model(*model.batch())
    handle.remove()
    assert all("forward" not in vars(module) for module in model.modules())
    gc.collect()
    check_drained(store)
    check_same(step(model, store)[0], step(model)[0])


def test_an_exception_in_the_recomputation_leaves_nothing():
    model = MODELS["gpt"]()
    store = make(model, policy("raw"))
    runs = count(-1)
    model.blocks[1].mlp.register_forward_pre_hook(lambda *_: 1 / next(runs) and None)
    with store:
        loss = model(*model.batch()).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    assert all("forward" not in vars(module) for module in model.modules())
    del loss
    gc.collect()
    check_drained(store)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("decision", ["keep", "raw @ disk", "derive"])
def test_a_graph_without_backward_is_freed_at_once(decision, region):
    model = MODELS["gpt"]()
    store = make(model, policy(decision, region))
    with gc_off():
        with store:
            loss = model(*model.batch()).sum()
        del loss
        check_drained(store)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("decision", EXACT)
def test_two_backwards_and_second_derivatives(decision, region):
    model = MODELS["gpt"]()
    x = model.batch()[0].requires_grad_()

    def run(text):
        torch.manual_seed(1)
        if text is None:
            loss = model(x).square().sum()
        else:
            with make(model, text):
                loss = model(x).square().sum()
        parameters = list(model.blocks[0].mlp.parameters())
        first = torch.autograd.grad(loss, [x, *parameters], retain_graph=True)
        second = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
        return [*first, *second]

    check_same(run(policy(decision, region)), run(None))


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

    check_same(run(make(model, policy("raw"))), run(None))


def test_a_store_inside_of_a_store():
    """The rule of the outer store says nothing about regions of the inner one."""
    model = MODELS["gpt"]()
    wanted, calls = step(copy.deepcopy(model))
    outer, inner = make(model, policy("raw")), make(model, "recompute")
    with pytest.raises(StateError, match="has seen no tensor"), outer:
        found, again = step(model, inner)
    check_same(found, wanted)
    assert again["Attention"] == 2 * calls["Attention"]
    with pytest.raises(StateError, match="has seen no tensor"), make(model, "recompute"):
        found, again = step(model, outer)
    check_same(found, wanted)
    assert again == calls


@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_models_own_around_a_part(reentrant):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.part = nn.LayerNorm(WIDTH), Attention()

        def forward(self, x):
            return x + checkpoint(self.part, self.norm(x), use_reentrant=reentrant).sin()

    model = Stack(Own)
    wanted, _ = step(copy.deepcopy(model))
    check_same(step(model, make(model, policy("raw")))[0], wanted)


@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
def test_checkpoints_of_the_models_own_inside_of_a_part():
    class Own(Counting):
        def __init__(self):
            super().__init__()
            self.inner = Attention()

        def forward(self, x):
            return checkpoint(self.inner, x.sin(), use_reentrant=False)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Own()

        def forward(self, x):
            return x + self.part(x.exp()).sin()

    compare(Stack(Outer), policy("raw"))


def test_two_steps_and_the_model_as_it_was():
    model = MODELS["gpt"]()
    store = make(model, policy("int8"))
    twin = copy.deepcopy(model)
    for _ in range(2):
        step(model, store)
    check_same(step(model)[0], step(twin)[0])


def test_sampled_errors():
    model = MODELS["gpt"]()
    store = make(model, policy("int8"), observe=[SampleErrors(every=1)])
    for _ in range(3):
        step(model, store)
    assert any(site.error for site in store.report().sites if ".part" in site.site)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_part_that_returns_a_jagged_tensor():
    def gradients(policy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
        parts = [torch.randn(3, WIDTH), torch.randn(2, WIDTH)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged)
        with ActivationStore(model, policy, min_bytes=0):
            loss = model(x).values().square().sum()
        loss.backward()
        return [weight.grad for weight in model.parameters()]

    check_same(gradients("0.0 : keep; 0 : recompute"), gradients("keep"))
