"""Tiers inside of compiled graphs: gradients, books, errors, and that nothing is left."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actstore import ActivationStore, Disk, SampleErrors, Verify
from actstore.compiled import tokens
from actstore.errors import CapacityError, StateError, TransferError
from actstore.transfer.parcel import ParcelState
from tests.autograd.checks import check_drained, check_same, gc_off, settle
from tests.compiled.models import (
    AttentionNet,
    Convolutions,
    Mlp,
    ReluNet,
    compiled,
    error,
    gradients,
    make,
    plain,
)
from tests.tiers.wrappers import Faulty

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself
KINDS = [Mlp, ReluNet, AttentionNet, Convolutions]
BIG_WIDTH = 512  # a payload of 2 MiB travels alone, and is lent


def books(store: ActivationStore) -> list[tuple[str, int, int]]:
    """Saved and stored bytes of the sites inside of the model; hooks around the region store its inputs."""
    sites = [site for site in store.report().sites if not site.site.startswith("(top)")]
    return sorted((site.site, site.saved_bytes, site.stored_bytes) for site in sites)


def land(store: ActivationStore) -> None:
    """Wait until all that leaves for a tier has arrived there."""
    for place in store._store._places.values():
        for window in place.engine._traffic.quota.windows.values():
            for parcel in list(window.flights):
                assert parcel.motion is not None
                parcel.motion.result()
        settle(place.engine)


def check_raw(kind: type[nn.Module], policy: str) -> None:
    wanted = plain(kind)
    model, x, store = compiled(kind, policy)
    with gc_off():
        for _ in range(2):
            check_same(gradients(model, x, store), wanted)
            check_drained(store)
    report = store.report()
    inside = [site for site in report.sites if site.stored_bytes and not site.site.startswith("(top)")]
    assert len(inside) > 1
    assert {site.decision for site in inside} == {policy}
    assert {site.note for site in inside} == {""}
    assert report.stored_bytes <= report.saved_bytes  # bools become bits
    store.close()


@pytest.mark.parametrize(("kind", "policy"), [(AttentionNet, "raw @ disk"), (ReluNet, "raw @ host > disk")])
def test_raw_is_plain_compiled_bit_for_bit(kind: type[nn.Module], policy: str) -> None:
    check_raw(kind, policy)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["raw @ disk", "raw @ host", "raw @ host > disk", "derive(raw @ disk)"])
def test_more_models_and_ladders(kind: type[nn.Module], policy: str) -> None:
    check_raw(kind, policy)


def test_a_graph_stores_the_bytes_that_it_saved_and_holds_none_of_them() -> None:
    model, x, store = compiled(Mlp, "raw @ disk")
    with store:
        loss = model(x).square().mean()
    land(store)
    report, kept = store.report(), 0
    for site in report.sites:
        assert site.live_bytes == (site.stored_bytes or site.saved_bytes)
        kept += 0 if site.stored_bytes else site.saved_bytes
    assert store._store.ledger.held == kept < 0.1 * report.saved_bytes
    assert {medium.tier for medium in report.media} == {"disk"}
    names = {site.site.partition("[")[0] for site in report.sites if site.stored_bytes}
    assert {"blocks.1.norm", "blocks.2.norm"} <= names <= {"(top)", *(name for name, _ in model.named_modules())}
    loss.backward()
    del loss
    check_drained(store)


@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        (Convolutions, "disk"),
        *(pytest.param(kind, tier, marks=pytest.mark.slow) for kind in KINDS for tier in ("disk", "host")),
    ],
)
def test_int8_is_that_of_graphs_without_tiers(kind: type[nn.Module], tier: str) -> None:
    model, x, store = compiled(kind, "int8")
    wanted = gradients(model, x, store)
    sizes = books(store)
    torch._dynamo.reset()
    model, x, store = compiled(kind, f"int8 @ {tier}")
    found = gradients(model, x, store)
    assert error(found, wanted) < 1e-6  # only the batch, which eager's hooks encode
    assert books(store) == sizes
    check_drained(store)


def test_rules_choose_tiers_for_modules_inside_of_a_whole_model() -> None:
    model, x, store = compiled(Mlp, "blocks.0 : raw @ disk; blocks.1 : int8 @ disk; blocks.2 : int8; * : keep")
    gradients(model, x, store)
    stored = {site.site[:8]: site.decision for site in store.report().sites if site.stored_bytes}
    assert stored == {"blocks.0": "raw @ disk", "blocks.1": "int8 @ disk", "blocks.2": "int8"}
    check_drained(store)


def test_blocks_with_one_code_have_their_own_sites() -> None:
    model, x = make(Mlp)
    wanted = gradients(model, x)
    store = ActivationStore(model, "raw @ disk", min_bytes=0)
    for block in model.blocks:
        store.compile(block, backend="aot_eager")
    check_same(gradients(model, x, store), wanted)
    assert {site.site[:8] for site in store.report().sites if site.stored_bytes} >= {f"blocks.{i}" for i in range(3)}
    check_drained(store)


def test_sizes_that_change_from_run_to_run() -> None:
    model, x, store = compiled(Mlp, "raw @ disk", dynamic=True)
    for size in (32, 48, 16):
        batch = x[:1].expand(size, -1).contiguous()
        found = gradients(model, batch, store)
        report = store.report()
        stored = [site for site in report.sites if site.stored_bytes]
        assert [site.saved_bytes for site in stored] == [site.stored_bytes for site in stored]
        check_drained(store)
        eager, _ = make(Mlp)
        assert error(found, gradients(eager, batch)) < 1e-6


class Wide(nn.Module):
    """Backward reads large tensors: one twice, one whose memory a compiler may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, BIG_WIDTH), nn.Linear(BIG_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(torch.tanh(self.first(x)))
        return self.second(torch.exp(-x) * x)


def wide(policy: str, backend: str = "aot_eager") -> tuple[nn.Module, Tensor, ActivationStore]:
    torch.manual_seed(0)
    model = Wide()
    store = ActivationStore(model, policy, observe=[SampleErrors(every=0)])
    store.compile(backend=backend)
    return model, torch.randn(1024, 16), store


def check_large_payloads(backend: str) -> None:
    torch.manual_seed(0)
    reference = Wide()
    reference.compile(backend=backend)
    model, x, store = wide("raw @ disk", backend)
    wanted = gradients(reference, x)
    for _ in range(3):
        check_same(gradients(model, x, store), wanted)
        check_drained(store)
    with store:
        loss = model(x).square().mean()
    for _ in range(3):
        model.zero_grad()
        loss.backward(retain_graph=True)
        check_same({name: p.grad for name, p in model.named_parameters()}, wanted)
    assert any(site.stored_bytes >= 2 * 2**20 for site in store.report().sites)
    del loss
    check_drained(store)


def test_large_payloads_again_and_again() -> None:
    check_large_payloads("aot_eager")


@pytest.mark.slow
def test_large_payloads_under_inductor() -> None:
    check_large_payloads("inductor")


def saved_tokens(model: nn.Module, x: Tensor, store: ActivationStore) -> tuple[Tensor, list[Tensor]]:
    """The loss of a forward, and the tokens that its graph saves."""
    found: list[Tensor] = []
    made = tokens.token_of

    def watch(*args: Any) -> Tensor:
        found.append(made(*args))
        return found[-1]

    tokens.token_of = watch
    try:
        with store:
            loss = model(x).square().mean()
    finally:
        tokens.token_of = made
    return loss, found


def test_a_write_without_a_trace_to_what_was_read_changes_no_later_read() -> None:
    model, x, store = wide("raw @ disk")
    loss, found = saved_tokens(model, x, store)
    land(store)
    lent = 0
    for token in found:
        first = tokens.read(token, x.device)
        wanted = first.clone()
        lent += first.data_ptr() == first.untyped_storage().data_ptr() and first.nbytes >= 2**20
        first.data.fill_(-1)  # as compiled code writes: no version counter tells
        check_same(tokens.read(token, x.device), wanted)
    assert lent
    del loss, found, token, first
    check_drained(store)


def test_a_payload_without_a_store_is_a_copy_and_so_is_each_read() -> None:
    x = torch.randn(4, 8)
    wanted = x.clone()
    token = tokens.put(x, "raw @ disk", "", 0, 1)
    assert (token.numel(), token.shape, token.dtype) == (0, (0, 0, 0, 0, 0, 4, 8), x.dtype)
    x.zero_()
    for _ in range(2):
        found = tokens.read(token.detach(), x.device)
        check_same(found, wanted)
        found.zero_()
    del token
    assert not tokens._memories


def test_backward_begins_with_a_fetch_and_the_order_of_a_first_backward_is_foreseen() -> None:
    model, x, store = wide("raw @ disk")
    loss, found = saved_tokens(model, x, store)
    land(store)
    berths = [tokens.payload_of(token).room for token in found]
    assert {berth.parcel.state for berth in berths} == {ParcelState.RESIDENT}
    tokens.fetch_ahead(found[0])
    fetched = [berth.parcel.state is not ParcelState.RESIDENT for berth in berths]
    assert fetched[-1]  # what was saved last comes first
    del loss, found, berths
    check_drained(store)


def test_what_is_left_of_dropped_graphs_and_failures() -> None:
    model, x, store = compiled(Mlp, "raw @ disk")
    wanted = gradients(model, x, store)

    def fail_in_forward() -> None:
        with store:
            model(x).sum().to("nowhere")

    def fail_in_backward() -> None:
        handle = model.blocks[0].up.weight.register_hook(lambda grad: grad.to("nowhere"))
        try:
            with store:
                loss = model(x).square().mean()
            loss.backward()
        finally:
            handle.remove()

    with gc_off():
        with store:
            model(x)
        check_drained(store)
        for fail in (fail_in_forward, fail_in_backward):
            with pytest.raises(RuntimeError, match="nowhere"):
                fail()
            check_drained(store)
        with store:
            first, second = model(x).square().mean(), model(x).square().mean()
        for loss, retain in ((first, True), (first, False), (second, False)):
            model.zero_grad()
            loss.backward(retain_graph=retain)
            check_same({name: p.grad.clone() for name, p in model.named_parameters()}, wanted)
        del first, second, loss
        check_drained(store)
    assert not tokens._memories


def faulty(store: ActivationStore, x: Tensor) -> Faulty:
    """The store's disk tier, which can be told to fail."""
    place = store._store.place(x.device)
    tier = place._open["disk"] = Faulty(place.tier("disk"))
    return tier


def test_a_failed_put_leaves_nothing_and_names_the_site() -> None:
    model, x, store = compiled(Mlp, "raw @ disk")
    wanted = gradients(model, x, store)
    tier = faulty(store, x)
    tier.faults.add("reserve")
    with gc_off():
        with pytest.raises(
            TransferError, match=r"while saving blocks.*in a compiled graph: a planted fault of reserve"
        ):
            gradients(model, x, store)
        tier.faults.clear()
        store._store.place(x.device)._open["disk"] = tier.tier
        check_drained(store)
    check_same(gradients(model, x, store), wanted)


def test_a_failed_read_names_the_site_and_a_second_backward_reads_again() -> None:
    model, x, store = wide("raw @ disk")
    wanted = gradients(model, x, store)
    model.zero_grad()
    tier = faulty(store, x)
    with store:
        loss = model(x).square().mean()
    land(store)
    tier.faults.add("late read")
    with pytest.raises(TransferError, match=r"while reading .*in a compiled graph: a planted fault of late read"):
        loss.backward(retain_graph=True)
    tier.faults.clear()
    model.zero_grad()
    loss.backward()
    check_same({name: p.grad for name, p in model.named_parameters()}, wanted)
    del loss
    gc.collect()
    store._store.place(x.device)._open["disk"] = tier.tier
    check_drained(store)


def test_a_full_tier() -> None:
    wanted = plain(Mlp)
    for strict in (False, True):
        torch._dynamo.reset()
        model, x = make(Mlp)
        store = ActivationStore(model, "raw @ disk", tiers=[Disk(budget="64KiB")], min_bytes=0, strict=strict)
        store.compile(backend="aot_eager")
        if strict:
            with pytest.raises(CapacityError, match=r"while saving .*in a compiled graph: no room for .* in disk"):
                gradients(model, x, store)
        else:
            check_same(gradients(model, x, store), wanted)
            sites = store.report().sites
            full = [site for site in sites if site.note == "kept: no room in disk"]
            assert full
            assert all(site.held_bytes == site.saved_bytes > 0 == site.stored_bytes for site in full)
            assert any(site.stored_bytes for site in sites)
        gc.collect()
        check_drained(store)


def test_outside_of_the_store_payloads_wait_in_memory() -> None:
    model, x, store = compiled(Mlp, "raw @ disk")
    wanted = gradients(model, x, store)
    stored = store.report().stored_bytes
    check_same(gradients(model, x), wanted)
    assert store.report().stored_bytes == stored
    check_drained(store)
    assert not tokens._memories


def test_a_closed_store_and_hooks_that_copy_say_so() -> None:
    model, x, store = compiled(Mlp, "blocks.* : raw @ disk; * : keep")
    with store, saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = model(x).square().mean()
    with pytest.raises(StateError, match="hooks copied what a compiled graph saved"):
        loss.backward()
    with store, saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()
    with store:
        loss = model(x).sum()
    store.close()
    with pytest.raises(StateError, match=r"while reading blocks.*store was closed"):
        loss.backward()


@pytest.mark.slow
def test_verify_sees_the_payloads() -> None:
    model, x = make(Mlp)
    store = ActivationStore(model, "raw @ disk", observe=[Verify()], min_bytes=0)
    store.compile(backend="aot_eager")
    check_same(gradients(model, x, store), plain(Mlp))
    check_drained(store)


def test_recomputed_and_compiled_blocks_keep_their_inputs_in_a_tier() -> None:
    wanted = plain(Mlp)
    model, x, store = compiled(Mlp, "blocks.* : recompute(raw @ disk); * : keep")
    assert error(gradients(model, x, store), wanted) < 1e-6
    assert any(site.stored_bytes for site in store.report().sites)
    check_drained(store)
