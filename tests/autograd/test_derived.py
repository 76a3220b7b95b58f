"""Tensors that backward makes again of others: bit for bit what they were, where that is certain, and nowhere else."""

import gc
import weakref
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore, SampleErrors
from actstore.autograd import derived, modules
from actstore.autograd.derived import MAX_CHAINED_OPERATORS, RULES, Norm
from actstore.errors import MutationError, StateError
from tests.autograd.checks import check_drained, check_same, gc_off

WIDTH = 16


class Reader(nn.Module):
    """Saves what it is given and passes it on with other values: what a linear layer does, for any shape."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape))

    def forward(self, x):
        return x * self.weight


class Model(nn.Module):
    """An operator between a tensor that requires a gradient and a reader of its output."""

    def __init__(self, operator, shape=(4, WIDTH, 6)):
        super().__init__()
        self.first = Reader(shape)
        self.operator = deepcopy(operator)
        with torch.no_grad():
            self.second = Reader(operator(torch.rand(shape)).shape)

    def forward(self, x):
        return self.second(self.operator(self.first(x))).sin().sum()


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Gated(nn.Module):
    """A product of two tensors that both require gradients."""

    def forward(self, x):
        a, b = x.chunk(2, 1)
        return a * b


OPERATORS = {
    "gelu": nn.GELU(),
    "gelu, tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "mish": nn.Mish(),
    "hardswish": nn.Hardswish(),
    "hardtanh": nn.Hardtanh(-0.3, 0.4),
    "relu6": nn.ReLU6(),
    "leaky relu": nn.LeakyReLU(0.07),
    "elu": nn.ELU(0.7),
    "selu": nn.SELU(),
    "softplus": nn.Softplus(2.0, 5.0),
    "glu": nn.GLU(1),
    "glu of the last": nn.GLU(),
    "pow": Called(lambda x: x.pow(3)),
    "mul": Gated(),
    "layer norm": nn.LayerNorm(6, eps=1e-3),
    "layer norm of two": nn.LayerNorm((WIDTH, 6)),
    "layer norm without bias": nn.LayerNorm(6, bias=False),
    "layer norm without weight": nn.LayerNorm(6, elementwise_affine=False),
    "rms norm": nn.RMSNorm(6),
    "group norm": nn.GroupNorm(4, WIDTH, eps=1e-2),
    "group norm without weight": nn.GroupNorm(4, WIDTH, affine=False),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(name, dtype=torch.float32):
    model = Model(OPERATORS[name]).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def gradients(model, *batch, store=None, **options):
    if store is None:
        loss = model(*batch)
    else:
        with store:
            loss = model(*batch)
    return torch.autograd.grad(loss, list(model.parameters()), **options)


def derived_sites(store):
    """Bytes that were saved and not held, by site; what is kept has as many of both."""
    return {site.site: site.saved_bytes for site in store.report().sites if site.saved_bytes > site.held_bytes}


def check_derived(model, *batch, policy="derive", most=10**9, least=1):
    """The gradients are those of plain autograd, and the reader's tensor is made again. Returns the sites."""
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        found = gradients(model, *batch, store=store)
        sites = derived_sites(store)
        check_drained(store)
    check_same(found, gradients(model, *batch))
    assert least <= len(sites) <= most, sites
    return sites


def check_kept(model, *batch, policy="derive", reader="second[0]", **options):
    """The gradients are those of plain autograd, and what `reader` saves first is not made again."""
    store = ActivationStore(model, policy, min_bytes=0, **options)
    found = gradients(model, *batch, store=store)
    assert reader in {str(site.site) for site in store.report().sites}
    assert reader not in {str(site) for site in derived_sites(store)}
    check_drained(store)
    check_same(found, gradients(model, *batch))


# -- what is made again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_rule(name, dtype):
    model = build(name, dtype)
    sites = check_derived(model, torch.randn(4, WIDTH, 6, dtype=dtype))
    if name != "rms norm" or dtype.itemsize > 2:  # whose output is a cast on a CPU
        assert "second[0]" in {str(site) for site in sites}


def test_every_rule_is_tested():
    """But that of a node which on a CPU is a chain of products."""
    seen = set()
    for name in OPERATORS:
        model = build(name)
        model.operator.register_forward_hook(lambda module, args, out: seen.add(out.grad_fn.name()))
        model(torch.randn(4, WIDTH, 6))
    assert seen == set(RULES) - {"FusedRmsNormBackward0"}


@pytest.mark.parametrize("name", ["gelu", "mul", "group norm", "silu"])
def test_strides(name):
    model = build(name)
    for batch in (
        torch.randn(6, WIDTH, 4).transpose(0, 2),
        torch.randn(4, 6, WIDTH).transpose(1, 2),
        torch.randn(4, WIDTH, 12)[..., ::2],
        torch.randn(1, WIDTH, 1).expand(4, WIDTH, 6),
    ):
        check_derived(model, batch)


def test_channels_last():
    layers = [nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 3), Called(torch.Tensor.sum)]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    image = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    assert len(check_derived(model, image)) == 2  # what SiLU reads, and what the convolution does


@pytest.mark.parametrize("view", ["flatten", "transpose", "slice", "chunk", "select"])
def test_views_of_what_is_made_again(view):
    cut = {
        "flatten": lambda y: y.flatten(1),
        "transpose": lambda y: y.transpose(0, 2),
        "slice": lambda y: y[:, 2:9:2],
        "chunk": lambda y: y.chunk(2, 1)[1],
        "select": lambda y: y[:, 3],
    }[view]
    check_derived(Model(nn.Sequential(nn.GELU(), Called(cut))), torch.randn(4, WIDTH, 6))


@pytest.mark.parametrize("rest", ["keep", "raw", "raw @ host", "raw @ disk", "raw @ host > disk", "expack"])
def test_what_it_is_made_of_waits_anywhere(rest):
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model.append(Called(torch.Tensor.sum))
    check_derived(model, torch.randn(5, 8), policy=f"derive({rest})" if rest != "keep" else "derive")


def test_a_chain_of_a_few_operators_is_made_again_from_its_begin():
    model = nn.Sequential(Reader((5,)), *[nn.GELU() for _ in range(20)], Called(torch.Tensor.sum))
    sites = check_derived(model, torch.randn(5))
    # each fifth output is kept, and the reader's input: the deepest is made by as many operators as are allowed
    assert len(sites) == 20 - 1 - 19 // (MAX_CHAINED_OPERATORS + 1)


def test_readers_of_one_tensor():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layers = nn.LayerNorm(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            y = self.norm(x * 1.5)
            return sum(layer(y).sin().sum() for layer in self.layers)

    x = torch.randn(4, 8, requires_grad=True)
    check_derived(Shared(), x)


def test_products_of_different_types_and_shapes():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(()))
            self.row = nn.Parameter(torch.rand(6))
            self.last = Reader((4, 6))

        def forward(self, x):
            x = x * self.scale.to(torch.bfloat16).float()  # no dimension: does not promote
            x = x * self.row.to(torch.bfloat16)
            return self.last(x).sum()

    check_derived(Products(), torch.randn(4, 6, requires_grad=True), least=1)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside):
    """What the operator ran on is what its node has saved; the cast is not done again, nor one more."""
    model = nn.Sequential(
        nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), Called(torch.Tensor.sum)
    )
    x = torch.randn(5, 8)
    results = []
    for store in (None, ActivationStore(model, "derive", min_bytes=0)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if store is None:
                loss = model(x)
            else:
                with store:
                    loss = model(x)
                assert derived_sites(store)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    check_same(*results)


def test_double_backward_and_a_graph_that_is_read_twice():
    model = build("silu")
    batch = torch.randn(4, WIDTH, 6)
    found = []
    for store in (None, ActivationStore(model, "derive", min_bytes=0)):
        grads = gradients(model, batch, store=store, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in grads), list(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in grads), list(model.parameters()))
        found.append([*grads, *twice, *again])
    check_same(*found)


def test_every_step_that_looks_at_payloads_derives_too():
    model = build("gelu")
    store = ActivationStore(model, "first : int8; * : derive(raw)", min_bytes=0, observe=[SampleErrors(every=1)])
    for _ in range(3):
        with store:
            loss = model(torch.randn(4, WIDTH, 6))
        assert "second[0]" in {str(site) for site in derived_sites(store)}
        loss.backward()


# -- what is not ------------------------------------------------------------------------------------------------------


NOT_DERIVED = {
    "saves its output": nn.ReLU(),
    "saves it as well": nn.Tanh(),
    "a number": Called(lambda x: x * 2.0),
    "changed without autograd": Called(lambda x: _no_grad_(F.gelu(x), "mul_", 2)),
    "changed through a view": Called(lambda x: _no_grad_(F.gelu(x), "__setitem__", (0, 1), 0.0)),
    "the operator in place": Called(lambda x: F.silu(x * 1.0, inplace=True)),
    "no module that knows eps": Called(lambda x: F.layer_norm(x, (6,))),
    "two at once": Called(lambda x: torch.cat([F.gelu(x), F.gelu(x)])),
    "data swapped": Called(lambda x: F.gelu(x).double().float()),
}


def _no_grad_(tensor, method, *args):
    with torch.no_grad():
        getattr(tensor, method)(*args)
    return tensor


@pytest.mark.parametrize("name", NOT_DERIVED)
def test_what_cannot_be_made_again_is_kept(name):
    check_kept(Model(NOT_DERIVED[name]), torch.randn(4, WIDTH, 6, requires_grad=True))


def test_changes_that_autograd_records():
    """The tensor is then the output of another operator."""

    def doubled(x):
        y = F.gelu(x)
        y[0] = 2 * y[1]
        return y

    check_kept(Model(Called(doubled)), torch.randn(4, WIDTH, 6, requires_grad=True))


def test_an_input_that_comes_back_with_an_error_is_no_source():
    model = build("gelu")
    store = ActivationStore(model, "operator : int8; * : derive", min_bytes=0)
    with store:
        loss = model(torch.randn(4, WIDTH, 6, requires_grad=True))
    assert "second[0]" not in {str(site) for site in derived_sites(store)}
    del loss
    check_drained(store)


def test_what_may_change_is_kept():
    check_kept(build("gelu"), torch.randn(4, WIDTH, 6, requires_grad=True), allow_mutation=True)


@pytest.mark.parametrize(("first", "rest", "again"), [("raw", "raw", 0), ("raw", "keep", 1)])
def test_what_waits_already_is_shared(first, rest, again):
    """A payload serves two readers; nothing is kept beside it that can be made again."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(400, 400), nn.Linear(400, 400)

        def forward(self, x):
            y = F.gelu(x)
            return (self.first(y) * self.last(y)).sum()

    store = ActivationStore(model := Twice(), f"first : {first}; last : derive({rest}); * : keep", min_bytes=0)
    x = torch.randn(64, 400, requires_grad=True)
    with store, pytest.MonkeyPatch.context() as patch:
        made = []
        init = derived.Derived.__init__
        patch.setattr(derived.Derived, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1])
        loss = model(x)
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert len(made) == again
    check_same(found, gradients(model, x))


def test_a_checkpoint_has_its_own_hooks():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
            self.last = nn.Linear(8, 8)

        def forward(self, x):
            return self.last(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)).sum()

    check_kept(Checked(), torch.randn(4, 8, requires_grad=True), reader="last[0]")


@pytest.mark.parametrize(("norm", "name"), [("layer norm", "weight"), ("group norm", "bias")])
def test_weights_that_are_gathered_for_their_module_only(norm, name):
    """DeepSpeed marks them; FSDP takes their memory away."""
    model = build("layer norm")
    model.operator.weight.ds_id = 7
    check_kept(model, torch.randn(4, WIDTH, 6, requires_grad=True))
    model = build(norm)
    with ActivationStore(model, "derive", min_bytes=0):
        loss = model(torch.randn(4, WIDTH, 6))
    getattr(model.operator, name).untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"a weight that operator saved has other memory now, .* Write 'keep'"):
        loss.backward()


# -- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["output", "input", "weight", "group norm's bias"])
def test_changes_before_backward_are_found_as_autograd_finds_them(what):
    model = build("group norm" if what == "group norm's bias" else "layer norm" if what == "weight" else "gelu")
    seen = {}
    model.operator.register_forward_hook(lambda module, args, out: seen.update(input=args[0], output=out))
    if what == "weight":
        seen["weight"] = model.operator.weight
    elif what == "group norm's bias":
        seen[what] = model.operator.bias
    for store in (None, ActivationStore(model, "derive", min_bytes=0)):
        with pytest.MonkeyPatch.context() as patch:
            loss = None
            if store is None:
                if what == "group norm's bias":
                    continue  # plain autograd does not read it: it has the output itself
                loss = model(torch.randn(4, WIDTH, 6))
            else:
                patch.setattr(gc, "collect", lambda: 0)
                with store:
                    loss = model(torch.randn(4, WIDTH, 6))
            with torch.no_grad():
                seen[what].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
                loss.backward()
            assert store is None or isinstance(error.value, MutationError)


def test_another_eps_is_found(monkeypatch):
    model = build("layer norm")
    monkeypatch.setattr(derived, "Norm", lambda eps, *others: Norm(10 * eps, *others))
    with ActivationStore(model, "derive", min_bytes=0):
        loss = model(torch.randn(4, WIDTH, 6))
    with pytest.raises(StateError, match=r"second\[0\].* again: LayerNorm was run with another eps than the 0.01"):
        loss.backward()


def test_a_norm_with_a_forward_of_its_own_is_not_trusted():
    class Own(nn.LayerNorm):
        def forward(self, x):
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 10 * self.eps)

    check_kept(Model(Own(6)), torch.randn(4, WIDTH, 6, requires_grad=True))


# -- where it would go wrong -------------------------------------------------------------------------------------------


def between(first, operator, last):
    return nn.Sequential(first, operator, last, Called(lambda y: y.abs().sum()))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("policy", ["keep", "derive"])
@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_functional_transforms(transform, policy):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    call = torch.func.vmap(model) if transform == "vmap" else lambda x: torch.func.jvp(model, (x,), (x,))
    with ActivationStore(model, policy, min_bytes=0):
        found = call(x)
    check_same(found, call(x))


class Noise(nn.Module):
    def forward(self, bias):
        return bias + torch.randn_like(bias)


class Exp(nn.Module):
    def forward(self, bias):
        return bias.exp()


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8)], ids=["layer", "group"])
@pytest.mark.parametrize("how", [Noise, Exp])
def test_a_parametrized_bias_is_computed_no_more_often(norm, how):
    model = between(nn.Linear(8, 8), deepcopy(norm), nn.Linear(8, 8)).append(nn.Dropout(0.5))
    nn.utils.parametrize.register_parametrization(model[1], "bias", how())
    found = []
    store = ActivationStore(model, "derive", min_bytes=0)
    for context in (None, store):
        torch.manual_seed(3)
        found.append(gradients(model, torch.ones(4, 8), store=context))
    check_same(*found)
    gc.collect()
    check_drained(store)


def test_a_context_without_an_end_does_not_grow():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    with ActivationStore(model, "derive", min_bytes=0):
        x = torch.randn(2, 8)
        for _ in range(3000):
            model(x).sum().backward()
        assert len(modules.current().storages.met) < 2500


@pytest.mark.parametrize(
    "view",
    [torch.conj, lambda y: y.mH, torch.view_as_real, lambda y: y.real, lambda y: y.conj().imag],
    ids=["conj", "mH", "view_as_real", "real", "imag"],
)
def test_views_that_are_more_than_strides(view):
    a, b, c = (torch.randn(8, 8, dtype=torch.complex64, requires_grad=True) for _ in range(3))
    c = c if view(a).is_complex() else torch.rand(view(a).shape, requires_grad=True)
    found = []
    for store in (None, ActivationStore(policy="derive", min_bytes=0)):
        with store or nullcontext():
            loss = (view(a * b) * c).abs().sum()
        found.append(torch.autograd.grad(loss, (a, b, c)))
    check_same(*found)


def test_negative_views():
    a, b, c = (torch.randn(8, 8, requires_grad=True) for _ in range(3))
    found = []
    for store in (None, ActivationStore(policy="derive", min_bytes=0)):
        with store or nullcontext():
            loss = (torch._neg_view(a * b) * c).sum()
        found.append(torch.autograd.grad(loss, (a, b, c)))
    check_same(*found)


def test_a_bias_that_changes_before_the_output_is_saved():
    model = between(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8))
    found = []
    for store in (None, ActivationStore(model, "derive", min_bytes=0)):
        torch.nn.init.ones_(model[1].bias)
        with store or nullcontext():
            y = model[1](model[0](torch.ones(4, 8)))
            with torch.no_grad():
                model[1].bias.add_(1)
            loss = model[2](y).sin().sum()
        found.append(torch.autograd.grad(loss, list(model[2].parameters())))
    check_same(*found)


def test_a_forward_that_an_instance_was_given():
    model = between(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8))
    norm = model[1]
    norm.forward = lambda x: F.group_norm(x, 2, norm.weight, norm.bias + 1, norm.eps)
    check_kept(model, torch.ones(4, 8), reader="2[0]")


def test_weights_that_are_given_new_data():
    model = between(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    with ActivationStore(model, "derive", min_bytes=0):
        loss = model(torch.randn(4, 8))
    model[1].weight.data = 3 * model[1].weight.data
    with pytest.raises(StateError, match="has other memory now"):
        loss.backward()


def test_another_number_of_threads():
    """Each thread's share ends with elements that are computed one by one, and rounded in another way."""
    model = between(nn.Linear(8, 7001), nn.SiLU(), nn.Linear(7001, 4))
    x = torch.randn(10, 8)
    before = torch.get_num_threads()
    found = []
    try:
        for store in (None, ActivationStore(model, "derive", min_bytes=0)):
            torch.set_num_threads(1)
            with store or nullcontext():
                loss = model(x)
            torch.set_num_threads(2)
            found.append(torch.autograd.grad(loss, list(model.parameters())))
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    check_same(*found)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)], ids=["layer", "group", "rms"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite(norm, value):
    model = between(nn.Linear(8, 8), deepcopy(norm), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    x[0, 0] = value
    found = gradients(model, x, store=ActivationStore(model, "derive", min_bytes=0))
    check_same(found, gradients(model, x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    found = []
    for store in (None, ActivationStore(model, "derive", min_bytes=0)):
        torch.manual_seed(0)
        x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
        with store or nullcontext():
            loss = sum(part.sum() for part in model(x).unbind())
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    check_same(*found)


def test_an_input_that_has_changed_already():
    """Backward of the rest of the graph does not read it."""
    model = between(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    found = []
    for store in (None, ActivationStore(model, "derive", min_bytes=0)):
        with store or nullcontext():
            h = model[0](torch.ones(4, 8))
            y = model[1](h)
            with torch.no_grad():
                h.zero_()
            loss = model[2](y).sin().sum()
        found.append(torch.autograd.grad(loss, list(model[2].parameters())))
    check_same(*found)


# -- planted bugs -----------------------------------------------------------------------------------------------------


def no_version(patch):
    """What was changed without autograd is made again as if it were not."""
    patch.setattr(derived.Derived, "get", _get_without_versions)
    patch.setattr("actstore.autograd.derived.check_version", lambda *args: None)
    patch.setattr("actstore.autograd.handles.check_version", lambda *args: None)


def _get_without_versions(self):
    inputs = [None if handle is None else handle.get() for handle in self.inputs]
    return self.function(*inputs).as_strided(self.shape, self.stride, self.offset)


def other_options(patch):
    patch.setitem(RULES, "GeluBackward0", derived.Rule.of("self", lambda node: F.gelu))


def other_strides(patch):
    patch.setattr(
        derived.Derived,
        "get",
        lambda self: self.function(*(handle.get() for handle in self.inputs)).reshape(self.shape),
    )


def lossy_inputs(patch):
    patch.setattr(derived, "_comes_back", lambda handle, codec: True)


PLANTED = {
    no_version: lambda: test_changes_before_backward_are_found_as_autograd_finds_them("output"),
    other_options: lambda: test_every_rule("gelu, tanh", torch.float32),
    other_strides: lambda: test_views_of_what_is_made_again("slice"),
    lossy_inputs: test_an_input_that_comes_back_with_an_error_is_no_source,
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_caught(plant, monkeypatch):
    PLANTED[plant]()
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        PLANTED[plant]()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_half_of_a_transformer_block_is_not_held():
    from actstore.bench import workloads
    from actstore.bench.workloads import sized

    for name, share in (("gpt", 0.65), ("llama", 0.55), ("unet", 0.5)):
        sizes = {"layers": 2, "width": 64, "batch": 2} if name != "unet" else {"layers": 2, "batch": 2}
        job = workloads.make(sized(name, **sizes))
        store = ActivationStore(job.model, "derive", min_bytes=4096)
        with store:
            loss = job.loss(*job.batch(0))
        assert store.report().held_bytes <= share * store.report().saved_bytes
        job.backward(loss)


def test_what_was_made_dies_with_its_reader():
    model = build("gelu")
    made = []
    run = derived.Derived.get

    def watched(self):
        tensor = run(self)
        made.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with pytest.MonkeyPatch.context() as patch, gc_off():
        patch.setattr(derived.Derived, "get", watched)
        gradients(model, torch.randn(4, WIDTH, 6), store=ActivationStore(model, "derive", min_bytes=0))
        assert made
        assert [weak() for weak in made] == [None] * len(made)


def test_the_peak_counts_what_is_made_again():
    model = build("gelu")
    store = ActivationStore(model, "derive", min_bytes=0)
    with store:
        loss = model(torch.randn(4, WIDTH, 6))
    before = store.report().peak_held_bytes
    loss.backward()
    assert store.report().peak_held_bytes >= before


@pytest.mark.parametrize("payload", [partial(torch.randn, 4, WIDTH, 6)])
def test_in_a_loop_nothing_is_left(payload):
    model = build("layer norm")
    store = ActivationStore(model, "derive(raw @ disk)", min_bytes=0)
    for _ in range(5):
        gradients(model, payload(), store=store)
        check_drained(store)
    store.close()
