"""One payload for several saves of a storage: only where each gets the bytes of its own save, or an error."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Encode, devices
from actstore.autograd import sharing
from actstore.base import sameness
from actstore.base.spec import Spec
from actstore.errors import MutationError
from actstore.policy.options import codec_text
from actstore.transfer.engine import Engine
from tests.autograd.checks import check_same, gc_off, settle
from tests.codecs.test_contract import CODECS, dtype_for
from tests.devices.late import LateDevice

POLICIES = ["keep", "derive", "raw", "raw @ host", "raw @ disk", "expack", "zmask"]


def store_of(policy, **options):
    return ActivationStore(policy=policy, min_bytes=0, **options)


def square(x):
    return (x * x).sum()


def stored_bytes(store):
    return store.report().stored_bytes


@contextmanager
def comparisons():
    """How often bytes are compared meanwhile."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        compare = sharing.compare
        patch.setattr(sharing, "compare", lambda *args: calls.append(1) or compare(*args))
        yield calls


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


# -- where the bytes are out of reach ---------------------------------------------------------------------------------


@pytest.fixture
def out_of_reach(monkeypatch):
    """As where a payload has left for the disk before its tensor is saved again."""
    monkeypatch.setattr(Engine, "peek", lambda self, berth: None)


@pytest.mark.usefixtures("out_of_reach")
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("policy", ["raw @ disk", "expack @ disk", "int8 @ disk"])
def test_a_payload_that_has_left_serves_no_other_save(policy, write):
    x = torch.randn(64, 64, requires_grad=True)
    h = x * 1
    old = h.detach().clone()
    store = store_of(policy)
    with store:
        first = h.sin()
        for place in store._store._places.values():
            settle(place.engine)
        if write:
            h.data.neg_()
        second = h.cos()
    found = [torch.autograd.grad(each.sum(), h)[0] for each in (first, second)]
    wanted = old.cos(), -h.detach().sin()
    if "int8" in policy:
        assert all((a - b).abs().max() < 0.05 for a, b in zip(found, wanted, strict=True))
    else:
        check_same(found, wanted)
        assert stored_bytes(store) > 1.5 * h.nbytes


LOSSY = ["int8 @ disk", "int8(round=stochastic) @ disk", "int8(axis=token, round=stochastic) @ disk"]
SECONDS = {  # and whether its own payload would have the same bytes; None: not by token
    "the same": (lambda h: h, True),
    "flat": (lambda h: h.view(-1), None),
    "transposed": (lambda h: h.t(), True),
    "a part": (lambda h: h[3:, 5:], False),
}


@pytest.mark.parametrize("policy", LOSSY)
@pytest.mark.parametrize("second", SECONDS)
def test_a_lossy_payload_that_has_left_does_not_show(second, policy, monkeypatch):
    """Whether it has is a matter of time: the second tensor comes back with the same values in any case."""
    view, same = SECONDS[second]

    def run():
        store, h = store_of(policy), torch.randn(64, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with store:
            h = h * 1
            total = h.sin().sum() + view(h).cos().sum() + (h + 1).tanh().sum()  # the last with random bits of its own
        (found,) = torch.autograd.grad(total, h)
        nbytes = stored_bytes(store)
        store.close()
        return found, nbytes

    shared, few = run()
    monkeypatch.setattr(sharing, "compare", lambda *_: False)
    own, more = run()
    check_same(shared, own)
    assert (few < more) == (same is True or (same is None and "token" not in policy))


@pytest.mark.parametrize("policy", ["int8 @ disk", "int8(round=stochastic) @ disk"])
def test_signs_that_a_payload_keeps_do_not_show_either(policy, monkeypatch):
    """A payload that `abs` reads keeps them; then a payload of its own for what reads the tensor later does, too."""

    def run():
        store, h = store_of(policy), torch.randn(64, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with store:
            y = h * torch.logspace(-6, 0, 64)
            total = y.abs().sum() + y.sigmoid().sum() + y.cos().sum()
        (found,) = torch.autograd.grad(total, h)
        store.close()
        return found

    shared = run()
    monkeypatch.setattr(sharing, "compare", lambda *_: False)
    check_same(shared, run())


@pytest.mark.parametrize("first", ["raw @ disk", "int4 @ disk", "int8(signs=keep) @ disk"])
def test_another_codec_of_an_earlier_save_does_not_show(first, monkeypatch):
    class Saves(nn.Module):
        def forward(self, h):
            return h.sin()

    model = nn.ModuleDict({"first": Saves(), "second": Saves(), "third": Saves()})

    def run(missing):
        policy = f"first : {first}; second : int8(signs=keep) @ disk; third : int8 @ disk"
        store, h = ActivationStore(model, policy, min_bytes=0), values.clone().requires_grad_()
        calls = iter(missing)
        monkeypatch.setattr(sharing, "compare", lambda *args: not next(calls) and compare(*args))
        with store:
            total = sum(part(view).sum() for view in (h, h.view(-1)) for part in model.values())
        (found,) = torch.autograd.grad(total, h)
        store.close()
        return found

    values, compare = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), sharing.compare
    wanted = run([False] * 99)
    for missing in ([True] * 99, [True, False] * 50, [False, True] * 50, [True, True, False] * 33):
        check_same(run(missing), wanted)


@pytest.mark.parametrize("policy", ["raw", "int8", "raw @ host", "expack", "zmask(int8)", "expack @ host"])
def test_on_an_accelerator_the_device_compares(policy, monkeypatch):
    monkeypatch.setattr(devices, "open_device", lambda device: LateDevice())
    x = torch.randn(64, 64, requires_grad=True)
    h = x * 1

    def run(write):
        store = store_of(policy)
        with store:
            first = h.sin()
            if write:
                h.data.neg_()
            second = h.cos()
        found = [torch.autograd.grad(each.sum(), h) for each in (first, second)]
        nbytes = store.report().stored_bytes
        store.close()
        return found, nbytes

    ((first,), (second,)), nbytes = run(False)
    if "int8" not in policy:
        check_same((first, second), (h.detach().cos(), -h.detach().sin()))
    assert nbytes <= 1.1 * h.nbytes
    with pytest.raises(MutationError, match="saved twice in one forward") as info:
        run(True)
    assert info.value.site.name == ""


@pytest.mark.parametrize("read", [True, False])
def test_the_host_never_waits_for_a_comparison(read, monkeypatch):
    """Backward that comes before the device leaves the error to the next entry; what is never read is no error."""
    device = LateDevice()
    monkeypatch.setattr(devices, "open_device", lambda _: device)
    h = torch.randn(64, 64, requires_grad=True) * 1
    store = store_of("raw")
    with store:
        first = h.sin()
        h.data.neg_()
        second = h.cos()
    if read:
        torch.autograd.grad(second.sum(), h)
    del first, second
    with store:  # the device has still not come so far
        pass
    device.finish()
    if not read:
        store.close()
        return
    with pytest.raises(MutationError, match="saved twice in one forward"), store:
        pytest.fail("entered")
    with store:  # it is told once
        pass
    store.close()


def test_closing_waits_for_comparisons(monkeypatch):
    monkeypatch.setattr(devices, "open_device", lambda _: LateDevice())
    h = torch.randn(64, 64, requires_grad=True) * 1
    store = store_of("raw")
    with store:
        first = h.sin()
        h.data.neg_()
        second = h.cos()
    torch.autograd.grad(second.sum(), h)
    del first
    with pytest.raises(MutationError, match="saved twice in one forward"):
        store.close()
    store.close()


def test_a_part_is_not_compared_with_the_whole_on_an_accelerator(monkeypatch):
    """Its other elements may change: an operator of PyTorch writes to chunks with version counters of their own."""
    monkeypatch.setattr(devices, "open_device", lambda _: LateDevice())
    h = torch.randn(64, 64, requires_grad=True) * 1
    left, right = h.detach()[:, :32], h[:, 32:]
    with store_of("raw"), comparisons() as compared:
        whole = h.sin()
        left.data.add_(1)
        part = right.cos()
    assert not compared
    check_same(torch.autograd.grad(part.sum(), right), (-right.detach().sin(),))
    del whole


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_differences_on_a_device(monkeypatch):
    monkeypatch.setattr(sameness, "CHUNK_WORDS", 16)
    for nbytes in (0, 1, 7, 8, 9, 1023, 1024):
        memory = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        assert not sameness.difference_on_device(memory, memory.clone())
        for place in range(0, nbytes, 101):
            changed = memory.clone()
            changed[place] += 1
            assert sameness.difference_on_device(memory, changed)
            assert not sameness.same_on_host(memory.data_ptr(), changed.data_ptr(), nbytes)


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
