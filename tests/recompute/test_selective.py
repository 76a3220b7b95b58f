"""Selective checkpoints of the model's own, inside a store and inside recomputed modules: the store leaves them."""

import functools
import inspect
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from actstore import ActivationStore
from tests.autograd.checks import check_drained, check_same, gc_off, train_step

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default]
RESPECT = "respect_saved_tensors_hooks"  # what a checkpoint itself keeps then goes through the store
HAS_RESPECT = RESPECT in inspect.signature(checkpoint).parameters  # newer than PyTorch 2.13
RESPECTS = pytest.param({RESPECT: True}, marks=pytest.mark.skipif(not HAS_RESPECT, reason=f"no {RESPECT}"))


class Selective(nn.Module):
    def __init__(self, kept, **options):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))
        self.kept, self.options = kept, options

    def _policy(self, _context, operator, *_args, **_kwargs):
        return self.kept if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, self._policy)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts, **self.options)


KEPT = [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE]


@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk", "inner : recompute(raw)"])
@pytest.mark.parametrize("options", [{}, RESPECTS], ids=["", "respect"])
@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name)
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context .* is active around a selective:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
def test_gradients_are_those_without_a_store(kept, options, policy):
    model, batch = Selective(kept, **options), (torch.randn(5, 16),)
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        for _ in range(2):
            check_same(train_step(model, batch, store), train_step(model, batch))
            check_drained(store)
    assert store.report().saved_bytes > 0


BATCH = (torch.randn(6, 16, generator=torch.Generator().manual_seed(3)),)
POLICIES = [
    "keep", "raw @ disk", "blocks.* : int4; * : keep", "derive(raw)", "blocks.*/@aten.addmm : raw @ disk; * : keep",
]  # fmt: skip


class Checkpointed(nn.Module):
    """A model that checkpoints each of its blocks selectively."""

    def __init__(self, *blocks, ops=PRODUCTS, allow=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(blocks or [mlp() for _ in range(2)])
        self.ops, self.allow = ops, allow

    def _contexts(self):
        return create_selective_checkpoint_contexts(self.ops, self.allow)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=self._contexts)
        return x


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))


def forward(model, store, batch=BATCH):
    torch.manual_seed(1)
    with store:
        return model(*batch).square().mean()


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_exact_under_every_policy(policy):
    model = Checkpointed()
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        for inside in (False, True):
            check_same(train_step(model, BATCH, store, inside=inside), train_step(model, BATCH))
            check_drained(store)


def test_the_report_has_only_what_is_saved_outside_of_them_and_its_advice_says_why():
    model = Checkpointed()
    store = ActivationStore(model, "blocks.* : raw @ disk", min_bytes=0)
    for _ in range(2):
        train_step(model, BATCH, store)
    report = store.report()
    assert not [site for site in report.sites if site.site.startswith("blocks")]
    assert report.stored_bytes == 0
    assert any("saw nothing" in line and "checkpoint of the model's own" in line for line in report.advice)


def test_rules_for_operators_save_the_same_results_and_store_them():
    model = Checkpointed()
    wanted = train_step(model, BATCH)

    def plain(x):
        for block in model.blocks:
            x = x + block(x)
        return x

    model.forward = plain
    store = ActivationStore(model, "blocks.*/@aten.addmm : raw @ disk; blocks.* : recompute", min_bytes=0)
    check_same(train_step(model, BATCH, store), wanted)
    stored = [site.stored_bytes for site in store.report().sites if site.decision == "raw @ disk"]
    assert sum(stored) == 2 * 6 * (32 + 16) * 4


def attention():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = (part[None, None] for part in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v)[0, 0]

    return Attention()


@pytest.mark.parametrize("policy", ["raw @ disk", "int8 @ disk"])
def test_results_of_several_tensors(policy):
    kept = [aten._scaled_dot_product_flash_attention_for_cpu.default, aten.native_dropout.default]
    model = Checkpointed(attention(), mlp(), ops=kept)
    store = ActivationStore(model, f"blocks : {policy}; * : keep", min_bytes=0)
    check_same(train_step(model, BATCH, store), train_step(model, BATCH))


@pytest.mark.parametrize("policy", ["keep", "raw @ disk"])
def test_a_second_backward_is_refused_as_without_a_store(policy):
    model = Checkpointed()
    store = ActivationStore(model, policy, min_bytes=0)
    errors = []
    with gc_off():
        for context in (nullcontext(), store):
            loss = forward(model, context)
            loss.backward(retain_graph=True)
            with pytest.raises(RuntimeError) as caught:
                loss.backward()
            errors.append((caught.type, str(caught.value)))
            del caught, loss
        torch.zeros((), requires_grad=True).backward()  # before, PyTorch's queue has nodes of the backward that failed
        check_drained(store)
    assert errors[0] == errors[1]


@pytest.mark.parametrize("policy", ["keep", "raw @ disk"])
def test_several_graphs_wait_side_by_side(policy):
    model = Checkpointed()
    store = ActivationStore(model, policy, min_bytes=0)
    wanted = [train_step(model, (BATCH[0] * k,), seed=1).grads for k in (1, 2)]
    losses = [forward(model, store, (BATCH[0] * k,)) for k in (1, 2)]
    for loss, grads in zip(reversed(losses), reversed(wanted), strict=True):
        model.zero_grad()
        loss.backward()
        check_same({name: p.grad for name, p in model.named_parameters()}, grads)


@pytest.mark.parametrize("policy", ["keep", "raw @ disk"])
def test_a_dropped_graph_and_a_failed_forward_leave_nothing(policy):
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("stop here")

    block = mlp()
    model = Checkpointed(block, nn.Sequential(block, Failing()))
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off(), pytest.raises(ValueError, match="stop here"):
        forward(model, store)
    model.blocks = nn.ModuleList([block])
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        loss = forward(model, store)
        assert store.report().live_bytes > 0
        del loss
        check_drained(store)
        check_same(train_step(model, BATCH, store), train_step(model, BATCH))


class Operators(TorchDispatchMode):
    """The operators that a mode around a step sees, without aliases."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is not aten.detach.default:
            self.names.append(str(operator))
        return operator(*args, **kwargs or {})


def test_other_modes_do_not_see_the_store():
    model = Checkpointed(mlp())
    with Operators() as plain:
        train_step(model, BATCH)
    for policy in ("blocks.*.0 : raw; * : keep", "blocks.*.0 : lz4; * : keep"):
        with Operators() as found:
            train_step(model, BATCH, ActivationStore(model, policy, min_bytes=0))
        assert found.names == plain.names


@pytest.mark.parametrize("policy", ["keep", "raw @ disk"])
def test_parts_of_wrappers(policy):
    def wrap():
        torch.manual_seed(0)
        return TwoTensor(torch.randn(16, 16), torch.randn(16, 16)).requires_grad_()

    def step(store=None):
        x, weight = wrap(), wrap()
        with store or nullcontext():
            out = checkpoint(
                lambda x: ((x @ weight).sin() @ weight).cos(),
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(PRODUCTS),
            )
            loss = out.sum()
        loss.backward()
        return [getattr(each.grad, part) for each in (x, weight) for part in ("a", "b")]

    store = ActivationStore(policy=policy, min_bytes=0)
    plain = step()
    with gc_off():
        check_same(step(store), plain)
        check_drained(store)


class Around(nn.Module):
    """A model inside a checkpoint of its own."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False, **self.options)


@pytest.mark.parametrize("policy", ["keep", "raw @ disk"])
@pytest.mark.parametrize(
    "options",
    [{}, {"context_fn": functools.partial(create_selective_checkpoint_contexts, [aten.gelu.default, *PRODUCTS])}],
    ids=["plain", "selective"],
)
def test_checkpoints_in_checkpoints(options, policy):
    model = Around(Checkpointed(), **options)
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        for _ in range(2):
            check_same(train_step(model, BATCH, store), train_step(model, BATCH))
            check_drained(store)


@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
@pytest.mark.parametrize("policy", ["inner : recompute", "inner : recompute(raw @ disk)", "inner.blocks.* : recompute"])
def test_checkpoints_in_recomputed_modules(policy):
    model = nn.Sequential()
    model.inner = Checkpointed()
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        check_same(train_step(model, BATCH, store), train_step(model, BATCH))
        check_drained(store)


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(x).relu_().sin()


@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk"])
def test_a_write_to_a_cached_result(policy):
    model = Checkpointed(Writing())
    with pytest.raises(RuntimeError, match="mutated"):
        train_step(model, BATCH)
    with pytest.raises(RuntimeError, match="Tensor cached during selective activation checkpoint has been mutated"):
        train_step(model, BATCH, ActivationStore(model, policy, min_bytes=0))
    model.allow = True
    check_same(train_step(model, BATCH, ActivationStore(model, policy, min_bytes=0)), train_step(model, BATCH))


@pytest.mark.parametrize("policy", ["keep", "raw @ disk"])
def test_everything_that_an_operator_returns_may_be_cached(policy):
    class All(list):
        def __contains__(self, _):
            return True

    model = Checkpointed(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()), attention(), ops=All(PRODUCTS))
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        check_same(train_step(model, BATCH, store), train_step(model, BATCH))
        check_drained(store)
