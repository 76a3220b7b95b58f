"""Several graphs, contexts, stores and threads at once."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from actstore import ActivationStore, Host
from actstore.errors import StateError
from tests.autograd.checks import check_drained, check_same, gc_off, train_step
from tests.autograd.models import LOSSLESS, build, policy_of

POLICIES = ["keep", "raw", "raw @ disk"]


def make(policy, **options):
    return ActivationStore(policy=policy, min_bytes=0, **options)


def program(x, scale):
    h = (x * scale).tanh()
    return (h * h.exp()).sum()


def plain(x, scale):
    return torch.autograd.grad(program(x, scale), x)


# forward and backward of micro-batches, as pipelines interleave them
SCHEDULES = {
    "1f1b": "f0 f1 b0 f2 b1 f3 b2 b3",
    "all_forward_first": "f0 f1 f2 f3 b0 b1 b2 b3",
    "reversed": "f0 f1 f2 f3 b3 b2 b1 b0",
    "one_never": "f0 f1 f2 b1 b0",
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_interleaved_graphs_of_one_store(schedule, policy):
    store = make(policy)
    inputs = [torch.randn(32, requires_grad=True) for _ in range(4)]
    losses = {}
    with gc_off():
        for step in SCHEDULES[schedule].split():
            kind, i = step[0], int(step[1])
            if kind == "f":
                with store:
                    losses[i] = program(inputs[i], i + 1)
            else:
                check_same(torch.autograd.grad(losses.pop(i), inputs[i]), plain(inputs[i], i + 1))
        losses.clear()
        check_drained(store)


@pytest.mark.parametrize("decision", LOSSLESS)
def test_interleaved_steps_of_one_model(decision):
    model, batch = build("transformer")
    store = ActivationStore(model, policy_of("transformer", decision), min_bytes=0)
    batches = [((batch[0] + i) % 11,) for i in range(3)]
    losses = []
    for tokens in batches:
        with store:
            losses.append(model(*tokens).square().mean())
    for i in (1, 0, 2):
        model.zero_grad()
        losses[i].backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        check_same(found, train_step(model, batches[i]).grads)


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_inside_another_forwards_context(policy):
    store = make(policy)
    a, b = (torch.randn(32, requires_grad=True) for _ in range(2))
    with store:
        first = program(a, 1)
    with store:
        second = program(b, 2)
        check_same(torch.autograd.grad(first, a), plain(a, 1))
        third = program(b, 3)
    check_same(torch.autograd.grad(second, b), plain(b, 2))
    check_same(torch.autograd.grad(third, b), plain(b, 3))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_store_nested(policy):
    store, x = make(policy), torch.randn(32, requires_grad=True)
    with gc_off():
        with store:
            first = program(x, 1)
            with store:
                second = program(x, 2)
            third = program(x, 3)
        for loss, scale in ((first, 1), (second, 2), (third, 3)):
            check_same(torch.autograd.grad(loss, x), plain(x, scale))
        del first, second, third, loss
        check_drained(store)


def test_of_two_nested_stores_the_inner_one_acts():
    outer, inner, x = make("raw"), make("raw @ disk"), torch.randn(32, requires_grad=True)
    with outer:
        with inner:
            first = program(x, 1)
        second = program(x, 2)
    assert inner.report().saved_bytes == outer.report().saved_bytes > 0
    check_same(torch.autograd.grad(first, x), plain(x, 1))
    check_same(torch.autograd.grad(second, x), plain(x, 2))


@pytest.mark.parametrize("policy", ["raw", "blocks.* : recompute"])
def test_an_outer_store_that_does_nothing_is_refused(policy):
    model, batch = build("transformer")
    outer, inner = ActivationStore(model, policy, min_bytes=0), ActivationStore(model, "raw", min_bytes=0)
    for _ in range(2):
        words = r"has seen no tensor, because <ActivationStore.*around the forward"
        with pytest.raises(StateError, match=words) as info, outer, inner:
            loss = model(*batch).sum()
        assert info.value.inner is inner
        loss.backward()
    with outer, torch.no_grad(), inner:
        model(*batch)
    with outer, inner:
        pass


def test_names_go_on_in_the_outer_store_after_an_inner_one():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with inner:
                x = self.a(x)
            return self.b(x.exp()).sin()

    model = nn.Sequential(Outer())
    inner = ActivationStore(model[0], "raw", min_bytes=0)
    outer = ActivationStore(model, "raw", min_bytes=0)
    x = torch.randn(2, 8, requires_grad=True)
    with outer:
        y = model(x)
    assert [site.site for site in inner.report().sites] == ["a[0]"]
    assert [site.site for site in outer.report().sites] == ["0[0]", "0.b[0]", "0[1]"]
    del y


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_two_stores_around_each_other_recompute_their_own(first):
    model, batch = build("transformer")
    outer = ActivationStore(model, "blocks.0 : recompute(raw)", min_bytes=0)
    inner = ActivationStore(model, "blocks.1 : recompute(raw @ disk)", min_bytes=0)
    one, other = (inner, outer) if first == "inner" else (outer, inner)
    with pytest.raises(StateError, match="has seen no tensor"), one:
        found = train_step(model, batch, other)
    check_same(found, train_step(model, batch))
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_two_stores_that_recompute_the_same_module_leave_in_any_order():
    model, batch = build("mlp")
    stores = [ActivationStore(model, "blocks.* : recompute(raw)", min_bytes=0) for _ in range(2)]
    entered, left = threading.Barrier(2), [threading.Event(), threading.Event()]

    def work(i):
        with stores[i]:
            entered.wait(120)
            if i == 1:
                assert left[0].wait(120)
        left[i].set()

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(work, range(2)))
    assert all("forward" not in block.__dict__ for block in model.blocks)
    check_same(train_step(model, batch, stores[0]), train_step(model, batch))


@pytest.mark.parametrize("policy", POLICIES)
def test_as_a_decorator(policy):
    store, x = make(policy), torch.randn(32, requires_grad=True)

    @store
    def loss_of(tensor, *, scale=1):
        """The program."""
        return program(tensor, scale)

    assert (loss_of.__name__, loss_of.__doc__) == ("loss_of", "The program.")
    for scale in (1, 2):
        check_same(torch.autograd.grad(loss_of(x, scale=scale), x), plain(x, scale))
        assert store.report().saved_bytes > 0


def test_a_decorated_recursive_function():
    store, x = make("raw"), torch.randn(32, requires_grad=True)

    def power(tensor, n, again):
        return tensor if n == 0 else tensor * again(tensor.sin(), n - 1, again)

    found = torch.autograd.grad(power(x, 3, store(power)).sum(), x)
    check_same(found, torch.autograd.grad(power(x, 3, power).sum(), x))


def test_other_hooks_inside_win_and_outside_rest():
    store, x, seen = make("raw"), torch.randn(32, requires_grad=True), []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda t: t), store:
        y = x.exp()
        assert seen == []
        with saved_tensors_hooks(pack, lambda t: t):
            z = y.exp()
        assert len(seen) == 1
    assert store.report().saved_bytes == x.nbytes
    w = z.exp()
    check_same(torch.autograd.grad(w.sum(), x), torch.autograd.grad(x.exp().exp().exp().sum(), x))


@pytest.mark.parametrize("policy", ["raw", "blocks.* : recompute(raw)"])
def test_disabled_hooks_are_an_error_that_leaves_no_state(policy):
    model, batch = build("mlp")
    store = ActivationStore(model, policy, min_bytes=0)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("none here"),
        pytest.raises(RuntimeError, match="none here"),
        store,
    ):
        pass
    assert "forward" not in model.blocks[0].__dict__
    check_same(train_step(model, batch, store), train_step(model, batch))
    store.close()


def test_leaving_in_the_wrong_order():
    first, second = make("raw"), make("raw")
    x = torch.randn(4, requires_grad=True)
    first.__enter__()
    second.__enter__()
    with pytest.raises(StateError, match=r"not the innermost.*reverse order") as info:
        first.__exit__(None, None, None)
    assert info.value.expected is second
    second.__exit__(None, None, None)
    with second:
        y = x.exp()
    assert (first.report().saved_bytes, second.report().saved_bytes) == (0, x.nbytes)
    with first, second:
        pass
    with pytest.raises(StateError, match="has seen no tensor"):
        first.__exit__(None, None, None)
    with first:
        pass
    del y


def test_leaving_without_entering():
    with pytest.raises(StateError, match="not the innermost"):
        make("raw").__exit__(None, None, None)


def test_leaving_while_hooks_of_others_are_active():
    store, hooks = make("raw"), saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
    store.__enter__()
    hooks.__enter__()
    with pytest.raises(StateError, match="other saved-tensor hooks were entered inside"):
        store.__exit__(None, None, None)
    hooks.__exit__()
    store.__exit__(None, None, None)


def test_leaving_on_another_thread():
    store = make("raw")
    store.__enter__()
    with ThreadPoolExecutor(1) as executor, pytest.raises(StateError, match="each on the thread that entered it"):
        executor.submit(store.__exit__, None, None, None).result()
    store.__exit__(None, None, None)


# -- threads ----------------------------------------------------------------------------------------------------------

N_THREADS = 4


def on_threads(work):
    """Run `work(i)` on several threads at once; raises what any of them raised."""
    start = threading.Barrier(N_THREADS)

    def run(i):
        start.wait(120)
        return work(i)

    with ThreadPoolExecutor(N_THREADS) as executor:
        return list(executor.map(run, range(N_THREADS)))


@pytest.mark.parametrize("policy", [*POLICIES, "raw @ host > disk"])
def test_several_threads_on_one_store(policy):
    store = make(policy, tiers=[Host(1000)])
    inputs = [torch.randn(64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(N_THREADS)]

    def work(i):
        for scale in range(1, 15):
            with store:
                loss = program(inputs[i], scale)
            check_same(torch.autograd.grad(loss, inputs[i]), plain(inputs[i], scale))

    on_threads(work)
    check_drained(store)


@pytest.mark.parametrize("decision", LOSSLESS)
def test_several_threads_on_one_model(decision):
    model, _ = build("mlp")
    store = ActivationStore(model, policy_of("mlp", decision), min_bytes=0)
    batches = [torch.randn(5, 16, generator=torch.Generator().manual_seed(i)) for i in range(N_THREADS)]
    parameters = list(model.parameters())

    def work(i):
        for _ in range(5):
            with store:
                loss = model(batches[i]).square().mean()
            found = torch.autograd.grad(loss, parameters)
            check_same(found, torch.autograd.grad(model(batches[i]).square().mean(), parameters))

    on_threads(work)
    check_drained(store)
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_a_thread_that_has_not_entered_is_not_stored():
    store, x = make("raw"), torch.randn(32, requires_grad=True)
    with store, ThreadPoolExecutor(1) as executor:
        y = executor.submit(x.exp).result()
        assert store.report().saved_bytes == 0
    check_same(torch.autograd.grad(y.sum(), x), (y.detach(),))


@pytest.mark.parametrize("policy", POLICIES)
def test_forward_here_and_backward_there(policy):
    store = make(policy)
    inputs = [torch.randn(32, requires_grad=True) for _ in range(N_THREADS)]
    with store:
        losses = [program(x, 2) for x in inputs]
    grads = on_threads(lambda i: torch.autograd.grad(losses[i], inputs[i]))
    for x, found in zip(inputs, grads, strict=True):
        check_same(found, plain(x, 2))


@pytest.mark.parametrize("policy", POLICIES)
def test_several_backwards_of_one_graph_at_once(policy):
    store, x = make(policy), torch.randn(6, 8, requires_grad=True)
    with store:
        parts = (x * 1).chunk(4, 1)
        loss = sum((part * part.t().mT).sum() for part in parts)
    wanted = torch.autograd.grad(loss, x, retain_graph=True)
    for found in on_threads(lambda _: [torch.autograd.grad(loss, x, retain_graph=True) for _ in range(20)]):
        for grads in found:
            check_same(grads, wanted)


def test_threads_that_share_a_constant():
    """A store looks at the version of what other threads save too; it must not move it, not even for a moment."""
    interval = sys.getswitchinterval()
    store, constant = make("raw"), torch.randn(8)

    def work(i):
        x = torch.randn(8, requires_grad=True)
        for _ in range(800):
            with store if i % 2 else nullcontext():
                y = x * constant * constant * constant
            y.sum().backward()

    sys.setswitchinterval(1e-6)
    try:
        on_threads(work)
        on_threads(lambda i: work(1))
    finally:
        sys.setswitchinterval(interval)
    check_drained(store)


def test_the_close_of_a_store_that_another_thread_uses_is_refused():
    store, entered, done = make("raw"), threading.Event(), threading.Event()

    def work():
        with store:
            entered.set()
            assert done.wait(120)

    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(work)
        assert entered.wait(120)
        with pytest.raises(StateError):
            store.close()
        done.set()
        future.result()
    store.close()
