"""Values that must come back whoever writes, reads or asks: from operators, codecs and memory in all states."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from actstore import ActivationStore
from actstore.autograd.handles import Stored
from actstore.errors import SpecError
from tests.autograd.checks import check_drained, check_same, gc_off, same_bits, train_step
from tests.autograd.models import build

MOVED = ["raw", "raw @ host", "raw @ disk"]
POLICIES = ["keep", *MOVED]
LOSSY = [
    "int8", "int8(affine)", "int8(axis=token)", "fp8", "e5m6", "int4", "nf4", "int2", "zmask(int8)",
    "topk(fraction=0.25, int8)", "nm(n=2, m=4, int8)", "hadamard128(int4)",
]  # fmt: skip


def make(policy, model=None, **options):
    return ActivationStore(model, policy, min_bytes=0, **options)


class Save(torch.autograd.Function):
    """Saves its inputs as they are and does nothing else."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, *(None,) * len(ctx.saved_tensors)


def coming_back(policy, *tensors):
    with make(policy):
        y = Save.apply(torch.ones((), requires_grad=True), *tensors)
    return y.grad_fn.saved_tensors


# -- operators that write into what they have saved -------------------------------------------------------------------


def _rrelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.rrelu(x * weight + bias, training=True)


def _rrelu_in_place(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.rrelu_(x * weight + bias, training=True)


def _rrelu_with_noise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten.rrelu_with_noise(x * weight + bias, torch.zeros(x.shape), 0.1, 0.3, True)


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    statistics = torch.zeros(5), torch.ones(5)
    return torch.ops.aten._native_batch_norm_legit(x, weight, bias, *statistics, True, 0.1, 1e-5)[0]


def _batch_norm_with_update(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten._batch_norm_with_update(x, weight, bias, torch.zeros(5), torch.ones(5), 0.1, 1e-5)[0]


WRITERS = {f.__name__: f for f in (_rrelu, _rrelu_in_place, _rrelu_with_noise, _batch_norm, _batch_norm_with_update)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("writer", WRITERS)
def test_an_operator_that_writes_into_what_it_has_saved(writer, policy):
    torch.manual_seed(0)
    leaves = torch.randn(40, 5, requires_grad=True), torch.rand(5, requires_grad=True), torch.rand(5).requires_grad_()

    def loss():
        torch.manual_seed(1)
        return WRITERS[writer](*leaves).square().sum()

    with make(policy):
        stored = loss()
    check_same(torch.autograd.grad(stored, leaves), torch.autograd.grad(loss(), leaves))


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_that_later_forwards_of_one_graph_update(policy):
    """BatchNorm saves its running statistics and writes to them again: no version tells, and backward needs none."""

    def step(store):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6))
        batches = torch.randn(3, 8, 6)
        with store(model):
            loss = sum(model(batch).square().sum() for batch in batches)
        loss.backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    check_same(step(lambda model: make(policy, model)), step(lambda _: torch.enable_grad()))


# -- lossy codecs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("codec", LOSSY)
def test_one_bad_value_spoils_no_more_than_its_group(codec, bad):
    """128 elements at most: the others are no worse than without it, and what is bad is seen in the gradient."""
    torch.manual_seed(0)
    values, spoiled, others = torch.randn(8, 128), torch.zeros(8, 128), torch.arange(8) != 3
    spoiled[3, 70] = bad

    def gradient(added):
        with make(codec):
            h = values.clone().requires_grad_() + added
            y = h.square()
        return torch.autograd.grad(y.sum(), h)[0]

    def error(grad):
        return (grad - 2 * values)[others].norm()

    found = gradient(spoiled)
    assert not found[3, 70].isfinite()
    assert 0 < error(found) <= 1.01 * error(gradient(torch.zeros(8, 128)))


EXACT = {
    "int64": lambda: torch.randint(-(10**12), 10**12, (40, 16)),
    "int32": lambda: torch.randint(0, 10**6, (40, 16), dtype=torch.int32),
    "int16": lambda: torch.randint(-300, 300, (40, 16), dtype=torch.int16),
    "uint8": lambda: torch.randint(0, 255, (40, 16), dtype=torch.uint8),
    "bool": lambda: torch.rand(40, 16) > 0.5,
    "float64": lambda: torch.randn(40, 16, dtype=torch.float64).requires_grad_() * 1,
    "complex64": lambda: torch.randn(40, 16, dtype=torch.complex64).requires_grad_() * 1,
    "statistic": lambda: torch.randn(40, 16),
    "softmax": lambda: torch.randn(40, 16).requires_grad_().softmax(1),
}


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("kind", EXACT)
def test_no_codec_loses_anything_of_what_is_no_activation(kind, codec):
    tensor = EXACT[kind]()
    (found,) = coming_back(codec, tensor)
    check_same(found, tensor.detach())


@pytest.mark.parametrize("codec", ["int8", "int8 @ disk"])
def test_the_workspace_of_an_lstm_is_opaque(codec):
    """oneDNN hands its backward a buffer of bytes: with one of them wrong the gradients mean nothing."""
    model, batch = build("recurrent")
    store = make(codec, model)
    found, wanted = train_step(model, batch, store).grads, train_step(model, batch).grads
    if torch.backends.mkldnn.is_available():
        assert any(site.note.endswith("does not take uint8") for site in store.report().sites)
    error = torch.stack([(found[name] - wanted[name]).norm() for name in wanted]).norm()
    assert 0 < error < 0.05 * torch.stack([grad.norm() for grad in wanted.values()]).norm()


@pytest.mark.parametrize("policy", ["int8(round=stochastic)", "int4(round=dither) @ host", "int2 @ disk"])
def test_reading_is_a_pure_function(policy):
    """Random bits belong to the payload: each look decodes the same values, whatever was drawn meanwhile."""
    h = torch.randn(300, requires_grad=True) * 1
    with make(policy):
        y = Save.apply(torch.ones((), requires_grad=True), h)
    first = y.grad_fn.saved_tensors[0].clone()
    torch.rand(7)
    state = torch.get_rng_state()
    for _ in range(3):
        check_same(y.grad_fn.saved_tensors[0], first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not same_bits(first, h.detach())


# -- what is handed to autograd ---------------------------------------------------------------------------------------


WRONG = {
    "shape": lambda tensor: tensor[:, :1],
    "dtype": lambda tensor: tensor.double(),
    "stride": lambda tensor: tensor.clone(memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_tensor_of_another_form_is_refused(how, monkeypatch):
    """Autograd takes whatever an unpack hook returns, and computes something else with it."""
    share = Stored._share
    h = (torch.randn(4, 6, requires_grad=True) * 1)[:, ::2]
    with make("raw"):
        y = h * h.tanh()
    check_same(torch.autograd.grad(y.sum(), h, retain_graph=True), torch.autograd.grad((h * h.tanh()).sum(), h))

    class Turned:
        """Memory whose views are of another form."""

        def __init__(self, base):
            self.base = base

        def as_strided(self, *form):
            return WRONG[how](self.base.as_strided(*form))

    monkeypatch.setattr(Stored, "_share", lambda *args: Turned(share(*args)))
    with pytest.raises(SpecError, match=r"while decoding .*a tensor came back as float"):
        torch.autograd.grad(y.sum(), h)


@pytest.mark.parametrize("nbytes", [4, 12, 60, 100, 4096 + 4])
@pytest.mark.parametrize("policy", [*MOVED, "zmask @ disk", "int8", "int4 @ host"])
def test_memory_is_aligned_for_vectors(policy, nbytes):
    """Kernels may choose another order of additions where memory begins at an odd place."""
    tensors = [torch.randn(nbytes // 4, requires_grad=True) * 1 for _ in range(9)]
    for found in coming_back(policy, *tensors):
        assert found.untyped_storage().data_ptr() % 64 == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_attributes_of_a_saved_parameter_come_back_and_of_another_tensor_do_not(policy):
    """Under hooks of any kind autograd makes a new tensor of what it saved. A store gives the Parameter itself."""
    seen = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            ctx.weight = weight
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            assert hasattr(ctx.weight, "main_grad")
            seen.append((hasattr(weight, "main_grad"), weight is ctx.weight, hasattr(x, "label")))
            return grad * weight, grad * x

    def step(context):
        weight, x = nn.Parameter(torch.ones(4)), torch.randn(4, requires_grad=True) * 1
        weight.main_grad, x.label = torch.zeros(4), "x"
        with context:
            y = Reads.apply(x, weight)
        y.sum().backward()

    step(make(policy))
    step(save_on_cpu())
    step(torch.enable_grad())
    assert seen == [(True, True, False), (False, False, False), (True, True, True)]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_function_keeps_without_saving_it_stays_where_it_is(policy):
    """Attributes of `ctx` and closures pass no hook: neither moved nor counted, and the gradient is right."""

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.factor = x.detach().cos()
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor

    store, x = make(policy), torch.randn(64, requires_grad=True)
    with gc_off():
        with store:
            y = Keeps.apply(x)
        assert (store.report().saved_bytes, store.report().stored_bytes) == (0, 0)
        check_same(torch.autograd.grad(y.sum(), x), (x.detach().cos(),))
        del y
        check_drained(store)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_saved_input_that_is_detached_in_place(policy):
    """Autograd without hooks refuses; under hooks of any kind it gives the gradient of the graph as it was."""

    def gradient(context):
        x = torch.full((4,), 3.0, requires_grad=True)
        with context:
            h = x * 2
            y = h * h
        h.detach_()
        return torch.autograd.grad(y.sum(), x)

    with pytest.raises(RuntimeError, match="detached in-place"):
        gradient(torch.enable_grad())
    wanted = (torch.full((4,), 24.0),)
    check_same(gradient(save_on_cpu()), wanted)
    check_same(gradient(make(policy)), wanted)


@pytest.mark.parametrize("policy", [*POLICIES, "int8"])
def test_an_inference_tensor_is_refused_as_without_a_store(policy):
    with torch.inference_mode():
        constant = torch.randn(4)
    x, store = torch.randn(4, requires_grad=True), make(policy)
    with pytest.raises(RuntimeError) as plain:
        x * constant
    with pytest.raises(RuntimeError) as found, store:
        x * constant
    assert str(found.value) == str(plain.value)
    with torch.inference_mode(), store:
        assert (x * constant).is_inference()
    assert store.report().saved_bytes == 0
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    check_same(train_step(model, (torch.ones(2, 4),), make("raw", model)), train_step(model, (torch.ones(2, 4),)))
