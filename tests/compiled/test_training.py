"""Training of compiled models under policies: gradients, figures, and what surrounds a compiled region."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actstore import ActivationStore, SampleErrors
from actstore.errors import ConfigError
from tests.autograd.checks import check_drained, check_same
from tests.compiled.models import (
    AttentionNet,
    Convolutions,
    GeluBlock,
    Mlp,
    ReluNet,
    WideMlp,
    compiled,
    error,
    gradients,
    make,
    plain,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself
KINDS = [Mlp, ReluNet, AttentionNet, Convolutions]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["keep", "derive", "raw"])
def test_exact_policies_are_plain_compiled_bit_for_bit(kind: type[nn.Module], policy: str) -> None:
    model, x, store = compiled(kind, policy)
    for _ in range(2):
        check_same(gradients(model, x, store), plain_grads := plain(kind))
    assert plain_grads
    report = store.report()
    assert report.held_bytes == report.saved_bytes > 0
    assert (report.stored_bytes == 0) == (policy != "raw")  # raw: of the batch, which the hooks around the region store
    check_drained(store)


@pytest.mark.parametrize("kind", KINDS)
def test_int8_holds_little_and_errs_as_eager_does(kind: type[nn.Module]) -> None:
    wanted = plain(kind)
    model, x, store = compiled(kind, "int8")
    for _ in range(2):
        found = gradients(model, x, store)
        check_drained(store)
    report = store.report()
    eager, x = make(kind)
    eager_store = ActivationStore(eager, "int8", min_bytes=0)
    eager_error = error(gradients(eager, x, eager_store), wanted)
    assert 0 < error(found, wanted) < max(1.5 * eager_error, 0.01)
    assert 0 < report.stored_bytes < report.saved_bytes
    assert report.held_bytes < 0.5 * report.saved_bytes
    assert report.held_bytes == sum(site.held_bytes for site in report.sites)


def test_rules_reach_modules_inside_a_whole_compiled_model() -> None:
    model, x, store = compiled(Mlp, "blocks.0 : int8; blocks.1 : int4; * : keep")
    gradients(model, x, store)
    stored = {site.site.partition("[")[0]: site.decision for site in store.report().sites if site.stored_bytes}
    assert {name: decision for name, decision in stored.items() if name.startswith("blocks.0")}
    assert {decision for name, decision in stored.items() if name.startswith("blocks.0")} == {"int8"}
    assert {decision for name, decision in stored.items() if name.startswith("blocks.1")} == {"int4"}
    assert all(name.startswith(("blocks.0", "blocks.1")) for name in stored)
    kept = {site.site.partition("[")[0] for site in store.report().sites if site.decision == "keep"}
    assert any(name.startswith("blocks.2") for name in kept)


def test_sites_are_those_of_the_modules_that_read() -> None:
    model, x, store = compiled(Mlp, "int8")
    gradients(model, x, store)
    names = {site.site.partition("[")[0] for site in store.report().sites if site.stored_bytes}
    assert {"blocks.1.norm", "blocks.2.norm"} <= names
    assert names <= {name for name, _ in model.named_modules()}


def test_blocks_that_are_compiled_one_by_one_have_their_names_and_rules() -> None:
    model, x = make(Mlp)
    wanted = gradients(model, x)
    store = ActivationStore(model, "blocks.0 : int8; blocks.1 : keep; * : int4", min_bytes=0)
    for block in model.blocks:
        store.compile(block, backend="aot_eager")
    found = gradients(model, x, store)
    assert 0 < error(found, wanted) < 0.1
    sites = store.report().sites
    for name, decision in [("blocks.0", "int8"), ("blocks.1", "keep"), ("blocks.2", "int4")]:
        assert {site.decision for site in sites if site.site.startswith(name)} - {""} == {decision}  # "": small ones
        assert any(site.stored_bytes for site in sites if site.site.startswith(name)) == (decision != "keep")
    check_drained(store)


def saved_tensors(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What autograd saves for a step outside of a store: the payloads of the compiled regions as they are."""
    found: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return found


class DeadUnits(nn.Module):
    """One value behind each ReLU is far below the step of its group: it must not fall to zero, nor rise from it."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))
        self.norm = nn.BatchNorm1d(256, affine=False) if norm else nn.Identity()
        self.head = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(x * self.scale)))


@pytest.mark.parametrize("norm", [False, True])
def test_no_decision_of_relu_flips(norm: bool) -> None:
    torch.manual_seed(0)
    model, x = DeadUnits(norm), torch.randn(64, 256)
    x[:, ::2] *= 1e-4
    x.requires_grad_()

    def input_gradient(store: ActivationStore | None) -> Tensor:
        x.grad = None
        if store is None:
            model(x).square().sum().backward()
        else:
            with store:
                loss = model(x).square().sum()
            loss.backward()
        assert x.grad is not None
        return x.grad.clone()

    wanted = input_gradient(None)
    store = ActivationStore(model, "int8", min_bytes=0)
    store.compile(backend="aot_eager")
    found = input_gradient(store)
    assert store.report().stored_bytes > 0
    if not norm:
        assert torch.equal(found == 0, wanted == 0)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


def test_softmax_statistics_and_the_loss_stay_exact() -> None:
    model, x, store = compiled(AttentionNet, "int8")
    gradients(model, x, store)
    notes = {site.note for site in store.report().sites if site.note}
    assert any("softmax" in note for note in notes)
    assert all(site.stored_bytes == 0 for site in store.report().sites if "softmax" in site.note)
    found = saved_tensors(model, x)
    assert any(tensor.dtype == torch.int8 for tensor in found)


def test_a_function_with_the_loss_keeps_what_is_outside_of_the_model() -> None:
    model, x = make(Mlp)
    store = ActivationStore(model, "int8", min_bytes=0)

    def step(x: Tensor) -> Tensor:
        wrong = model(x) - x[:, :4]
        return (wrong * wrong * wrong).exp().mean()

    call = torch.compile(step, backend=store.backend("aot_eager"))
    with store:
        loss = call(x)
    loss.backward()
    notes = {site.note for site in store.report().sites if not site.stored_bytes}
    assert "kept: saved outside of the model: part of the loss" in notes
    assert any(site.site.startswith("blocks.1.") and site.stored_bytes for site in store.report().sites)


@pytest.mark.parametrize("policy", ["expack @ disk", "expack", "int8(axis=token)"])
def test_what_graphs_cannot_do_is_kept_with_its_reason(policy: str) -> None:
    model, x, store = compiled(Mlp, policy)
    check_same(gradients(model, x, store), plain(Mlp))
    notes = {site.note for site in store.report().sites if site.site.startswith("blocks.1")}
    assert len(notes) == 1
    assert "inside of compiled graphs" in notes.pop()


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def test_small_tensors_and_outputs_are_kept() -> None:
    model, x = make(Mlp)
    store = ActivationStore(model, "int8", min_bytes="1MiB")
    store.compile(backend="aot_eager")
    check_same(gradients(model, x, store), plain(Mlp))
    assert store.report().stored_bytes == 0
    assert {site.note for site in store.report().sites if site.site.startswith("blocks")} == {"small"}
    last = Last()
    store = ActivationStore(last, "int8", min_bytes=0)
    store.compile(backend="aot_eager")
    with store:
        last(torch.randn(8, 64)).sum().backward()
    assert any("an output of the compiled region" in site.note for site in store.report().sites)


def test_backward_runs_twice_and_two_forwards_before_one_backward() -> None:
    model, x, store = compiled(Mlp)
    wanted = gradients(model, x, store)
    model.zero_grad()
    with store:
        first, second = model(x).square().mean(), model(x).square().mean()
    first.backward(retain_graph=True)
    check_same({name: p.grad.clone() for name, p in model.named_parameters()}, wanted)
    model.zero_grad()
    first.backward()
    check_same({name: p.grad.clone() for name, p in model.named_parameters()}, wanted)
    model.zero_grad()
    second.backward()
    check_same({name: p.grad.clone() for name, p in model.named_parameters()}, wanted)
    del first, second
    check_drained(store)


@pytest.mark.parametrize(
    ("build", "inside"),
    [
        (lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), {"1", "2"}),
        (lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), {"linear2", "norm1"}),
    ],
)
def test_modules_of_pytorch_alone_are_compiled(build: Any, inside: set[str]) -> None:
    """PyTorch compiles nothing of them by itself: no code of a user calls them."""
    torch.manual_seed(0)
    model, x = build(), torch.randn(4, 32, 64)
    wanted = gradients(model, x)
    store = ActivationStore(model, "int8", min_bytes=0, observe=[SampleErrors(every=0)])
    store.compile(backend="aot_eager", fullgraph=True)
    assert 0 < error(gradients(model, x, store), wanted) < 0.02
    check_drained(store)
    assert inside <= {site.site.partition("[")[0] for site in store.report().sites if site.stored_bytes}


def test_outside_of_the_store_the_graphs_are_the_same() -> None:
    model, x, store = compiled(Mlp)
    inside = gradients(model, x, store)
    before = store.report().saved_bytes
    check_same(gradients(model, x), inside)
    assert store.report().saved_bytes == before
    with torch.no_grad(), store:
        model(x)
    assert store.report().saved_bytes == before  # an evaluation keeps the report


def test_dropout() -> None:
    wanted = plain(AttentionNet, 0.3)
    model, x, store = compiled(AttentionNet, "int8", 0.3)
    assert 0 < error(gradients(model, x, store), wanted) < 0.03


@pytest.mark.parametrize("policy", ["int8", "unprotected int8"])
def test_autocast_holds_and_errs_as_eager_does(policy: str) -> None:
    """Casts of weights are kept."""
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        wanted = plain(WideMlp)
        model, x, store = compiled(WideMlp, policy)
        found = gradients(model, x, store)
        eager, x = make(WideMlp)
        eager_store = ActivationStore(eager, policy, min_bytes=0)
        eager_error = error(gradients(eager, x, eager_store), wanted)
    assert 0 < error(found, wanted) < 1.1 * eager_error < 0.03
    report = store.report()
    assert report.held_bytes == eager_store.report().held_bytes < 0.55 * report.saved_bytes
    kept = [site for site in report.sites if site.note == "kept: a view or a cast of a parameter"]
    layers = [layer for block in model.blocks for layer in (block.up, block.down)] + [model.head]
    assert sum(site.saved_bytes for site in kept) == sum(2 * layer.weight.numel() for layer in layers)


def test_a_batch_of_another_size_has_its_own_figures() -> None:
    model, x, store = compiled(Mlp, dynamic=True)
    for size in (32, 48, 16):
        found = gradients(model, x[:1].expand(size, -1).contiguous(), store)
        assert all(grad.isfinite().all() for grad in found.values())
        report = store.report()
        assert report.stored_bytes > 0
        if size == 32:
            first = report.stored_bytes / size
        assert report.stored_bytes / size == pytest.approx(first, rel=0.05)
        check_drained(store)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GeluBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[1](x)


def test_graph_breaks() -> None:
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(32, 64)
    wanted = gradients(model, x)
    store = ActivationStore(model, "blocks.0 : int8; * : keep", min_bytes=0)
    store.compile(backend="aot_eager")
    for _ in range(2):
        assert 0 < error(gradients(model, x, store), wanted) < 0.02
        check_drained(store)
    stored = {site.site[:8] for site in store.report().sites if site.stored_bytes}
    assert stored == {"blocks.0"}


def test_an_exception_in_forward_leaves_nothing() -> None:
    model, x, store = compiled(Mlp)
    gradients(model, x, store)

    def fail() -> None:
        with store:
            model(x).sum().to("nowhere")

    with pytest.raises(RuntimeError, match="nowhere"):
        fail()
    gc.collect()
    check_drained(store)
    check_same(gradients(model, x, store), gradients(model, x, store))


def test_hooks_of_others_see_the_payloads() -> None:
    model, x, store = compiled(Mlp)
    gradients(model, x, store)
    with store:
        found = saved_tensors(model, x)
    assert any(tensor.dtype == torch.int8 for tensor in found)


def test_a_policy_that_is_a_function() -> None:
    from actstore.codecs import Int8
    from actstore.policy import Encode, Keep

    asked = []

    def policy(site: Any, spec: Any) -> Any:
        asked.append((site.name, spec.shape))
        return Encode(Int8()) if site.name.startswith("blocks.1") else Keep()

    model, x, store = compiled(Mlp, policy)
    gradients(model, x, store)
    assert {site.site[:8] for site in store.report().sites if site.stored_bytes} == {"blocks.1"}
    assert all(shape and all(type(size) is int for size in shape) for _, shape in asked)


def test_what_cannot_be_compiled_says_so() -> None:
    model, _ = make(Mlp)
    with pytest.raises(ConfigError, match="does not choose for compiled graphs"):
        ActivationStore(model, "bits(0.1)").compile()
    with pytest.raises(ConfigError, match="is not a part of the store's model, Mlp"):
        ActivationStore(model, "int8").compile(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="the store has no model"):
        ActivationStore(policy="int8").compile()
    with pytest.raises(ConfigError, match="mode='x': is for 'inductor', and backend='aot_eager'"):
        ActivationStore(model, "int8").compile(backend="aot_eager", mode="x")
    with pytest.raises(ConfigError, match="backend='nothing': must be 'inductor'"):
        ActivationStore(model, "int8").backend("nothing")


def test_an_unknown_compiler_gives_plain_graphs_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from actstore.compiled import backend

    monkeypatch.setattr(backend, "why_unsupported", lambda: "PyTorch 9 is unknown")
    model, x, store = compiled(Mlp)
    with pytest.warns(RuntimeWarning, match="compiled without the store's policy: PyTorch 9 is unknown"):
        found = gradients(model, x, store)
    check_same(found, plain(Mlp))
    assert store.report().saved_bytes > 0
