"""The contract of all codecs, on tensors of every form."""

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch

from actstore import codecs
from actstore.base.spec import Spec
from actstore.codecs import AtMost, Codec, Exact, get, names
from actstore.errors import SpecError
from actstore.policy.options import codec_text
from tests.codecs.contract import aligned, cases, check_codec, first_of_each, tensor_of, turn
from tests.oracles import find
from tests.oracles.samples import DTYPES, EVERY_DTYPE, elements, random_bits, samples

VARIANTS = find.variants()
CODECS = first_of_each(VARIANTS)
FLOATS, OTHERS = cases(VARIANTS, DTYPES), cases(VARIANTS, EVERY_DTYPE[len(DTYPES) :])

everyone = pytest.mark.parametrize("codec", CODECS, ids=codec_text)


def dtype_for(codec, dtype=torch.float32):
    """`dtype`, or the first one that a codec takes."""
    return next(each for each in (dtype, *(getattr(torch, name) for name in EVERY_DTYPE)) if codec.accepts(each))


def test_every_registered_codec_is_checked_here():
    assert {type(codec) for codec in CODECS} == {get(name) for name in names()}


@pytest.mark.parametrize(("codec", "dtype"), FLOATS)
def test_values(codec, dtype):
    for data in samples(dtype).values():
        check_codec(codec, tensor_of(data, getattr(torch, dtype)))


@pytest.mark.parametrize(("codec", "dtype"), FLOATS)
def test_sizes(codec, dtype):
    for numel in (0, 1, 15, 16, 17, 31, 33, 127, 128, 129, 1023, 1025, 2500):
        check_codec(codec, tensor_of(random_bits(numel, dtype, seed=numel), getattr(torch, dtype)))


@pytest.mark.parametrize(("codec", "dtype"), FLOATS)
def test_several_blocks(codec, dtype):
    check_codec(codec, tensor_of(random_bits(8192 + 77, dtype, seed=1), getattr(torch, dtype)))


@pytest.mark.parametrize(("codec", "dtype"), OTHERS)
def test_other_dtypes(codec, dtype):
    for numel in (0, 1, 15, 17, 127, 129, 1023, 1025, 2500):
        for kind in ("normal", "special"):
            check_codec(codec, elements(kind, dtype, numel))


@everyone
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1), (7, 5, 3)])
def test_shapes(codec, shape):
    x = torch.linspace(-2, 2, torch.Size(shape).numel()).reshape(shape)
    back = check_codec(codec, x.to(dtype_for(codec)))
    assert back.shape == shape


@everyone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.permute(3, 1, 0, 2),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(0, 1)[:, :1],
        lambda x: x[1:],
        lambda x: x.flatten()[3:],
        lambda x: x.requires_grad_(x.is_floating_point()),
    ],
    ids=["permuted", "channels_last", "unit dimension", "later rows", "odd offset", "requires_grad"],
)
def test_strides_and_offsets(codec, dtype, change):
    x = change(torch.linspace(-2, 2, 2 * 3 * 5 * 7).reshape(2, 3, 5, 7).to(dtype_for(codec, dtype)))
    back = check_codec(codec, x)
    assert back.stride() == x.stride()
    assert back.shape == x.shape


@everyone
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda dtype: torch.ones(8, 8, dtype=dtype)[:, ::2], "contiguous"),
        (lambda dtype: torch.ones(8, 1, dtype=dtype).expand(8, 4), "contiguous"),
        (lambda dtype: torch._neg_view(torch.ones(8, dtype=dtype)), "resolve_neg"),
    ],
    ids=["gaps", "expanded", "negated"],
)
def test_refuses_what_it_would_store_wrongly(codec, tensor, words):
    with pytest.raises(SpecError, match=words):
        codec.encode(tensor(dtype_for(codec)), aligned(1 << 14)[1])


@everyone
def test_refuses_a_strange_payload(codec):
    x, memory = torch.ones(64, dtype=dtype_for(codec)), aligned(1 << 14)[1]
    strange = [
        (memory.view(torch.int8), "contiguous uint8"),
        (memory[::2], "contiguous uint8"),
        (memory[1:], "multiple of 16"),
        (memory.to("meta"), "buffer on cpu"),
    ]
    for payload, words in strange:
        with pytest.raises(SpecError, match=words):
            codec.encode(x, payload)
        with pytest.raises(SpecError, match=words):
            codec.decode(payload, torch.empty_like(x))


@pytest.mark.parametrize("codec", VARIANTS, ids=codec_text)
def test_is_a_value(codec):
    other = pickle.loads(pickle.dumps(codec))
    if codec in CODECS:  # what encodes stays equal; the others would compile kernels for it
        codec.encode(torch.ones(200, dtype=getattr(torch, turn(codec))), aligned(1 << 14)[1])
    assert other == codec == copy.deepcopy(codec) == pickle.loads(pickle.dumps(codec))
    assert hash(other) == hash(codec)
    assert eval(repr(codec), vars(codecs)) == codec
    with pytest.raises((FrozenInstanceError, AttributeError)):
        codec.name = "other"
    assert isinstance(codec, Codec)


@pytest.mark.parametrize("codec", VARIANTS, ids=codec_text)
def test_counts_beyond_32_bits(codec):
    dtype = next(dtype for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.float32) if codec.accepts(dtype))
    small, large = (codec.size(Spec((1 << n, 1 << 14), (1 << 14, 1), dtype, torch.device("cpu"))) for n in (1, 20))
    assert type(large) is type(small)
    assert isinstance(large, Exact | AtMost)
    assert large.nbytes <= small.nbytes << 19
    assert large.nbytes >= 1 << 31
