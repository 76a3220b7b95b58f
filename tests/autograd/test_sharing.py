"""One payload for several saves of a storage: only where each gets the bytes of its own save, or an error."""

import threading

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Encode
from actstore.base.spec import Spec
from actstore.policy.options import codec_text
from actstore.store import comparison
from tests.autograd.checks import check_same, gc_off
from tests.autograd.sharing import comparisons, square, store_of, stored_bytes
from tests.codecs.test_contract import CODECS, dtype_for

POLICIES = ["keep", "derive", "raw", "raw @ host", "raw @ disk", "expack", "zmask"]


# -- across a backward ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_write_through_data_after_a_backward(policy):
    """As in optimizers, attacks and numerical derivatives, with the first graph alive."""
    x = torch.randn(64, requires_grad=True)
    with store_of(policy):
        for _ in range(3):
            y = square(x)
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            x.data.mul_(10)
            (found,) = torch.autograd.grad(square(x), x, create_graph=True)
            check_same((found.detach(),), (2 * x.detach(),))
    del first


@pytest.mark.parametrize("write", [True, False])
def test_no_payload_of_before_a_backward_serves_after_it(write):
    x = torch.randn(64, requires_grad=True)
    store, graphs = store_of("raw"), []
    with store, comparisons() as compared:
        for _ in range(3):
            graphs.append((x.sin() + x.cos()).sum())
            torch.autograd.grad(graphs[-1], x, retain_graph=True)
            if write:
                x.data.add_(1)
    assert stored_bytes(store) == 3 * x.nbytes
    assert len(compared) == 3  # cos with sin, in each forward
    del graphs


class Step(torch.optim.SGD):
    """Writes through `.data`, as optimizers of the time before `no_grad` do."""

    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(weight.grad, alpha=-group["lr"])


@pytest.mark.parametrize("optimizer", ["data", "loop", "foreach", "fused"])
@pytest.mark.parametrize("policy", POLICIES)
def test_optimizer_steps_in_one_context(policy, optimizer):
    """Of weights that the store does not know: it moves them, as any saved tensor."""

    def train(context):
        torch.manual_seed(0)
        weights = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
        kinds = {"data": {}, "loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
        steps = (Step if optimizer == "data" else torch.optim.SGD)(weights, lr=0.1, **kinds[optimizer])
        x, losses = torch.randn(4, 8), []
        with context:
            for _ in range(4):
                losses.append(((x @ weights[0]).tanh() @ weights[1] @ weights[0]).square().sum())
                steps.zero_grad()
                losses[-1].backward(retain_graph=True)
                steps.step()
        return [*(loss.detach() for loss in losses), *weights]

    check_same(train(store_of(policy)), train(torch.enable_grad()))


@pytest.mark.parametrize("policy", POLICIES)
def test_several_backwards_through_one_graph_and_forwards_between_them(policy):
    x = torch.randn(64, requires_grad=True)
    with store_of(policy):
        old, y = x.detach().clone(), x.sin().sum()
        for _ in range(3):
            (found,) = torch.autograd.grad(y, x, retain_graph=True)
            if policy not in ("keep", "derive"):  # those give what plain PyTorch does
                check_same((found,), (old.cos(),))
            x.data.add_(1)
            (newer,) = torch.autograd.grad(x.sin().sum(), x)
            check_same((newer,), (x.detach().cos(),))


@pytest.mark.parametrize("policy", ["raw", "raw @ host", "raw @ disk"])
def test_a_backward_on_another_thread(policy):
    """Of which this thread's context is not told: bytes are compared."""
    x = torch.randn(64, requires_grad=True)
    with store_of(policy):
        y = square(x)
        thread = threading.Thread(target=lambda: torch.autograd.grad(y, x, retain_graph=True))
        thread.start()
        thread.join()
        x.data.mul_(10)
        z = square(x)
    check_same(torch.autograd.grad(z, x), (2 * x.detach(),))


@pytest.mark.parametrize("policy", ["raw", "raw @ disk"])
def test_forwards_on_several_threads(policy):
    """Each writes to a tensor of its own, in a context of its own of one store."""
    store, found = store_of(policy), {}

    def work(number):
        x = torch.full((64,), float(number), requires_grad=True)
        with store:
            for _ in range(4):
                y = square(x)
                x.data.add_(1)
                z = square(x)
        found[number] = torch.autograd.grad(z, x)
        del y

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        check_same(found[number], (torch.full((64,), 2.0 * (number + 4)),))


# -- within one forward -----------------------------------------------------------------------------------------------


def saved_twice(codec, write):
    """A tensor that two nodes save, in between written to or not: bytes stored, and the second one's gradient."""
    torch.manual_seed(0)
    x = torch.randn(32, 32, dtype=dtype_for(codec), requires_grad=True)
    codec.encode(x, torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8))  # what is loaded once, is by now
    store = ActivationStore(policy=lambda site, spec: Encode(codec, protected=False), min_bytes=0)
    with store:
        h = x * 1
        first = h.sin()
        if write:
            h.data.add_(1)
        second = h.cos()
    nbytes = stored_bytes(store)
    del first
    return nbytes, *torch.autograd.grad(second.sum(), x)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if dtype_for(codec).is_floating_point], ids=codec_text)
def test_every_codec_shares_what_was_not_written_to(codec):
    """And what was written to gets a payload of its own."""
    with comparisons() as compared:
        once, _ = saved_twice(codec, False)
        twice, found = saved_twice(codec, True)
    assert len(compared) == 2
    assert twice > once
    if codec.lossless:
        torch.manual_seed(0)
        h = torch.randn(32, 32, dtype=found.dtype) + 1
        check_same((found,), (-h.sin(),))


LAYOUTS = {
    "whole": lambda base: base,
    "transposed": lambda base: base.t(),
    "slice": lambda base: base[1:3],
    "gaps": lambda base: base[:, ::2],
    "far_apart": lambda base: base[:, ::6],
    "expanded": lambda base: base[:, :1].expand(4, 6),
    "overlapping": lambda base: base.view(-1).unfold(0, 5, 2),
}


def gradient(base, layout):
    """Of the sum of the sines of a view of a tensor."""
    copy = base.detach().clone().requires_grad_()
    return torch.autograd.grad(LAYOUTS[layout](copy).sin().sum(), copy)


@pytest.mark.parametrize("policy", ["raw", "raw @ disk", "expack"])
@pytest.mark.parametrize("second", LAYOUTS)
def test_views_of_one_storage(second, policy):
    """Whichever share a payload: after a write each gets the bytes of its own save."""
    for first, lay_out in LAYOUTS.items():
        x = torch.randn(4, 6, requires_grad=True)
        base = x * 1
        with store_of(policy):
            wanted = [gradient(base, first), gradient(base, second)]
            made = [lay_out(base).sin(), LAYOUTS[second](base).sin()]
            base.data.add_(1)
            wanted.append(gradient(base, second))
            made.append(LAYOUTS[second](base).sin())
        for output, grads in zip(made, wanted, strict=True):
            check_same(torch.autograd.grad(output.sum(), base), grads)


@pytest.mark.parametrize("codec", ["raw @ host", "int8"])
def test_what_a_module_keeps_gets_no_payload_beside_it(codec):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))  # ReLU keeps what the last layer reads
    store = ActivationStore(model, f"2 : {codec}; * : keep", min_bytes=0)
    with store:
        loss = model(torch.randn(32, 64)).sum()
    loss.backward()
    report = store.report()
    assert report.held_bytes == report.saved_bytes


def test_one_node_saves_several_views_without_a_comparison():
    layer = nn.Linear(16, 48)
    store = ActivationStore(layer, "raw", min_bytes=0)
    with store, comparisons() as compared:
        q, k, v = layer(torch.randn(2, 4, 16)).view(2, 1, 4, 48).split(16, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
    assert not compared
    y.sum().backward()


class Writes(torch.autograd.Function):
    """Lets a node inside of its forward save, writes, and saves."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_().mul(1)
            ctx.node = ctx.inner.sin()
        ctx.inner.data.add_(1)
        ctx.save_for_backward(ctx.inner)
        return ctx.inner.detach().sin()

    @staticmethod
    def backward(ctx, grad):
        (inner,) = ctx.saved_tensors
        return grad * inner.detach().cos()


@pytest.mark.parametrize("policy", ["raw", "raw @ disk"])
def test_a_function_that_writes_before_it_saves(policy):
    x = torch.randn(64, requires_grad=True)
    with store_of(policy):
        y = Writes.apply(x)
    check_same(torch.autograd.grad(y.sum(), x), ((x.detach() + 1).cos(),))


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_differences_on_a_device(monkeypatch):
    monkeypatch.setattr(comparison, "CHUNK_WORDS", 16)
    for nbytes in (0, 1, 7, 8, 9, 1023, 1024):
        memory = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        assert not comparison.difference_on_device(memory, memory.clone())
        for place in range(0, nbytes, 101):
            changed = memory.clone()
            changed[place] += 1
            assert comparison.difference_on_device(memory, changed)
            assert not comparison.same_on_host(memory.data_ptr(), changed.data_ptr(), nbytes)


def test_nothing_is_left():
    with gc_off():
        x = torch.randn(64, requires_grad=True)
        store = store_of("raw")
        with store:
            y = x.sin() + x.cos()
            x.data.add_(1)
            y = y + x.sin()
        assert store.report().live_bytes
        del y
        assert store.report().live_bytes == 0
