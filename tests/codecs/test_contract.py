"""The contract of all codecs, on tensors of every form."""

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch

from actstore.codecs import Codec, Exact, Int8, Raw, get, names
from actstore.errors import SpecError
from actstore.spec import Spec
from tests.codecs.contract import aligned, check_codec, tensor_of
from tests.oracles.samples import DTYPES, random_bits, samples

CODECS = (Raw(), Int8(), Int8(32), Int8(1024))

everyone = pytest.mark.parametrize("codec", CODECS, ids=str)


def test_every_registered_codec_is_checked_here():
    assert {type(codec) for codec in CODECS} == {get(name) for name in names()}


@everyone
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", samples("float32"))
def test_values(codec, dtype, case):
    check_codec(codec, tensor_of(samples(dtype)[case], getattr(torch, dtype)))


@everyone
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 31, 33, 127, 128, 129, 1023, 1025, 2500])
def test_sizes(codec, dtype, numel):
    check_codec(codec, tensor_of(random_bits(numel, dtype, seed=numel), getattr(torch, dtype)))


@everyone
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1), (7, 5, 3)])
def test_shapes(codec, shape):
    back = check_codec(codec, torch.linspace(-2, 2, torch.Size(shape).numel()).reshape(shape))
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
        lambda x: x.requires_grad_(),
    ],
    ids=["permuted", "channels_last", "unit dimension", "later rows", "odd offset", "requires_grad"],
)
def test_strides_and_offsets(codec, dtype, change):
    x = change(torch.linspace(-2, 2, 2 * 3 * 5 * 7).reshape(2, 3, 5, 7).to(dtype))
    back = check_codec(codec, x)
    assert back.stride() == x.stride()
    torch.testing.assert_close(back, x.detach(), atol=0 if codec.lossless else 0.01, rtol=0.01)


@everyone
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(8, 8)[:, ::2], "contiguous"),
        (torch.ones(8, 1).expand(8, 4), "contiguous"),
        (torch.ones(1, dtype=torch.complex64).conj().imag, "resolve_neg"),
    ],
    ids=["gaps", "expanded", "negated"],
)
def test_refuses_what_it_would_store_wrongly(codec, tensor, words):
    with pytest.raises(SpecError, match=words):
        codec.encode(tensor, torch.empty(4096, dtype=torch.uint8))


@everyone
def test_refuses_a_strange_payload(codec):
    x, memory = torch.ones(64), torch.empty(4096, dtype=torch.uint8)
    strange = [
        (memory.view(torch.int8), "contiguous uint8"),
        (memory[::2], "contiguous uint8"),
        (aligned(2048)[1][1:], "multiple of 16"),
        (memory.to("meta"), "buffer on cpu"),
    ]
    for payload, words in strange:
        with pytest.raises(SpecError, match=words):
            codec.encode(x, payload)
        with pytest.raises(SpecError, match=words):
            codec.decode(payload, torch.empty(64))


@everyone
def test_is_a_value(codec):
    other = pickle.loads(pickle.dumps(codec))
    x = torch.ones(200)
    codec.encode(x, torch.empty(1024, dtype=torch.uint8))
    assert other == codec == copy.deepcopy(codec) == pickle.loads(pickle.dumps(codec))
    assert hash(other) == hash(codec)
    assert eval(repr(codec), {"Raw": Raw, "Int8": Int8}) == codec
    with pytest.raises((FrozenInstanceError, AttributeError)):
        codec.name = "other"
    assert isinstance(codec, Codec)


@everyone
def test_counts_beyond_32_bits(codec):
    spec = Spec((1 << 20, 1 << 14), (1 << 14, 1), torch.bfloat16, torch.device("cpu"))
    per_group = {Raw(): 128 * 2}.get(codec) or 128 + 2 * 128 / codec.group
    assert codec.size(spec) == Exact(int((1 << 34) / 128 * per_group))
