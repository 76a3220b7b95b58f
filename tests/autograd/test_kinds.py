"""Tensors that are not plain activations: moved exactly, or kept and counted with the reason."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from actstore import ActivationStore, Host
from actstore.errors import PolicyError
from tests.autograd.checks import Census, check_drained, check_same, gc_off, train_step

MOVED = ["raw", "raw @ disk", "int8"]
POLICIES = ["keep", *MOVED]


def make(policy, **options):
    return ActivationStore(policy=policy, min_bytes=0, **options)


def notes(store):
    return {site.note for site in store.report().sites if site.saved_bytes}


def stored_by_site(store):
    return {site.site: site.stored_bytes for site in store.report().sites if site.saved_bytes}


class Saves(torch.autograd.Function):
    """Saves a tensor of any kind, whose values `read` brings into backward."""

    @staticmethod
    def forward(ctx, x, other, read):
        ctx.save_for_backward(other)
        ctx.read = read
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.read(ctx.saved_tensors[0]), None, None


# -- fake tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*POLICIES, "recompute(raw)"])
def test_fake_tensors_are_neither_stored_nor_counted(policy):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        with FakeTensorMode(allow_non_fake_inputs=True):
            with store:
                loss = model(torch.randn(3, 16)).square().sum()
            grads = torch.autograd.grad(loss, list(model.parameters()))
        assert all(isinstance(grad, FakeTensor) for grad in grads)
        assert (store.report().saved_bytes, store.report().held_bytes, store.report().stored_bytes) == (0, 0, 0)
        del loss
        check_drained(store)
    batch = (torch.randn(3, 16),)  # and the next step is a real one
    found = train_step(model, batch, store)
    assert store.report().saved_bytes > 0
    if policy != "int8":
        check_same(found, train_step(model, batch))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_real_tensor_that_is_saved_under_a_fake_mode_comes_back(policy):
    """Whatever is made under the mode is fake, an alias of a real tensor too."""
    x, w = torch.randn(3, 16), torch.randn(16, 4, requires_grad=True)
    with torch.no_grad():
        x.add_(1)  # its version is not that of a new tensor
    store = make(policy)
    with store:
        y = x * w[:, 0].detach().clone().requires_grad_()
        with FakeTensorMode(allow_non_fake_inputs=True):
            z = x @ w
        assert type(z.grad_fn._saved_self) is torch.Tensor
        check_same(z.grad_fn._saved_self, x)
    del y, z
    check_drained(store)


@pytest.mark.parametrize("policy", [*POLICIES, "raw @ host", "unprotected int8"])
def test_a_trace_of_forward_and_backward_is_that_without_a_store(policy):
    """What is encoded is lost to a tracer, and would be a constant of the graph."""

    def gradient(x, context):
        x = x.detach().requires_grad_()
        with context:
            loss = ((x @ weight).tanh() * x.exp()).sum()
        return torch.autograd.grad(loss, x)[0]

    weight, store, fresh = torch.randn(4, 4), make(policy), torch.randn(3, 4)
    traced = make_fx(lambda x: gradient(x, store))(torch.randn(3, 4))
    check_same(traced(fresh), gradient(fresh, nullcontext()))
    assert store.report().stored_bytes == 0


# -- storages and quantizers ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_quantized_tensors_are_kept(kind, policy):
    x = torch.randn(8, 8, requires_grad=True)
    if kind == "tensor":
        other = torch.quantize_per_tensor(torch.randn(8, 8), 0.1, 0, torch.qint8)
    else:
        other = torch.quantize_per_channel(torch.randn(8, 8), torch.rand(8) + 0.1, torch.zeros(8), 0, torch.qint8)
    store = make(policy)
    with store:
        y = Saves.apply(x, other, torch.dequantize)
    check_same(torch.autograd.grad(y.sum(), x), (other.dequantize(),))
    assert store.report().saved_bytes == other.numel()
    if policy != "keep":
        assert notes(store) == {"kept: a quantized tensor has more than its bytes"}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk"])
def test_tensors_in_a_layout_of_their_own_are_kept(policy):
    x, store = torch.randn(4, 3, 8, 8, requires_grad=True), make(policy)

    def run():
        return torch.relu(x.to_mkldnn()).to_dense().square().sum()

    with gc_off():
        with store:
            loss = run()
        check_same(torch.autograd.grad(loss, x), torch.autograd.grad(run(), x))
        if policy != "keep":
            noted = {site.note for site in store.report().sites}
            assert noted == {"", "kept: a torch._mkldnn tensor has no storage of its own"}
        del loss
        check_drained(store)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_mask_of_a_fake_quantization_is_exact(policy):
    x, store = torch.randn(64, 64, requires_grad=True), make(policy)

    def run():
        return (torch.fake_quantize_per_tensor_affine(x * 3, 0.1, 0, -8, 7) * x.detach()).sum()

    with store:
        loss = run()
    check_same(torch.autograd.grad(loss, x), torch.autograd.grad(run(), x))
    assert (store.report().stored_bytes > 0) == (policy != "keep")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("left", [0, 100])
def test_a_storage_that_is_too_small_for_its_tensor_is_kept(left, policy):
    """As those of parameters between their uses, in some ways to share them out."""
    x = torch.randn(64, requires_grad=True)
    other = torch.randn(64)
    values, storage = other.clone(), other.untyped_storage()
    storage.resize_(left)
    store = make(policy)
    with store:
        y = Saves.apply(x, other, lambda tensor: tensor)
        z = y.exp()
    assert store.report().saved_bytes == z.nbytes + left
    storage.resize_(values.nbytes)
    other.data.copy_(values)
    check_same(torch.autograd.grad(y.sum(), x), (values,))


# -- weights that are not parameters ----------------------------------------------------------------------------------


def functional(model, weights, x):
    return torch.func.functional_call(model, weights, (x,)).float().square().sum()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("with_model", [False, True], ids=["no_model", "model"])
@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk"])
def test_weights_of_a_functional_call_are_parameters(policy, with_model, autocast):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), torch.randn(3, 16)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    store, plain = (ActivationStore(model if with_model else None, policy, min_bytes=0) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with plain:
            model(x).float().square().sum()
        with store:
            loss = functional(model, weights, x)
        wanted = functional(model, weights, x)
    assert store.report().saved_bytes == plain.report().saved_bytes > 0
    assert store.report().stored_bytes == plain.report().stored_bytes
    check_same(torch.autograd.grad(loss, list(weights.values())), torch.autograd.grad(wanted, list(weights.values())))


def test_weights_that_are_computed_are_activations_and_exact():
    """Those of an inner loop of optimization."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(3, 16)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def step():
        return functional(model, {name: w - 0.1 * w for name, w in weights.items()}, x)

    census, wanted = Census(), step()
    with census.hooks():
        step()
    for policy in ("raw", "raw @ disk", "int8", "int8 @ disk"):
        store = ActivationStore(model, policy, min_bytes=0)
        with store:
            loss = step()
        assert store.report().saved_bytes == census.nbytes
        if policy.startswith("raw"):
            assert store.report().stored_bytes == census.nbytes
            leaves = list(weights.values())
            check_same(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves, retain_graph=True))
        else:
            assert {site.site: site.note for site in store.report().sites}["2[1]"].endswith("computed from parameters")


PARAMETRIZED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm by a hook": nn.utils.weight_norm,
    "weight_norm over dimensions": lambda layer: nn.utils.weight_norm(layer, dim=None),
    "spectral_norm by a hook": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", PARAMETRIZED)
@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk", "recompute", "int8", "int8 @ disk"])
def test_parametrized_weights(policy, kind):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), PARAMETRIZED[kind](nn.Linear(16, 16)), nn.GELU(), nn.Linear(16, 4))

    model, plain, batch = build(), build(), (torch.randn(3, 16),)
    store = ActivationStore(model, f"1 : {policy}" if policy == "recompute" else policy, min_bytes=0)
    found, wanted = train_step(model, batch, store), train_step(plain, batch)
    if not policy.startswith("int8"):
        check_same(found, wanted)
        return
    inside = [site for site in store.report().sites if site.site.startswith("1") and site.saved_bytes]
    inexact = [site for site in inside if not site.note.endswith(": a weight that is computed from parameters")]
    assert [site.site for site in inexact if site.saved_bytes != 3 * 16 * 4] == []  # but the layer's input


# -- torch.func -------------------------------------------------------------------------------------------------------


def energy(x):
    return (x.exp() * x).sum()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", ["grad", "hessian", "jacrev", "vjp"])
def test_transforms_that_refuse_hooks_say_so_as_without_a_store(name):
    def run():
        transform = getattr(torch.func, name)
        return transform(energy, torch.randn(8)) if name == "vjp" else transform(energy)(torch.randn(8))

    def words():
        with pytest.raises(RuntimeError, match="support saved tensor hooks") as info:
            run()
        return str(info.value)

    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        wanted = words()
    store = make("raw")
    with store:
        assert words() == wanted
    run()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk"])
def test_transforms_that_differentiate_forward(policy):
    x, w = torch.randn(5, 8), torch.randn(8, 8, requires_grad=True)

    def run():
        batched = torch.vmap(lambda row: torch.tanh(w @ row))(x)
        _, dual = torch.func.jvp(lambda a: (a @ w).tanh(), (x,), (x,))
        return torch.autograd.grad((batched + dual).sum(), w), torch.func.jacfwd(energy)(x[0])

    wanted, store = run(), make(policy)
    with store:
        found = run()
    check_same(found[0], wanted[0])
    check_same(found[1], wanted[1])


# -- what a step forgets ----------------------------------------------------------------------------------------------


def test_a_note_is_that_of_the_last_forward():
    x, store = torch.randn(2048, requires_grad=True), make("raw @ host", tiers=[Host(10_000)])
    for size, word in ((2048, ""), (2048 * 2, "kept: no room in host"), (2048, "")):
        with store:
            y = torch.cat([x] * (size // 2048)).exp()
        assert notes(store) == {word}
        del y


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_traced_module_inside_the_context():
    layer = nn.Linear(8, 8)
    traced = torch.jit.trace(layer, torch.ones(2, 8))
    x = torch.ones(2, 8, requires_grad=True)
    with ActivationStore(policy="raw", min_bytes=0):
        y = traced(x)
    check_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(layer(x).sum(), x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("compile_", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(2, 8))])
@pytest.mark.parametrize("rule", ["0.1 : recompute", "0 : recompute(raw)", "recompute"])
def test_recomputed_torchscript_is_refused_with_its_name(rule, compile_):
    """A recomputation is ended by an exception as soon as it may, and TorchScript makes another error of that."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), compile_(nn.Linear(8, 8))), nn.Linear(8, 2))
    with pytest.raises(PolicyError, match=r"recomputes '0\.1', which is TorchScript.*a rule such as '0.* : raw'"):
        ActivationStore(model, rule)
    x = torch.ones(2, 8)
    for policy in ("raw", "0.1 : raw; 0.0 : recompute(raw); * : raw", "1 : recompute"):
        check_same(train_step(model, (x,), ActivationStore(model, policy, min_bytes=0)), train_step(model, (x,)))


# -- tensors that no hook sees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk"])
def test_what_a_users_checkpoint_is_given_by_name_or_in_containers_stays_where_it_is(policy):
    """Only tensors by position are its inputs; others wait in its closure."""
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def region(first, parts, *, scale):
        return (first + parts["a"][0] @ w).tanh() * scale.exp()

    def run():
        return checkpoint(region, x * 3, {"a": [x * 2]}, scale=x * 4, use_reentrant=False)

    store = make(policy)
    with gc_off():
        with store:
            y = run()
        assert store.report().saved_bytes == x.nbytes  # of the three inputs, one
        check_same(torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(run().sum(), (x, w)))
        del y
        check_drained(store)
