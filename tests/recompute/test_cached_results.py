"""What the model's own selective checkpoints cache: counted in reports, and moved by rules."""

import functools
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import checkpoint as torch_checkpoints
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from actstore import ActivationStore
from actstore.autograd import caches
from actstore.base.note import CACHED
from tests.autograd.checks import check_drained, check_same, gc_off, train_step

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default]
BATCH = (torch.randn(6, 16, generator=torch.Generator().manual_seed(3)),)


class Checkpointed(nn.Module):
    """A model that checkpoints each of its blocks selectively, and keeps what these have cached."""

    def __init__(self, *blocks, ops=PRODUCTS, allow=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(blocks or [mlp() for _ in range(2)])
        self.ops, self.allow, self.storages = ops, allow, []

    def _contexts(self):
        contexts = create_selective_checkpoint_contexts(self.ops, self.allow)
        self.storages.append(contexts[0].storage)
        return contexts

    def forward(self, x):
        self.storages = []
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=self._contexts)
        return x

    def cached(self):
        """All objects that hold results."""
        entries = [entry for storage in self.storages for kept in storage.values() for entry in _values(kept)]
        leaves = torch.utils._pytree.tree_leaves(entries)
        return [leaf for leaf in leaves if isinstance(leaf, torch_checkpoints._VersionWrapper)]


def _values(kept):
    return list(kept.values()) if isinstance(kept, dict) else list(kept)


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))


def true_nbytes(model):
    """Bytes of what the model's checkpoints have cached: each storage once."""
    storages = {c.val.untyped_storage()._cdata: c.val.untyped_storage() for c in model.cached() if c.val is not None}
    return sum(storage.nbytes() for storage in storages.values())


def sites(store):
    return [site for site in store.report().sites if CACHED in site.note]


def forward(model, store, batch=BATCH):
    torch.manual_seed(1)
    with store:
        return model(*batch).square().mean()


def test_bytes_are_those_of_the_cached_storages():
    model = Checkpointed()
    store = ActivationStore(model, "keep", min_bytes=0)
    with gc_off():
        loss = forward(model, store)
        expected = true_nbytes(model)
        assert expected == 2 * 4 * 6 * (32 + 16)
        for figure in ("saved_bytes", "held_bytes", "live_bytes"):
            assert sum(getattr(site, figure) for site in sites(store)) == expected
        loss.backward()
        model.storages.clear()
        del loss
        check_drained(store)


def test_sites_are_the_modules_that_computed_the_results():
    model = Checkpointed()
    store = ActivationStore(model, "raw @ disk", min_bytes=0)
    loss = forward(model, store)
    found = sites(store)
    assert sorted(site.site for site in found) == [f"blocks.{i}.{j}[0]" for i in range(2) for j in (0, 3)]
    for site in found:
        assert site.decision == "raw @ disk"
        assert site.saved_bytes == site.stored_bytes == 4 * 6 * (16 if ".3[" in site.site else 32)
    assert all(entry.val is None for entry in model.cached())
    loss.backward()


@pytest.mark.parametrize(
    "policy",
    ["keep", "raw", "raw @ host", "raw @ disk", "derive(raw)", "lz4", "blocks.*/@aten.addmm : raw @ disk; * : keep"],
)
def test_gradients_are_those_without_a_store(policy):
    model = Checkpointed()
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        for inside in (False, True):
            check_same(train_step(model, BATCH, store, inside=inside), train_step(model, BATCH))
            model.storages.clear()
            check_drained(store)
    assert sites(store)


def test_a_rule_moves_what_it_names_alone():
    model = Checkpointed()
    store = ActivationStore(model, "blocks.0 : raw @ disk; * : keep", min_bytes=0)
    loss = forward(model, store)
    moved = [entry.val is None for entry in model.cached()]
    assert moved == [True, True, False, False]
    loss.backward()


class Branching(nn.Module):
    """A block whose recomputation decides by what was cached."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x):
        return self.last(self.norm(F.leaky_relu(self.first(x), 0.1)))


def test_lossy_results_keep_signs_and_gradients_have_a_small_error():
    model = Checkpointed(Branching(), Branching(), ops=[*PRODUCTS, aten.native_layer_norm.default])
    plain = train_step(model, BATCH)
    store = ActivationStore(model, "int8 @ disk", min_bytes=0)
    lossy = train_step(model, BATCH, store)
    for name, wanted in plain.grads.items():
        error = float((lossy.grads[name] - wanted).norm() / wanted.norm())
        assert error < 0.02, (name, error)
    assert not all(torch.equal(lossy.grads[name], wanted) for name, wanted in plain.grads.items())
    notes = {site.site: site.note for site in sites(store)}
    statistics = [note for site, note in notes.items() if "norm" in site and "statistic" in note]
    assert len(statistics) == 4  # mean and rstd of each block are exact


def test_results_that_a_relu_reads_have_their_signs_in_the_recomputation():
    seen = []

    class Relu(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            hidden = self.inner(x)
            seen.append(hidden.detach().clone())
            return hidden.relu()

    model = Checkpointed(Relu())
    batch = (torch.randn(64, 16) * torch.logspace(-6, 3, 64).unsqueeze(1),)
    train_step(model, batch, ActivationStore(model, "int4", min_bytes=0))
    first, again = seen
    assert not first.equal(again)
    assert first.sign().equal(again.sign())


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
    plain, found = train_step(model, BATCH), train_step(model, BATCH, ActivationStore(model, policy, min_bytes=0))
    errors = [float((found.grads[name] - wanted).norm() / wanted.norm()) for name, wanted in plain.grads.items()]
    assert 0 < max(errors) < 0.05 if "int8" in policy else max(errors) == 0


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
        model.storages.clear()
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
    with gc_off():
        with pytest.raises(ValueError, match="stop here"):
            forward(model, store)
        model.storages.clear()
    model.blocks = nn.ModuleList([block])
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        loss = forward(model, store)
        assert store.report().live_bytes > 0
        del loss
        model.storages.clear()
        check_drained(store)
        check_same(train_step(model, BATCH, store), train_step(model, BATCH))


class Twice(nn.Module):
    """Both layers have outputs of one shape; without a checkpoint the second one saves the first one's."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(16, 16), nn.Linear(16, 16), []

    def forward(self, x):
        hidden = self.second(self.first(x))
        self.seen.append(hidden.detach().clone())
        return hidden.relu()


def test_a_result_does_not_follow_a_tensor_that_was_saved_without_a_checkpoint():
    block = Twice()
    model = Checkpointed(block)
    batch = (torch.randn(64, 16) * torch.logspace(-6, 3, 64).unsqueeze(1),)
    checkpointed = model.forward
    store = ActivationStore(model, "int4", min_bytes=0)
    model.forward = block.forward
    train_step(model, batch, store)
    model.forward = checkpointed
    block.seen.clear()
    train_step(model, batch, store)
    first, again = block.seen
    assert not first.equal(again)
    assert first.sign().equal(again.sign())


def test_results_outside_of_the_model_are_exact():
    model = Checkpointed(mlp())
    weight = torch.randn(16, 16, requires_grad=True)

    def step(store=None):
        torch.manual_seed(1)
        with store or nullcontext():
            out = model(*BATCH).detach().requires_grad_()
            loss = checkpoint(lambda x: (x @ weight).sin(), out, use_reentrant=False, context_fn=model._contexts).sum()
        return torch.autograd.grad(loss, [weight, out])

    store = ActivationStore(model, "int8 @ disk", min_bytes=0)
    check_same(step(store), step())
    assert any("part of the loss" in site.note for site in sites(store))


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
            train_step(model, BATCH, store := ActivationStore(model, policy, min_bytes=0))
        assert sites(store)[0].stored_bytes
        assert found.names == plain.names


def test_advice_tells_of_results_that_a_rule_keeps():
    model = Checkpointed()
    store = ActivationStore(model, "blocks.0.1 : raw @ disk; * : keep", min_bytes=0)
    train_step(model, BATCH, store)
    train_step(model, BATCH, store)
    assert any("(100 % of the saved bytes) were kept by the rule `* : keep`" in line for line in store.report().advice)
    model.storages.clear()


@pytest.mark.parametrize("policy", ["keep", "raw @ disk"])
def test_parts_of_wrappers(policy):
    def wrap():
        torch.manual_seed(0)
        return TwoTensor(torch.randn(16, 16), torch.randn(16, 16)).requires_grad_()

    def step(store=None):
        x, weight, held = wrap(), wrap(), []
        with store or nullcontext():
            out = checkpoint(
                lambda x: ((x @ weight).sin() @ weight).cos(),
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(PRODUCTS),
            )
            loss = out.sum()
        if store is not None:
            held += [site.saved_bytes for site in sites(store)]
        loss.backward()
        return [getattr(each.grad, part) for each in (x, weight) for part in ("a", "b")], held

    store = ActivationStore(policy=policy, min_bytes=0)
    plain, _ = step()
    with gc_off():
        found, held = step(store)
        check_same(found, plain)
        assert held == [16 * 16 * 4] * 4  # two products of two parts
        check_drained(store)


def test_a_sampled_step_says_that_their_effect_is_not_predicted():
    model = Checkpointed()
    store = ActivationStore(model, "int8", min_bytes=0)
    store.sample_next()
    train_step(model, BATCH, store)
    assert all(site.error is not None and site.error.measured for site in sites(store))
    assert CACHED in str(store.report().gradients)
    model.storages.clear()


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
            model.inner.storages.clear()
            check_drained(store)
        with store:
            loss = model(*BATCH).square().mean()
            before = [(site.site, site.tensors, site.saved_bytes) for site in sites(store)]
            loss.backward()  # runs the inner checkpoints once more, for a moment
        assert [(site.site, site.tensors, site.saved_bytes) for site in sites(store)] == before
        model.inner.storages.clear()


@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
@pytest.mark.parametrize("policy", ["inner : recompute", "inner : recompute(raw @ disk)", "inner.blocks.* : recompute"])
def test_checkpoints_in_recomputed_modules(policy):
    model = nn.Sequential()
    model.inner = Checkpointed()
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        check_same(train_step(model, BATCH, store), train_step(model, BATCH))
        model.inner.storages.clear()
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
        model.storages.clear()
        check_drained(store)


def test_a_form_that_is_unknown_is_told_and_not_counted(monkeypatch):
    monkeypatch.setattr(caches, "_KNOWN", False)
    model = Checkpointed(mlp())
    store = ActivationStore(model, "raw @ disk", min_bytes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        check_same(train_step(model, BATCH, store), train_step(model, BATCH))
    with pytest.warns(RuntimeWarning, match="reports do not count it"):
        train_step(model, BATCH, store)
    assert not sites(store)


def test_without_a_store_nothing_changes():
    model = Checkpointed()
    plain = train_step(model, BATCH)
    store = ActivationStore(model, "raw @ disk", min_bytes=0)
    train_step(model, BATCH, store)
    check_same(train_step(model, BATCH), plain)
    assert caches.current() is None
    assert not any(hasattr(entry, "actstore_handle") for entry in model.cached())
