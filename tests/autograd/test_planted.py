"""Bugs that stores have had, planted one at a time: the checks of this folder must find each."""

from weakref import WeakSet

import pytest
import torch

from actstore import ActivationStore
from actstore.autograd import handles, unpack
from actstore.autograd.encoder import Sharing
from actstore.autograd.handles import Kept, Stored
from actstore.autograd.hooks import Scope
from actstore.base.ledger import Claim
from actstore.tiers.disk import DiskTier
from tests.autograd.checks import check_drained, check_same, gc_off, train_step
from tests.autograd.models import build
from tests.autograd.test_fresh import PAIRS, VIEWS, base, check_comes_back, test_a_backward_that_scribbles_harms_nobody
from tests.autograd.test_lifetime import test_retain_graph_keeps_and_repeats as check_reads
from tests.autograd.test_mutation import test_chunks_with_versions_of_their_own_are_not_mixed_up
from tests.autograd.test_mutation import test_the_verdict_is_that_of_plain_autograd as check_verdict
from tests.autograd.test_sharing import test_a_write_through_data_after_a_backward as check_sharing
from tests.transfer.test_loans import never_spoiled

RAW = {"policy": "raw", "min_bytes": 0}


def equal_steps(name="transformer", policy="raw"):
    model, batch = build(name)
    store = ActivationStore(model, policy, min_bytes=0)
    check_same(train_step(model, batch, store), train_step(model, batch))


def two_versions():
    x = torch.randn(5, requires_grad=True)
    with ActivationStore(**RAW, allow_mutation=True):
        h = x * 1
        first = h.square()
        with torch.no_grad():
            h.mul_(3)
        second = h.square()
    del first
    check_same(torch.autograd.grad(second.sum(), h), (2 * h.detach(),))


def no_comparison(patch):
    """Payloads are taken for unchanged, whose bytes are compared where versions do not tell."""
    patch.setattr(Sharing, "_is_unchanged", lambda *_, **__: True)


def no_version_check(patch):
    no_comparison(patch)
    patch.setattr(Stored, "covers", lambda self, other: True)


def no_counter_check(patch):
    no_comparison(patch)
    patch.setattr(handles, "same_root", lambda a, b: True)


def the_stored_object_itself(patch):
    get = Stored.get
    served = {}

    def once(self):
        return served.setdefault(id(self), (self, get(self)))[1]

    patch.setattr(Stored, "get", once)


def contiguous_restore(patch):
    get = Stored.get
    patch.setattr(Stored, "get", lambda self: get(self).contiguous())


def lost_conjugation(patch):
    get = Stored.get

    def without(self):
        self.conj = False
        return get(self)

    patch.setattr(Stored, "get", without)


def no_verdict(patch):
    for module in (handles, unpack):
        patch.setattr(module, "check_version", lambda *args, **options: None)


def a_held_output(patch):
    init = Kept.__init__

    def holding(self, tensor, *args):
        init(self, tensor, *args)
        self.alias = tensor

    patch.setattr(Kept, "__init__", holding)


def nothing_waits(patch):
    """What requires no gradient is encoded at once: rrelu's noise before it is filled."""
    pack_hook = Scope.pack_hook

    def eager(self):
        pack = pack_hook(self)

        def hook(tensor):
            handle = pack(tensor)
            self.settle()
            return handle

        return hook

    patch.setattr(Scope, "pack_hook", eager)


def forgotten_slots(patch):
    patch.setattr("actstore.store.store.Finalizer", lambda *_: None)
    patch.setattr("actstore.store.store.Claim", lambda owner, _release: Claim(owner))


def one_wrong_bit(patch):
    get = Stored.get

    def flipped(self):
        tensor = get(self)
        if tensor.dtype is torch.float32 and tensor.numel():
            tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return tensor

    patch.setattr(Stored, "get", flipped)


def lost_offsets(patch):
    """Views come back from the beginning of what is stored."""
    rebuild = Stored._rebuild

    def from_the_beginning(self, owner):
        if (owner.region is None or owner.region.compact is None) and self.offset:
            self.offset = 0 if owner.region is None else owner.region.start
        return rebuild(self, owner)

    patch.setattr(Stored, "_rebuild", from_the_beginning)


def read_once(patch):
    """A second read finds what others have written to the payload's memory."""
    get, read = Stored.get, WeakSet()

    def once(self):
        tensor = get(self)
        if self in read and tensor.is_floating_point():
            tensor = torch.zeros_like(tensor)
        read.add(self)
        return tensor

    patch.setattr(Stored, "get", once)


def stale_payloads(patch):
    """A payload serves a later save of the same storage, whatever was written to that in between."""

    def find(self, owners, handle, tensor, codec):
        return next((owner for weak in owners if (owner := weak()) is not None and owner.covers(handle)), codec)

    patch.setattr(Sharing, "find", find)


def rrelu():
    x = torch.randn(50, requires_grad=True)

    def loss_of():
        torch.manual_seed(0)
        return torch.nn.functional.rrelu(x, training=True).sum()

    with ActivationStore(**RAW):
        loss = loss_of()
    check_same(torch.autograd.grad(loss, x), torch.autograd.grad(loss_of(), x))


def dropped_output(policy="keep"):
    store = ActivationStore(policy=policy, min_bytes=0)
    with gc_off():
        with store:
            y = torch.randn(2**19, requires_grad=True).exp()
        del y
        check_drained(store)


def scribbled_on_lent_memory():
    write = DiskTier.write

    def at_once(self, *args):  # only what is on disk is lent
        ticket = write(self, *args)
        ticket.result()
        return ticket

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actstore.transfer.engine.SMALL_NBYTES", 1)
        patch.setattr(DiskTier, "write", at_once)
        for pair in PAIRS:
            test_a_backward_that_scribbles_harms_nobody(pair, "raw @ disk")


FOUND = {
    "no_version_check": (no_version_check, two_versions),
    "no_counter_check": (no_counter_check, lambda: test_chunks_with_versions_of_their_own_are_not_mixed_up("device")),
    "the_stored_object_itself": (
        the_stored_object_itself,
        lambda: [test_a_backward_that_scribbles_harms_nobody(pair, "raw") for pair in PAIRS],
    ),
    "contiguous_restore": (contiguous_restore, lambda: check_comes_back(VIEWS["transposed"](base()), "raw")),
    "lost_conjugation": (lost_conjugation, lambda: check_comes_back(base(torch.complex64).conj(), "raw")),
    "no_verdict_kept": (no_verdict, lambda: check_verdict("output", "kept", "later", "outside")),
    "no_verdict_stored": (no_verdict, lambda: check_verdict("output", "disk", "later", "outside")),
    "a_held_output": (a_held_output, dropped_output),
    "nothing_waits": (nothing_waits, rrelu),
    "forgotten_slots": (forgotten_slots, lambda: dropped_output("raw")),
    "never_spoiled": (never_spoiled, scribbled_on_lent_memory),
    "one_wrong_bit": (one_wrong_bit, equal_steps),
    "lost_offsets": (lost_offsets, equal_steps),
    "read_once": (read_once, lambda: check_reads("raw")),
    "stale_payloads": (stale_payloads, lambda: check_sharing("raw")),
}


@pytest.mark.parametrize("bug", FOUND)
def test_a_planted_bug_is_found(bug, monkeypatch):
    plant, check = FOUND[bug]
    check()
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, RuntimeError)) as info:
            check()
    del info
