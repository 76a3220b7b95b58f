"""One tensor through one codec, without a store."""

import pytest
import torch

import actstore
from actstore.codecs import AtMost, Exact, Int8
from actstore.errors import PolicyError, SpecError, UnknownCodecError
from tests.codecs.contract import storage_bytes, turn
from tests.oracles import find


def test_what_a_newcomer_does():
    x = torch.randn(100, 256)
    encoded = actstore.encode(x, "int8")
    assert encoded.nbytes == encoded.payload.numel() == 25600 + 400
    assert encoded.ratio == pytest.approx(4 / 1.015625)
    assert (encoded.decode() - x).norm() / x.norm() < 0.01
    assert repr(encoded) == f"<int8 of {encoded.spec}: 26000 bytes, ratio 3.94>"


@pytest.mark.parametrize("codec", find.variants(), ids=str)
def test_every_codec(codec):
    x = torch.linspace(-3, 3, 2500).to(getattr(torch, turn(codec))).view(50, 50).t()
    encoded = actstore.encode(x, codec, key=5)
    size = codec.size(encoded.spec)
    assert encoded.nbytes == size.nbytes if isinstance(size, Exact) else encoded.nbytes <= size.nbytes
    assert isinstance(size, AtMost | Exact)
    back = encoded.decode()
    assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), x.dtype)
    if codec.lossless:
        assert storage_bytes(back) == storage_bytes(x)
    assert storage_bytes(encoded.decode()) == storage_bytes(back)
    assert torch.equal(actstore.encode(x, codec, key=5).payload, encoded.payload)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(8, 8)[:, ::2],
        torch.randn(8, 1).expand(8, 4),
        torch.randn(5, dtype=torch.complex64).conj().imag,
        torch.randn(3, requires_grad=True),
        torch.empty(0),
        torch.tensor(3.0),
    ],
    ids=["gaps", "expanded", "negated", "requires_grad", "empty", "scalar"],
)
def test_tensors_of_every_form(x):
    back = actstore.encode(x, "raw").decode()
    assert torch.equal(back, x)
    assert not back.requires_grad
    assert actstore.encode(x, Int8()).decode().shape == x.shape


def test_the_key_decides_the_noise():
    x = torch.randn(1000)
    one, same, other = (actstore.encode(x, "int8(round=stochastic)", key).payload for key in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("x", "codec", "key", "error", "words"),
    [
        (torch.ones(4), "int8 @ host", 0, SpecError, "a decision, not a codec alone"),
        (torch.ones(4), "keep", 0, SpecError, "a decision, not a codec alone"),
        (torch.ones(4), "int9", 0, UnknownCodecError, "int8"),
        (torch.ones(4), "a : int8", 0, PolicyError, "one decision alone"),
        (torch.ones(4, dtype=torch.int64), "int8", 0, SpecError, "int8 does not take int64"),
        (torch.ones(4).to_sparse(), "raw", 0, SpecError, "sparse"),
        (torch.ones(4, device="meta"), "raw", 0, SpecError, "meta"),
        (torch.ones(4), "int8", -1, SpecError, "key=-1"),
        (torch.ones(4), "int8", 1 << 63, SpecError, "2\\*\\*63"),
    ],
)
def test_refusals(x, codec, key, error, words):
    with pytest.raises(error, match=words):
        actstore.encode(x, codec, key)
