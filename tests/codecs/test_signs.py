"""Codecs that keep signs: zero, positive and negative elements come back as such, in the plain format."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

from actstore import encode
from actstore.base.spec import Spec
from actstore.codecs import E5m6, Fp8, Hadamard128, Int4, Int8, Nf4, Raw, Topk, Zmask, Zstd
from actstore.codecs.dispatch import SignedCodec
from actstore.errors import ConfigError
from actstore.policy.options import codec_text
from tests.codecs.contract import cases, check_codec, drawn, tensor_of, turn
from tests.codecs.test_int8 import elements
from tests.oracles import find
from tests.oracles.samples import DTYPES, behind_relu, to_bytes

KEEPING = [codec for codec in find.variants() if isinstance(codec, SignedCodec) and codec.signs == "keep"]


@given(drawn([codec for codec in KEEPING if isinstance(codec, E5m6 | Fp8 | Nf4)], elements))
def test_signs_are_kept(case):
    codec, (dtype, data) = case
    x = tensor_of(data, getattr(torch, dtype))
    back = check_codec(codec, x)
    known = ~back.isnan()
    if isinstance(codec, Nf4) and codec.layout == "bnb":  # as bitsandbytes has it
        known &= x.abs() >= 2.0**-90
        small = (back == 0) & (x != 0)
        assert (x[small].abs() < 2.0**-90).all()
    assert torch.equal(back.sign()[known], x.sign()[known])


@pytest.mark.parametrize(("codec", "dtype"), cases(KEEPING, DTYPES))
def test_signs_are_kept_behind_relu(codec, dtype):
    """There kernels have a shorter way: for tensors, groups and tiles without a sign, and with a few."""
    x = tensor_of(to_bytes(behind_relu(np.random.default_rng(0)), dtype), getattr(torch, dtype))
    x = x[x.isfinite()][:2520].view(40, 63)
    for sign in (None, -0.0, -1e-3, torch.inf, torch.nan):
        if sign is not None:
            x[17, 9] = sign
        back = check_codec(codec, x, cuda=False)
        known = ~back.isnan()
        if isinstance(codec, Nf4) and codec.layout == "bnb":
            known &= x.abs() >= 2.0**-90
        assert torch.equal(back.sign()[known], x.sign()[known])


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor has no such mode")
@pytest.mark.parametrize("codec", KEEPING, ids=codec_text)
def test_signs_of_denormals_are_kept_where_the_processor_takes_them_for_zeros(codec):
    dtype = getattr(torch, turn(codec))
    x, denormal = torch.zeros(40, 64, dtype=dtype), torch.finfo(dtype).tiny / 64
    x[:, ::2], x[:, 1], x[20, 4] = denormal, torch.linspace(0, 1, 40), -denormal
    payloads = [torch.zeros(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8) for _ in range(2)]
    codec.encode(x, payloads[0], 7)
    torch.set_flush_denormal(True)
    try:
        codec.encode(x, payloads[1], 7)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(*payloads)


@pytest.mark.parametrize("round", ["stochastic", "dither"])
@pytest.mark.parametrize(
    ("codec", "top"),
    [(Int8(32), 127), (Int8(32, axis="token"), 127), (Int8(32, affine=True), 254), (Int4(), 15)],
    ids=["int8", "token", "affine", "int4"],
)
def test_the_bias_of_unbiased_roundings(codec, top, round):  # noqa: A002
    """Elements of less than a step come back as one step in the mean, others as they are."""
    codec = replace(codec, round=round, signs="keep")
    steps = torch.tensor([0, 0.01, 0.3, 0.5, 0.99, 1, 1.3, 2.5])
    x = steps.repeat_interleave(8192).view(-1, 32)
    if not codec._flat:
        x[::32] = top  # a scale of 1
    else:
        x[:, 0] = top
    payload, back = torch.zeros(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, payload, 7)
    codec.decode(payload, back, 7)
    found = torch.stack([back[(x == step) & (x != top)].mean() for step in steps])
    expected = torch.where((steps > 0) & (steps < 1), 1, steps)
    assert (found - expected).abs().max() < 0.03


def test_the_bias_of_fp8():
    """Elements below the least code come back as that, others as they are in the mean."""
    codec = Fp8(32, round="stochastic", signs="keep")
    least = 2.0**-9  # at a scale of 1, which a largest magnitude of 448 has
    steps = torch.tensor([0, 0.01, 0.3, 0.99, 1, 1.3, 2.5])
    x = steps.repeat_interleave(8192).view(-1, 32) * least
    x[:, 0] = 448
    back = encode(x, codec).decode()
    found = torch.stack([back[x == step * least].mean() for step in steps])
    expected = torch.where((steps > 0) & (steps < 1), 1, steps) * least
    assert (found - expected).abs().max() < 0.03 * least


@pytest.mark.parametrize("codec", KEEPING, ids=codec_text)
def test_the_format_is_the_plain_one(codec):
    """As many bytes; and of elements that no rounding takes to zero, the same bytes."""
    plain, x = replace(codec, signs="round"), torch.rand(40, 64, dtype=getattr(torch, turn(codec))) + 1
    assert codec.size(Spec.of(x)) == plain.size(Spec.of(x))
    payloads = [torch.zeros(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8) for _ in range(2)]
    for each, payload in zip((codec, plain), payloads, strict=True):
        each.encode(x, payload, 7)
    assert torch.equal(*payloads)


def test_a_store_asks_for_the_codec_that_keeps_signs():
    assert Int8().keeping_signs == Int8(signs="keep")
    assert Int8().keeping_signs is Int8().keeping_signs or Int8().keeping_signs == Int8().keeping_signs
    for as_it_is in (Int4(signs="round"), Nf4(signs="keep"), Raw(), Zstd(), Zmask()):
        assert as_it_is.keeping_signs is as_it_is
    assert Zmask(Int8()).keeping_signs == Zmask(Int8(signs="keep"))
    assert Zstd(Fp8()).keeping_signs == Zstd(Fp8(signs="keep"))
    for cannot in (Hadamard128(), Topk(), Zstd(Topk())):
        assert cannot.keeping_signs is None


@pytest.mark.parametrize("kind", [Int8, Int4, Fp8, E5m6, Nf4])
def test_other_words_are_refused(kind):
    with pytest.raises(ConfigError, match="must be auto, keep or round"):
        kind(signs="maybe")
