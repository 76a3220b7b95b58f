"""Codecs inside of graphs write the bytes of eager's formats, and read them as eager does."""

import math

import pytest
import torch
from torch import Tensor

from actstore.base.spec import Spec
from actstore.codecs import Bit1, Codec, Expack, Int3, Int4, Int5, Int6, Int8, Raw
from actstore.compiled.formats.codecs import graph_codec, group_tensor
from tests.autograd.checks import check_same

SHAPES = [(128,), (4, 128), (3, 5, 64), (3, 6, 64), (5, 4, 32), (101, 97), (2, 3, 7, 64), (1, 1), (256, 3)]
SHAPES += [(3, 5, 152), (2, 8, 7, 7), (4, 7), (2, 3, 4, 200)]
CODECS = [Int8(), Int8(signs="keep"), Int8(group=32), Int8(affine=True), Int8(affine=True, signs="keep"), Int6()]
CODECS += [Int5(), Int4(), Int4(signs="keep"), Int4(group=128), Int3()]


def layouts(shape: tuple[int, ...]) -> list[Tensor]:
    """Contiguous, permuted, with gaps."""
    torch.manual_seed(len(shape))
    x = torch.randn(shape) * torch.randn(shape[-1]).exp()
    images = [x.to(memory_format=torch.channels_last)] if len(shape) == 4 else []
    return [x, x.transpose(0, -1), torch.randn(*shape, 2)[..., 0], *images]


def eager_payload(codec: Codec, tensor: Tensor) -> Tensor:
    dense = tensor.new_empty_strided(tensor.shape, torch.empty_like(tensor).stride()).copy_(tensor)
    payload = torch.empty(codec.size(Spec.of(dense)).nbytes, dtype=torch.uint8)
    codec.encode(dense, payload)
    return payload


def sections_joined(sections: list[Tensor]) -> Tensor:
    """As eager's payload has them: each but the last is filled up to a multiple of 16 bytes."""
    parts = [section.contiguous().view(-1).view(torch.uint8) for section in sections]
    filled = [torch.nn.functional.pad(part, (0, -len(part) % 16)) for part in parts[:-1]]
    return torch.cat([*filled, parts[-1]])


def check_as_eager(codec: Codec, tensor: Tensor) -> None:
    form, reason = graph_codec(codec, tensor)
    assert form is not None, reason
    contiguous = torch.contiguous_format
    sections = [section.clone(memory_format=contiguous) for section in form.encode(tensor)]  # as a payload has them
    payload = eager_payload(codec, tensor)
    assert torch.equal(sections_joined(sections), payload)
    back = form.decode(sections)
    wanted = torch.empty_like(tensor)
    codec.decode(payload, wanted)
    check_same(back, wanted)
    assert back.dtype == tensor.dtype
    assert back.stride() == wanted.stride() or 1 in tensor.shape


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_and_values_are_eagers(codec: Codec, shape: tuple[int, ...]) -> None:
    for tensor in layouts(shape):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_as_eager(codec, tensor.to(dtype))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_special_values_are_eagers(codec: Codec) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 256)
    x[0, 3], x[1, 5], x[2, 7] = math.nan, math.inf, -math.inf
    x[3] = 0.0
    x[4] *= 1e-35
    x[5, :128] = math.nan
    x[6] = torch.finfo(torch.float32).max
    x[7, 9], x[7, 10] = -0.0, 1e-41
    check_as_eager(codec, x)
    check_as_eager(codec, x.to(torch.bfloat16))
    x[6] = torch.finfo(torch.float16).max
    check_as_eager(codec, x.to(torch.float16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_are_bits(shape: tuple[int, ...]) -> None:
    for tensor in layouts(shape):
        check_as_eager(Bit1(), tensor > 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_raw_payloads_are_the_elements(shape: tuple[int, ...]) -> None:
    for tensor in layouts(shape):
        check_as_eager(Raw(), tensor)


def test_what_has_no_form_says_why() -> None:
    x = torch.randn(4, 128)
    for codec, words in [
        (Expack(), "expack does not run inside of compiled graphs"),
        (Int8(axis="token"), "int8 with these options"),
        (Int8(round="stochastic"), "rounds at random"),
    ]:
        form, reason = graph_codec(codec, x)
        assert form is None
        assert words in reason
    assert graph_codec(Int8(), x[:1].expand(4, 128)) == (None, "its elements overlap in memory")
    assert graph_codec(Int8(), torch.tensor(1.0))[1] == "it has no dimension to cut into groups"


def test_groups_take_as_few_dimensions_as_they_need() -> None:
    grouping, _ = group_tensor(torch.empty(2, 6, 64, 128), 128)
    assert grouping is not None
    assert (grouping.lead, grouping.tail, grouping.group) == (3, (128,), 128)
    grouping, _ = group_tensor(torch.empty(2, 6, 64, 128).transpose(1, 3), 256)
    assert grouping is not None
    assert (grouping.dims, grouping.lead, grouping.tail, grouping.group) == ((0, 3, 2, 1), 3, (128,), 128)
    grouping, _ = group_tensor(torch.empty(3, 50), 128)
    assert grouping is not None
    assert (grouping.lead, grouping.tail, grouping.group) == (1, (50,), 64)
    grouping, _ = group_tensor(torch.empty(4, 7, 7), 128)
    assert grouping is not None
    assert (grouping.lead, grouping.tail, grouping.group) == (1, (7, 7), 64)
    grouping, _ = group_tensor(torch.empty(3, 50, dtype=torch.bool), 8, in_rows=False)
    assert grouping is not None
    assert (grouping.lead, grouping.tail) == (0, (3, 50))


@pytest.mark.parametrize(("channels", "lead", "tail", "image"), [(128, 2, (5, 128), ()), (100, 3, (100,), (6, 5))])
def test_no_payload_of_an_image_has_four_dimensions(
    channels: int, lead: int, tail: tuple[int, ...], image: tuple[int, ...]
) -> None:
    tensor = torch.empty(2, channels, 6, 5).contiguous(memory_format=torch.channels_last)
    grouping, _ = group_tensor(tensor, 128)
    assert grouping is not None
    assert (grouping.dims, grouping.lead, grouping.tail, grouping.image) == ((0, 2, 3, 1), lead, tail, image)
    assert grouping.rows(tensor).dim() == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.parametrize("codec", [Int8(), Int8(affine=True, signs="keep"), Int5()], ids=str)
def test_inductors_loops_end_groups_with_rows(codec: Codec) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 152) * torch.randn(64, 1).exp()
    form, _ = graph_codec(codec, x)
    assert form is not None
    sections = [section.clone() for section in form.encode(x)]
    found = torch.compile(lambda x: [section.clone() for section in form.encode(x)])(x)
    assert all(map(torch.equal, found, sections))
    check_same(torch.compile(form.decode)(sections), form.decode(sections))
