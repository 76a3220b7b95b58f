"""What a lossy policy leaves exact, and what the loss does to the rest: nothing but the codec's own error."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from actstore import ActivationStore
from actstore.base.spec import Spec
from actstore.codecs import Int8
from tests.autograd.checks import check_drained, check_same, gc_off, train_step
from tests.autograd.models import CASES, build

LOSSY = ["int8", "int8 @ host", "int8 @ disk"]


def make(policy, model=None):
    return ActivationStore(model, policy, min_bytes=0)


def decoded(tensor, group=128, signs="round"):
    """What int8 makes of a tensor, by the codec alone."""
    codec, src = Int8(group, signs=signs), tensor.detach().contiguous()
    payload = torch.empty(codec.size(Spec.of(src)).nbytes, dtype=torch.uint8)
    codec.encode(src, payload)
    out = torch.empty_like(src)
    codec.decode(payload, out)
    return out


class Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return tensors[0].sum().abs().float()

    @staticmethod
    def backward(ctx, _):
        return (None,) * len(ctx.saved_tensors)


def coming_back(policy, *tensors, model=None):
    anchor = torch.ones((), requires_grad=True)
    store = make(policy, model)
    with store:
        y = Save.apply(*tensors, anchor)
    return y.grad_fn.saved_tensors[:-1]


def activation(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(300, requires_grad=True).mul(1).to(dtype)


@pytest.mark.parametrize("policy", LOSSY)
def test_an_activation_is_lossy_here(policy):
    """The test of the tests below: without this they would say nothing."""
    h = activation()
    (found,) = coming_back(policy, h)
    check_same(found, decoded(h, signs="keep"))  # as for any Function
    assert not torch.equal(found, h)


EXACT = {
    "int64": lambda: torch.randint(0, 10**12, (300,)),
    "int32": lambda: torch.randint(0, 10**6, (300,), dtype=torch.int32),
    "uint8": lambda: torch.randint(0, 255, (300,), dtype=torch.uint8),
    "bool": lambda: torch.rand(300) > 0.5,
    "float64": lambda: activation(torch.float64),
    "complex64": lambda: activation().to(torch.complex64),
    "requires_no_gradient": lambda: torch.randn(300),
    "softmax": lambda: activation().softmax(0),
    "log_softmax": lambda: activation().log_softmax(0),
    "logsumexp": lambda: activation().view(30, 10).logsumexp(1),
    "std": lambda: activation().view(30, 10).std(1),
    "mean": lambda: activation().view(30, 10).square().mean(1, keepdim=True) + 1e-6,
    "root_of_mean": lambda: activation().view(3, 10, 10).square().mean(1, keepdim=True).add(1e-6).sqrt().clone(),
    "mean_of_rows": lambda: activation().view(30, 10).mean(1)[:, None].expand(30, 10),
    "std_mean": lambda: torch.std_mean(activation().view(30, 10), 1)[0],
    "vector_norm": lambda: torch.linalg.vector_norm(activation().view(30, 10), dim=1),
    "sign": lambda: activation().sign(),
    "var_mean": lambda: torch.var_mean(activation().view(30, 10), 1)[0],
    "nll": lambda: F.cross_entropy(activation().view(30, 10), torch.zeros(30, dtype=torch.long), reduction="none"),
    "eigenvectors": lambda: torch.linalg.eigh(activation()[:256].view(16, 16))[1],
    "parameter": lambda: nn.Parameter(torch.randn(300)),
    "view_of_parameter": lambda: nn.Parameter(torch.randn(30, 10)).t(),
    "slice_of_parameter": lambda: nn.Parameter(torch.randn(30, 10))[3:, ::2],
    "cast_of_parameter": lambda: nn.Parameter(torch.randn(30, 10)).to(torch.bfloat16),
    "view_of_cast_of_parameter": lambda: nn.Parameter(torch.randn(30, 10)).to(torch.bfloat16).t()[1:],
    "overlapping": lambda: activation().unfold(0, 7, 2),
}


@pytest.mark.parametrize("policy", LOSSY)
@pytest.mark.parametrize("kind", EXACT)
def test_what_is_never_lossy(kind, policy):
    tensor = EXACT[kind]()
    (found,) = coming_back(policy, tensor)
    check_same(found, tensor.detach())
    assert found.stride() == tensor.stride()


OVERRIDDEN = {
    "requires_no_gradient", "softmax", "log_softmax", "logsumexp", "std", "mean", "root_of_mean", "mean_of_rows",
    "var_mean", "nll", "eigenvectors", "std_mean", "vector_norm", "sign",
}  # fmt: skip


@pytest.mark.parametrize("shape", [(30, 1, 10), (10, 30, 1), (1, 300)])
def test_a_dimension_of_one_element_makes_no_statistic(shape):
    (found,) = coming_back("int8", activation().view(shape).sin())
    assert not torch.equal(found, activation().view(shape).sin())


@pytest.mark.parametrize("policy", LOSSY)
@pytest.mark.parametrize("kind", EXACT)
def test_a_rule_may_give_up_the_protection_of_values_but_not_of_forms(kind, policy):
    tensor = EXACT[kind]()
    (found,) = coming_back(f"unprotected {policy}", tensor)
    if kind in OVERRIDDEN:
        assert not torch.equal(found, tensor)
        torch.testing.assert_close(found, tensor.detach(), atol=0.02 * tensor.abs().max().item(), rtol=0)
    else:
        check_same(found, tensor.detach())


def test_what_is_saved_outside_of_the_model_may_be_given_up_too():
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    for policy in ("int8", "unprotected int8"):
        store = make(policy, model)
        with store:
            y = Save.apply(model(torch.randn(8, 300)))
        (found,) = y.grad_fn.saved_tensors
        notes = [site.note for site in store.report().sites]
        assert any("part of the loss" in note for note in notes) == (policy == "int8")
        assert found.shape == (8, 300)


@pytest.mark.parametrize("kind", ["parameter", "view_of_parameter", "slice_of_parameter", "cast_of_parameter"])
@pytest.mark.parametrize("policy", ["raw", "raw @ disk", "int8"])
def test_parameters_are_never_moved(kind, policy):
    tensor = EXACT[kind]()
    store = make(policy)
    with store:
        y = Save.apply(tensor)
    (found,) = y.grad_fn.saved_tensors
    assert found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert store.report().stored_bytes == 0


class Product(torch.autograd.Function):
    """Saves a weight as it is, as layers do whose weights are gathered for each use."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk"])
def test_a_parameter_that_gets_new_data_frees_the_old_and_shows_the_new(policy, trained):
    """Sharded training takes `param.data` away after forward and gathers them again before backward."""

    def run(context):
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(4, 4), requires_grad=trained), torch.randn(3, 4, requires_grad=True)
        with context:
            y = Product.apply(x, weight)
        gathered, shard = StorageWeakRef(weight.untyped_storage()), weight.detach()[:1].clone()
        weight.data = torch.empty(0)
        assert gathered.expired()
        weight.data = shard.expand(4, 4).contiguous()
        y.sum().backward()
        return x.grad, weight.grad

    with gc_off():
        check_same(run(make(policy)), run(torch.enable_grad()))


@pytest.mark.parametrize("policy", ["raw", "int8"])
def test_buffers_are_never_moved(policy):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(50))

        def forward(self, x):
            return x * self.scale

    model, x = Scaled(), torch.randn(50, requires_grad=True)
    store = make(policy, model)
    with store:
        y = model(x)
    assert store.report().saved_bytes == store.report().stored_bytes == 0
    assert y.grad_fn._saved_other.data_ptr() == model.scale.data_ptr()


def test_a_parameter_that_was_replaced_is_recognised_at_the_next_step():
    model = nn.Linear(40, 40)
    store = make("int8", model)
    for _ in range(2):
        model.weight = nn.Parameter(torch.randn(40, 40))
        x = torch.randn(3, 40, requires_grad=True)
        with store:
            y = model(x)
        check_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(model(x).sum(), x))


@pytest.mark.parametrize("norm", ["layer", "group", "batch", "instance", "rms"])
def test_norm_statistics_are_exact(norm):
    torch.manual_seed(0)
    model = {
        "layer": lambda: nn.LayerNorm(12),
        "group": lambda: nn.GroupNorm(2, 6),
        "batch": lambda: nn.BatchNorm1d(6),
        "instance": lambda: nn.InstanceNorm1d(6),
        "rms": lambda: nn.RMSNorm(12),
    }[norm]()
    x = torch.randn(4, 6, 12, requires_grad=True)
    with make("int8"):
        y = model(x * 1)
    names = [name for name in dir(y.grad_fn) if name.startswith("_saved_result") or name == "_saved_invstd"]
    plain = model(x * 1)
    for name in names:
        value = getattr(y.grad_fn, name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            check_same(value, getattr(plain.grad_fn, name))


def test_the_loss_outside_of_the_model_is_exact():
    model, batch = build("transformer")
    targets = torch.randint(0, 11, (12,))
    store = make("head : int8; * : keep", model)

    def loss_of():
        logits = model(*batch).flatten(0, 1)
        return logits, (F.cross_entropy(logits * 1.5, targets) + (logits.exp() * logits.sin()).sum())

    with store:
        logits, loss = loss_of()
    found = torch.autograd.grad(loss, logits, retain_graph=True)
    plain_logits, plain_loss = loss_of()
    check_same(found, torch.autograd.grad(plain_loss, plain_logits))
    store = make("int8", model)
    with store:
        logits, loss = loss_of()
    check_same(torch.autograd.grad(loss, logits), found)
    assert store.report().stored_bytes > 0


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("policy", LOSSY)
@pytest.mark.parametrize("name", [name for name in CASES if name != "recurrent"])
def test_gradients_are_near_and_the_loss_is_exact(name, policy, autocast):
    model, batch = build(name)
    store = make(policy, model)
    found = train_step(model, batch, store, autocast=autocast)
    check_drained(store)
    model, batch = build(name)
    wanted = train_step(model, batch, autocast=autocast)
    check_same(found.loss, wanted.loss)
    names = [name for name, grad in wanted.grads.items() if grad is not None]
    error = sum(float((found.grads[name] - wanted.grads[name]).square().sum()) for name in names) ** 0.5
    scale = sum(float(wanted.grads[name].square().sum()) for name in names) ** 0.5
    assert 0 < error < 0.05 * scale


@pytest.mark.parametrize("policy", LOSSY)
def test_the_weight_gradient_of_a_linear_is_that_of_the_decoded_input(policy):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32), torch.randn(50, 64, requires_grad=True)
    with make(policy):
        h = x * 1
        y = layer(h)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (h, layer.weight, layer.bias), grad)
    wanted = torch.autograd.grad(layer(h), (h, layer.weight, layer.bias), grad)
    check_same(found[0], wanted[0])  # needs the weight only
    check_same(found[1], grad.t() @ decoded(h))
    check_same(found[2], wanted[2])


@pytest.mark.parametrize("policy", LOSSY)
def test_backward_is_the_exact_one_run_on_decoded_values(policy):
    torch.manual_seed(0)
    x = torch.randn(20, 30, requires_grad=True)
    with make(policy):
        h = x * 1
        y = (h.sigmoid() * h).sum()
    found = torch.autograd.grad(y, h)[0]
    value, gate = decoded(h), decoded(h.sigmoid())  # sigmoid saves its output, the product saves both
    check_same(found, gate + value * (1 - gate) * gate)


PARTS = {
    "columns": lambda t: t[:, ::2],
    "transposed": lambda t: t[:, 4:20].t(),
    "rows": lambda t: t[3:9],
    "expanded": lambda t: t[:1].expand(7, 24),
}


@pytest.mark.parametrize("part", PARTS)
def test_views_are_lossy_by_their_own_elements(part):
    """Elements that the view does not address share no scale with it, where they may mean nothing."""
    memory = torch.full((12, 24), 1e30)
    view = PARTS[part](memory)
    unique = view[:1] if part == "expanded" else view
    unique.copy_(torch.randn(unique.shape))
    (found,) = coming_back("int8", view.requires_grad_())
    assert (found - view.detach()).abs().max() < 0.05
    assert not torch.equal(found, view)


@pytest.mark.parametrize("create_graph_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk"])
def test_double_backward_is_that_of_plain_autograd(policy, create_graph_inside):
    def penalty(h):
        y = (h.tanh() * h.exp()).sum()
        return torch.autograd.grad(y, h, create_graph=True)[0].square().sum()

    x = torch.randn(40, requires_grad=True)
    store = ActivationStore(policy=policy, min_bytes=0)
    with store:
        first = penalty(x)
    wanted = torch.autograd.grad(penalty(x), x)
    check_same(torch.autograd.grad(first, x), wanted)
    with store:
        y = (x.tanh() * x.exp()).sum()
        if create_graph_inside:
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
    if not create_graph_inside:
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
    check_same(torch.autograd.grad(grad.square().sum(), x), wanted)


@pytest.mark.parametrize("policy", LOSSY)
def test_what_a_differentiated_backward_saves_is_kept(policy):
    x = torch.randn(40, requires_grad=True)
    store = make(policy)
    with store:
        h = x * 1
        y = h.exp()
        before = store.report().stored_bytes
        torch.autograd.grad(y.sum(), h, create_graph=True)
        assert store.report().stored_bytes == before


@pytest.mark.parametrize("policy", ["raw", "raw @ disk"])
def test_gradcheck_and_gradgradcheck(policy):
    store = make(policy)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)

    @store
    def function(x, w):
        return (x.tanh() @ w).softmax(-1) * 1.5

    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))
    assert store.report().stored_bytes > 0


def test_an_input_that_requires_a_gradient_may_have_one_channel():
    """Transformers' encoders of sound let theirs require gradients; nothing comes before it in the graph."""
    model = nn.Conv1d(1, 4, 3)
    store = make("int8", model)
    with store:
        loss = model(torch.randn(2, 1, 64, requires_grad=True)).square().sum()
    loss.backward()
    assert [site.decision for site in store.report().sites if site.site == "(top)[0]"] == ["int8"]
