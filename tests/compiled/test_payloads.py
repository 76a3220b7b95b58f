"""What is one payload in a graph, and what graphs without payloads do as plain compilation."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

from actstore import ActivationStore, Verify
from actstore.errors import PayloadError
from tests.autograd.checks import check_drained, check_same
from tests.compiled.models import FusedAttention, Mlp, ReadTwice, ReluNet, compiled, error, gradients, make, plain

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself


@pytest.mark.parametrize("apart", [False, True])
def test_parts_of_one_result_are_one_payload_where_backward_reads_all(apart: bool) -> None:
    """With values that another operator reads, too, queries and keys have a payload each."""
    wanted = plain(FusedAttention, apart)
    model, x, store = compiled(FusedAttention, "int8", apart)
    found = gradients(model, x, store)
    eager, x = make(FusedAttention, apart)
    eager_error = error(gradients(eager, x, ActivationStore(eager, "int8", min_bytes=0)), wanted)
    assert 0 < error(found, wanted) < 1.1 * eager_error < 0.03
    sizes = [site.saved_bytes for site in store.report().sites if site.stored_bytes]
    assert (3 * x.nbytes in sizes) is not apart
    assert sum(sizes) >= 5 * x.nbytes
    check_drained(store)


def test_modules_that_read_one_result_have_payloads_of_their_own() -> None:
    wanted = plain(ReadTwice)
    model, x, store = compiled(ReadTwice, "proj : int8; * : int8 @ disk")
    assert 0 < error(gradients(model, x, store), wanted) < 0.02
    assert {site.decision for site in store.report().sites if site.stored_bytes} == {"int8 @ disk", "int8"}
    check_drained(store)


@pytest.mark.parametrize("donates", [True, False])
@pytest.mark.parametrize("policy", ["keep", "blocks.* : recompute; * : keep"])
def test_without_payloads_backward_donates_as_in_plain_compilation(policy: str, donates: bool) -> None:
    """It may write over what forward has saved, and then does not run twice."""
    with functorch.patch(donated_buffer=donates):
        model, x, store = compiled(Mlp, policy)
        gradients(model, x, store)
        with store:
            loss = model(x).square().mean()
        with pytest.raises(RuntimeError, match="donated_buffer=False") if donates else nullcontext():
            loss.backward(retain_graph=True)
        if not donates:
            loss.backward()
        assert functorch.donated_buffer == donates
    del loss
    check_drained(store)


@pytest.mark.parametrize("verifies", [True, False])
def test_a_payload_that_something_writes_to_is_refused_under_verify(verifies: bool) -> None:
    """Each section, at the end too. Without Verify backward reads what was written."""
    wanted = gradients(*compiled(ReluNet))
    torch._dynamo.reset()
    model, x = make(ReluNet)
    store = ActivationStore(model, "int8", observe=[Verify()] if verifies else [], min_bytes=0)
    store.compile(backend="aot_eager")
    check_same(gradients(model, x, store), wanted)

    def sections() -> tuple[Tensor, list[Tensor]]:
        """A loss, and the payloads' sections that its graph holds."""
        with store:
            loss = model(x).square().mean()
        node = loss.grad_fn
        while not hasattr(node, "saved_tensors"):
            node = node.next_functions[0][0]
        return loss, [each for each in node.saved_tensors if each.dtype in (torch.int8, torch.bfloat16)]

    count = len(sections()[1])
    assert count == 6  # codes and scales of three payloads
    for number in range(count):
        loss, found = sections()
        found[number].data.flatten()[-1] += 1
        refuses = pytest.raises(PayloadError, match=r"while decoding \S+ \(int8\) in a compiled graph")
        with refuses if verifies else nullcontext():
            loss.backward()
        del loss, found, refuses
    check_drained(store)


def test_derive_with_a_codec_encodes_in_graphs() -> None:
    """A graph encodes what `derive` drops elsewhere: gradients are those of the codec alone."""
    found = []
    for policy in ("derive(int8)", "int8"):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(32, 64)
        store = ActivationStore(model, policy, min_bytes=0)
        store.compile(backend="aot_eager")
        found.append((gradients(model, x, store), store.report()))
    check_same(found[0][0], found[1][0])
    assert found[0][1].held_bytes == found[1][1].held_bytes


def test_masks_are_bits_under_derive() -> None:
    found = []
    for policy in ("derive", "keep"):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)), torch.randn(32, 64)
        store = ActivationStore(model, policy, min_bytes=0)
        store.compile(backend="aot_eager")
        found.append((gradients(model, x, store), store.report()))
    check_same(found[0][0], found[1][0])
    (mask,) = (site for site in found[0][1].sites if site.stored_bytes)
    assert mask.held_bytes == mask.saved_bytes / 8 == x.numel() / 8
