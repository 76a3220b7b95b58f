"""What comes back: a fresh tensor at each unpack, of exact strides, from one payload per storage."""

import math

import pytest
import torch

from actstore import ActivationStore, Encode, Keep, Offload
from actstore.codecs import Int8, Raw
from tests.autograd.checks import check_drained, check_same, gc_off, same_bits

POLICIES = ["raw", "raw @ host", "raw @ disk"]


def make(policy, **options):
    return ActivationStore(policy=policy, min_bytes=0, **options)


class Save(torch.autograd.Function):
    """Saves its inputs as they are and does nothing else; `saved(y)` gives what comes back."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return sum(t.sum().abs() for t in tensors).float()

    @staticmethod
    def backward(ctx, _):
        return (None,) * len(ctx.saved_tensors)


class SaveOnly(torch.autograd.Function):
    """Saves `x` without a look at it."""

    @staticmethod
    def forward(ctx, anchor, x):
        ctx.save_for_backward(x)
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def saved(y):
    return y.grad_fn.saved_tensors


def spec_of(t):
    return t.shape, t.stride(), t.dtype, t.device, t.is_conj(), t.is_neg()


def base(dtype=torch.float32, *, grad=True):
    torch.manual_seed(0)
    t = torch.randn(6, 8, dtype=torch.complex64) if dtype.is_complex else torch.randn(6, 8).mul(9)
    t = t.to(dtype)
    return t.requires_grad_() * 1 if grad else t


VIEWS = {
    "whole": lambda t: t,
    "transposed": torch.t,
    "permuted": lambda t: t.view(2, 3, 8).permute(2, 0, 1),
    "rows": lambda t: t[2:4],
    "one_row": lambda t: t[3],
    "columns": lambda t: t[:, 1:3],
    "every_second": lambda t: t[::2, ::3],
    "diagonal": lambda t: t.diagonal(),
    "expanded": lambda t: t[:, :1].expand(6, 5),
    "expanded_scalar": lambda t: t[0, 0].expand(3, 4),
    "scalar": lambda t: t[4, 5],
    "empty": lambda t: t[:0],
    "empty_inside": lambda t: t[3:3, 2:],
    "chunk": lambda t: t.chunk(4, 1)[2],
    "unfolded": lambda t: t.view(-1).unfold(0, 5, 2),
    "overlapping": lambda t: t.as_strided((3, 4), (2, 3), 5),
    "odd_stride_of_one": lambda t: t.as_strided((5, 1), (1, 5), 2),
    "channels_last": lambda t: t.view(1, 2, 3, 8).contiguous(memory_format=torch.channels_last),
    "channels_last_slice": lambda t: t.view(1, 4, 3, 4).contiguous(memory_format=torch.channels_last)[:, 1:3],
}
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.uint8,
    torch.bool,
]  # fmt: skip


def check_comes_back(tensor, policy):
    """Saved and read twice: the same bits with the same strides, in memory of its own each time."""
    wanted = tensor.detach().clone(), spec_of(tensor)
    anchor = torch.ones((), requires_grad=True)
    with make(policy):
        y = Save.apply(tensor, anchor)
    first, second = saved(y)[0], saved(y)[0]
    for found in (first, second):
        assert spec_of(found) == wanted[1]
        assert same_bits(found, wanted[0])
    if tensor.numel():
        places = {t.untyped_storage().data_ptr() for t in (first, second, tensor)}
        assert len(places) == 3


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [*(("raw", dtype) for dtype in DTYPES), ("raw @ host", torch.bool), ("raw @ disk", torch.float32)],
)
@pytest.mark.parametrize("view", VIEWS)
def test_any_view_of_any_dtype_comes_back(view, dtype, policy):
    differentiable = dtype.is_floating_point or dtype.is_complex
    for grad in (False, True) if differentiable else (False,):
        check_comes_back(VIEWS[view](base(dtype, grad=grad)), policy)


LAZY = {
    "conj": torch.conj,
    "conj_slice": lambda t: t.conj()[:, ::2],
    "conj_transposed": lambda t: t.mH,
    "neg": lambda t: t.conj().imag,
    "neg_slice": lambda t: t.conj().imag[1:, ::3],
    "neg_of_conj": lambda t: torch._neg_view(t.conj()),
    "real": lambda t: t.real,
    "imag": lambda t: t.imag,
    "as_real": torch.view_as_real,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("grad", [False, True], ids=["constant", "grad"])
@pytest.mark.parametrize("view", LAZY)
def test_lazy_conjugation_and_negation_come_back(view, grad, policy):
    check_comes_back(LAZY[view](base(torch.complex64, grad=grad)), policy)


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, -1e-45, 3.4e38]


@pytest.mark.parametrize("policy", POLICIES)
def test_special_values_come_back(policy):
    check_comes_back(torch.tensor(SPECIAL), policy)
    payload = torch.tensor([0x7FC00001, 0x7F800001, -0x3FFFFF], dtype=torch.int32)  # NaNs with messages
    check_comes_back(payload.view(torch.float32), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_look_gives_a_fresh_tensor(policy):
    x = torch.randn(4, 6, requires_grad=True)
    with make(policy):
        y = x.exp()
        z = x[:, ::2] * x[:, 1::2]
    for node, name in ((y.grad_fn, "_saved_result"), (z.grad_fn, "_saved_self")):
        first = getattr(node, name)
        wanted = first.detach().clone()
        first.detach().zero_()
        assert same_bits(getattr(node, name), wanted)


class Scribbles(torch.autograd.Function):
    """A backward that writes into its saved tensors, as careless ones do."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y.mul_(1.0), grad * x.mul_(3)


PAIRS = {
    "same": lambda t: (t, t),
    "halves": lambda t: t.chunk(2, 1),
    "whole_and_view": lambda t: (t, t.view(4, 6)),
    "strided": lambda t: (t[:, ::2], t[:, 1::2]),
    "overlapping": lambda t: (t[:, :4], t[:, 2:]),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_backward_that_scribbles_harms_nobody(pair, policy):
    """The second backward, and other nodes of the same storage, see the bytes that were saved."""
    x = torch.randn(4, 6, requires_grad=True)
    with make(policy):
        a, b = PAIRS[pair](x * 1)
        c, d = PAIRS[pair](x * 2)
        scribbled = Scribbles.apply(a, b)
        clean = a * b + c * d
    wanted = torch.autograd.grad((a.detach() * b).sum(), b, retain_graph=True)
    first = torch.autograd.grad(scribbled.sum(), b, retain_graph=True)
    if pair in ("halves", "strided"):
        check_same(first, (3 * wanted[0],))
    again = torch.autograd.grad(scribbled.sum(), b, retain_graph=True)
    check_same(again, first)
    found = torch.autograd.grad(scribbled.sum() + clean.sum(), (a, b, c, d), retain_graph=True)
    plain = torch.autograd.grad((a * b + c * d).sum(), (c, d))
    check_same(found[2:], plain)


@pytest.mark.parametrize("policy", POLICIES)
def test_views_of_one_node_do_not_share_what_is_scribbled_later(policy):
    """A decoded copy is given out again only while nobody has written into it."""
    x = torch.randn(4, 6, requires_grad=True)
    with make(policy):
        h = x * 1
        y = h[:, ::2] * h[:, 1::2]
    one = y.grad_fn._saved_self
    wanted = one.detach().clone(), h[:, 1::2].detach().clone()
    one.detach().fill_(7)
    assert same_bits(y.grad_fn._saved_other, wanted[1])
    assert same_bits(y.grad_fn._saved_self, wanted[0])


# -- one payload per storage ------------------------------------------------------------------------------------------


def stored_by(build, policy="raw", **options):
    store = make(policy, **options)
    with store:
        y = build()
    stored = store.report().stored_bytes
    del y
    check_drained(store)
    return stored


def test_a_tensor_that_is_saved_twice_is_stored_once():
    x = torch.randn(10, requires_grad=True)
    assert stored_by(lambda: x * x) == x.nbytes
    assert stored_by(lambda: (x * x, x.sin(), x.view(2, 5).cos())) == x.nbytes


def test_q_k_and_v_are_stored_once():
    x = torch.randn(4, 30, requires_grad=True)

    def build():
        q, k, v = (x * 1).chunk(3, 1)
        return (q * k) * v

    assert stored_by(build) == 4 * 30 * 4 + 4 * 10 * 4  # the projection, and the product of q and k


@pytest.mark.parametrize("policy", ["raw", "raw @ disk", "int8"])
def test_q_k_and_v_in_any_layout_give_the_same_gradients(policy):
    x = torch.randn(2, 5, 48, requires_grad=True)

    def attention():
        q, k, v = ((x * 1)[..., i::3].unflatten(-1, (4, 4)).transpose(1, 2) for i in range(3))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).sum()

    with make(policy):
        loss = attention()
    found, wanted = torch.autograd.grad(loss, x), torch.autograd.grad(attention(), x)
    if policy == "int8":
        assert (found[0] - wanted[0]).norm() < 0.05 * wanted[0].norm()
    else:
        check_same(found, wanted)


@pytest.mark.parametrize(
    ("view", "elements"),
    [
        ("big[3:5]", 200),
        ("big[7]", 100),
        ("big[:, 4:6]", 200),  # gathered: its span is 99 % foreign
        ("big[::50]", 200),
        ("big[:90]", 10_000),  # little less than all: the others may use it too
    ],
)
def test_a_slice_of_a_large_storage_stores_what_it_needs(view, elements):
    big = torch.randn(100, 100, requires_grad=True) * 1
    part = eval(view, {"big": big})  # the views are written above
    assert stored_by(lambda: part.exp().sum() + part.sin().sum()) <= (elements + part.numel()) * 4


def test_an_expanded_tensor_stores_its_elements_once():
    row = torch.randn(100, requires_grad=True) * 1
    other = torch.randn(50, 100, requires_grad=True)
    assert stored_by(lambda: torch.mul(row.expand(50, 100), other)) == (100 + 5000) * 4


@pytest.mark.parametrize("min_bytes", [4096])
def test_a_small_slice_does_not_pin_a_large_storage(min_bytes):
    store = ActivationStore(policy="raw", min_bytes=min_bytes)
    x = torch.randn(10_000, requires_grad=True)
    with gc_off(), store:
        h = x * 1
        y = h[:4].sin()
        del h
        assert store.report().live_bytes < 1000
    del y


def test_the_payload_lives_as_long_as_the_last_reader():
    store, x = make("raw"), torch.randn(10, requires_grad=True)
    with gc_off():
        with store:
            h = x * 1
            first, second = h.sin(), h.cos()
        del first
        assert store.report().live_bytes == h.nbytes
        check_same(torch.autograd.grad(second.sum(), h), (-h.detach().sin(),))
        del second
        check_drained(store)


def test_a_storage_at_an_old_address_is_another_storage():
    """The allocator gives the address of what has died to the next tensor, of the same shape, at version 0."""
    x = torch.randn(1000, requires_grad=True)
    addresses, outputs = [], []
    with make("raw"):
        for i in range(50):
            h = x * i
            addresses.append(h.data_ptr())
            outputs.append(h * h)
            del h
    assert len(set(addresses)) < 50
    for i, y in enumerate(outputs):
        check_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad((x * i).square().sum(), x))


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_that_comes_back_before_backward(policy):
    """Sharded training frees the storage of what it will gather again."""
    anchor, x = torch.ones((), requires_grad=True), torch.randn(10)
    wanted = x.clone()
    x.untyped_storage().resize_(0)
    with make(policy):
        y = SaveOnly.apply(anchor, x)
        z = y.exp()
    x.untyped_storage().resize_(wanted.nbytes)
    x.data.copy_(wanted)
    assert same_bits(saved(y)[0], wanted)
    del z


# -- a lossy reader and an exact one ----------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [Encode(Raw()), Offload(Raw(), "disk"), Keep()], ids=str)
@pytest.mark.parametrize("order", ["lossy_exact", "exact_lossy", "lossy_lossy_exact", "lossy_exact_lossy"])
def test_an_exact_reader_never_gets_a_lossy_payload(order, exact):
    decisions = [Encode(Int8()) if reader == "lossy" else exact for reader in order.split("_")]
    store = ActivationStore(policy=lambda site, spec: decisions[site.index], min_bytes=0)
    x = torch.randn(64, requires_grad=True)
    with store:
        h = x * 1
        outputs = [h.square() for _ in decisions]
    for i, (reader, y) in enumerate(zip(order.split("_"), outputs, strict=True)):
        found, wanted = torch.autograd.grad(y.sum(), h)[0], 2 * h.detach()
        assert (found - wanted).abs().max() < 0.1
        if reader == "exact":
            check_same(found, wanted)
        elif i == 0:
            assert not same_bits(found, wanted)


def test_a_lossy_reader_may_get_an_exact_payload():
    decisions = [Encode(Raw()), Encode(Int8())]
    store = ActivationStore(policy=lambda site, spec: decisions[site.index], min_bytes=0)
    x = torch.randn(64, requires_grad=True)
    with store:
        h = x * 1
        first, second = h.sin(), h.cos()
    assert store.report().stored_bytes == h.nbytes
    check_same(torch.autograd.grad(second.sum(), h), (-h.detach().sin(),))
    del first
