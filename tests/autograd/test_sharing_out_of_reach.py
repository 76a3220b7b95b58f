"""One payload for several saves where its bytes are out of reach: it has left, or lies on an accelerator."""

import pytest
import torch
from torch import nn

from actstore import ActivationStore, devices
from actstore.autograd import encoder
from actstore.errors import MutationError
from actstore.transfer.engine import Engine
from tests.autograd.checks import check_same, settle
from tests.autograd.sharing import comparisons, store_of, stored_bytes
from tests.devices.late import LateDevice


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
SECONDS = {  # and whether its own payload would have the same bytes: those of one row have other groups
    "the same": (lambda h: h, True),
    "flat": (lambda h: h.view(-1), False),
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
    monkeypatch.setattr(encoder, "compare", lambda *_: False)
    own, more = run()
    check_same(shared, own)
    assert (few < more) == same


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
    monkeypatch.setattr(encoder, "compare", lambda *_: False)
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
        monkeypatch.setattr(encoder, "compare", lambda *args: not next(calls) and compare(*args))
        with store:
            total = sum(part(view).sum() for view in (h, h.view(-1)) for part in model.values())
        (found,) = torch.autograd.grad(total, h)
        store.close()
        return found

    values, compare = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), encoder.compare
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
