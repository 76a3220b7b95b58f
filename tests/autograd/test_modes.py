"""Under other modes of torch, and with tensors that are no plain strided ones."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from actstore import ActivationStore
from tests.autograd.checks import check_drained, check_same, gc_off, train_step
from tests.autograd.models import build

POLICIES = ["keep", "raw", "raw @ disk"]
STORED = POLICIES[1:]


def make(policy):
    return ActivationStore(policy=policy, min_bytes=0)


def program(x):
    h = x * 1
    return (h[:, ::2] * h[:, 1::2].tanh()).sum()


@pytest.mark.parametrize("policy", STORED)
def test_defaults_at_backward_do_not_matter(policy):
    x = torch.randn(4, 6, requires_grad=True)
    wanted = torch.autograd.grad(program(x), x)
    with make(policy):
        loss = program(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            found = torch.autograd.grad(loss, x)
    finally:
        torch.set_default_dtype(torch.float32)
    check_same(found, wanted)


@pytest.mark.parametrize("policy", STORED)
def test_defaults_at_forward_do_not_matter(policy):
    x = torch.randn(4, 6, requires_grad=True)
    wanted = torch.autograd.grad(program(x), x)
    with torch.device("meta"), make(policy):
        loss = program(x)
    check_same(torch.autograd.grad(loss, x), wanted)


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", STORED)
def test_under_a_dispatch_mode(policy):
    x = torch.randn(4, 6, requires_grad=True)
    wanted = torch.autograd.grad(program(x), x)
    with Counts() as mode:
        with make(policy):
            loss = program(x)
        found = torch.autograd.grad(loss, x)
    assert mode.n > 0
    check_same(found, wanted)


@pytest.mark.parametrize("policy", [*POLICIES, "int8", "expack @ host", "blocks.* : recompute(raw)"])
def test_a_store_adds_no_operations_that_count(policy):
    """What a recomputed module runs again is counted, as with a checkpoint; encoding and decoding are not."""
    model, batch = build("mlp")

    def count(store):
        with FlopCounterMode(display=False) as counter:
            train_step(model, batch, store)
        return counter.get_total_flops()

    again = 2 * 5 * 16 * 32 if "recompute" in policy else 0  # up to the last tensor that is needed
    assert count(ActivationStore(model, policy, min_bytes=0)) == count(None) + 2 * again > again


@pytest.mark.parametrize("policy", STORED)
def test_reading_a_saved_tensor_under_inference_mode(policy):
    x = torch.randn(4, 6, requires_grad=True)
    with make(policy):
        y = x[:, ::2] * x[:, 1::2]
    with torch.inference_mode():
        check_same(y.grad_fn._saved_self.clone(), x.detach()[:, ::2])
    check_same(y.grad_fn._saved_self, x.detach()[:, ::2])


@pytest.mark.parametrize("policy", STORED)
def test_unpacking_records_no_graph(policy):
    x = torch.randn(4, 6, requires_grad=True)
    counts = []
    for store in (None, make(policy)):
        packs = []
        with store or nullcontext():
            y = x[:, ::2].exp() * x[:, 1::2]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, packs=packs: packs.append(t) or t.detach(), lambda t: t
        ):
            torch.autograd.grad(y.sum(), x, create_graph=True)
        counts.append(len(packs))
    assert counts[0] == counts[1] > 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("policy", POLICIES)
def test_is_grads_batched_and_forward_mode(policy):
    x = torch.randn(4, 6, requires_grad=True)
    with make(policy):
        y = (x[:, ::2] * x[:, 1::2].tanh()).sum(1)
    vectors = torch.eye(4)
    found = torch.autograd.grad(y, x, vectors, is_grads_batched=True, retain_graph=True)
    wanted = torch.stack([torch.autograd.grad(y, x, v, retain_graph=True)[0] for v in vectors])
    torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=1e-7)
    with torch.autograd.forward_ad.dual_level(), make(policy):
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones(4, 6))
        tangent = torch.autograd.forward_ad.unpack_dual(dual.sin()).tangent
    check_same(tangent, x.detach().cos())


@pytest.mark.parametrize("policy", STORED)
def test_vmap_inside(policy):
    x, w = torch.randn(5, 3, requires_grad=True), torch.randn(3, requires_grad=True)

    def loss_of():
        return torch.vmap(lambda row: (row * w).tanh().sum())(x).square().sum()

    with make(policy):
        loss = loss_of()
    check_same(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(loss_of(), (x, w)))


class Sub(torch.Tensor):
    """A subclass without a codec."""


OTHERS = {
    "sparse_coo": lambda: torch.eye(4).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "subclass": lambda: torch.randn(4, 4).as_subclass(Sub),
    "meta": lambda: torch.randn(4, 4, device="meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("policy", [*STORED, "int8"])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_of_tensors_pass_through(kind, policy):
    torch.manual_seed(0)
    matrix = OTHERS[kind]()
    device = "meta" if kind == "meta" else "cpu"
    w = torch.randn(4, 3, device=device, requires_grad=True)
    store = make(policy)
    with gc_off():
        with store:
            y = matrix @ w
        (found,) = torch.autograd.grad(y.sum(), w)
        (wanted,) = torch.autograd.grad((matrix @ w).sum(), w)
        if kind == "meta":
            assert found.shape == wanted.shape
        else:
            check_same(found.as_subclass(torch.Tensor), wanted.as_subclass(torch.Tensor))
        del y
        check_drained(store)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("policy", "layout"),
    [(p, layout) for p in STORED for layout in (torch.strided, torch.jagged)] + [("int8", torch.strided)],
)
def test_nested_tensors_come_back_exactly(policy, layout):
    parts = [torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)]

    def loss_of():
        nested = torch.nested.as_nested_tensor(parts, layout=layout)
        return (
            (nested * nested).values().sum()
            if layout is torch.jagged
            else (nested * nested).to_padded_tensor(0.0).sum()
        )

    with make(policy):
        loss = loss_of()
    check_same(torch.autograd.grad(loss, parts), torch.autograd.grad(loss_of(), parts))


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_of_a_model_in_use(policy):
    model, batch = build("mlp")
    store = ActivationStore(model, policy, min_bytes=0)
    with store:
        twin = copy.deepcopy(model)
        y = twin(*batch)
    y.square().mean().backward()
    check_same({n: p.grad for n, p in twin.named_parameters()}, train_step(model, batch).grads)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", STORED)
@pytest.mark.parametrize("before", [False, True], ids=["compiled_inside", "compiled_before"])
def test_compiled_regions(policy, before):
    torch._dynamo.reset()
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(3, 8, requires_grad=True)
    if before:
        compiled(x).sum().backward()
    parameters = [x, *layer.parameters()]
    store = make(policy)
    with store:
        y = compiled(x)
    found = torch.autograd.grad(y.square().sum(), parameters)
    assert store.report().stored_bytes > 0
    check_same(found, torch.autograd.grad(compiled(x).square().sum(), parameters))
    del y
    check_drained(store)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_compiled_model_is_compiled_once():
    """Not at each entry of the store: compiled code is checked against the ids of the hooks of all modules."""
    from torch._dynamo.testing import CompileCounter  # seconds, for this test alone

    torch._dynamo.reset()
    counter = CompileCounter()
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    compiled = torch.compile(layer, backend=counter)
    store = ActivationStore(layer, "raw", min_bytes=0)
    for _ in range(4):
        with store:
            y = compiled(torch.ones(3, 8))
        y.sum().backward()
    assert counter.frame_count == 1
