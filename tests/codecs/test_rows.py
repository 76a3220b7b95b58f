"""Groups end with rows: no row rounds by the scale of another one, and rows of whole groups have the bytes they had."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Fp8, Hadamard128, Int4, Int5, Int8, Nf4
from actstore.kernels.rows import fit
from actstore.policy.options import codec_text
from tests.codecs.contract import KEY, aligned, check_codec

# by codec: the largest error of an element in units of the largest magnitude of its row
BOUNDS = {
    Int8(): 0.51 / 127,
    Int8(affine=True): 1.02 / 254,
    Int4(): 1.02 / 15,
    Int5(): 1.02 / 31,
    Fp8(): 1.01 / 16,
    Nf4(): 0.154,
    Hadamard128(Int8()): 0.3,
}
CODECS = pytest.mark.parametrize("codec", BOUNDS, ids=codec_text)
WIDTHS = (19, 33, 49, 100, 127, 130, 152, 200, 1000)


def roundtrip(codec, x):
    _, payload = aligned(codec.size(Spec.of(x)).nbytes)
    back = torch.empty_like(x)
    codec.encode(x, payload, KEY)
    codec.decode(payload, back, KEY)
    return payload, back


def rows_of_all_sizes(rows, width, seed, dtype=torch.float32):
    """Rows whose magnitudes differ by powers of two up to 2^20."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-10, 11, (rows, 1), generator=generator).float().exp2()
    return (torch.randn(rows, width, generator=generator) * sizes).to(dtype)


def check_rows(codec, x, back):
    """Each row's error is within what its own largest magnitude allows."""
    error, top = ((x - back).abs().double().amax(-1), x.abs().double().amax(-1))
    assert (error <= BOUNDS[codec] * top + torch.finfo(x.dtype).eps * top).all()


@CODECS
@given(data=st.data())
@settings(max_examples=25)
def test_no_row_rounds_by_the_scale_of_another(codec, data):
    x = rows_of_all_sizes(data.draw(st.integers(2, 9)), data.draw(st.integers(16, 400)), data.draw(st.integers(0, 99)))
    check_rows(codec, x, roundtrip(codec, x)[1])


@CODECS
@pytest.mark.parametrize("width", WIDTHS)
def test_every_implementation_ends_groups_with_rows(codec, width):
    for dtype in (torch.float32, torch.bfloat16):
        x = rows_of_all_sizes(5, width, width, dtype)
        back = check_codec(codec, x)
        check_rows(codec, x, back)
        x.view(-1)[7::97] = torch.nan
        x[-1, -1] = torch.inf
        check_codec(codec, x.relu())
        check_codec(codec, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [
        *(Int8(64, round=round, signs="keep") for round in ("nearest", "stochastic", "dither")),  # noqa: A001
        *(Int8(64, affine=True, round=round, signs="keep") for round in ("nearest", "stochastic", "dither")),  # noqa: A001
        *(Int4(64, round=round, signs="keep") for round in ("nearest", "stochastic", "dither")),  # noqa: A001
        Fp8(32, "pow2", "stochastic", "keep"),
        Nf4(64, signs="keep"),
    ],
    ids=codec_text,
)
def test_every_option_ends_groups_with_rows(codec):
    for width in WIDTHS:
        x = rows_of_all_sizes(40, width, width)
        for each in (x, x.relu(), x.to(torch.bfloat16)):
            check_codec(codec, each)


@CODECS
@pytest.mark.parametrize("width", [32, 64, 128, 768, 1024])
def test_rows_of_whole_groups_have_the_bytes_of_one_row(codec, width):
    group = getattr(codec, "group", 128)
    x = rows_of_all_sizes(6, width, 0)
    payload, _ = roundtrip(codec, x)
    flat, _ = roundtrip(codec, x.flatten())
    assert torch.equal(payload, flat) == (width % group == 0)


@CODECS
def test_a_row_has_the_payload_that_it_has_alone(codec):
    """The codes of row 2, and its scales, do not depend on other rows."""
    x = rows_of_all_sizes(5, 152, 0)
    _, before = roundtrip(codec, x)
    other = x.clone()
    other[:2], other[3:] = other[:2] * 1000, 0
    assert torch.equal(roundtrip(codec, other)[1][2], before[2]) or isinstance(codec, Hadamard128)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((152,), (128, 0)),  # one row
        ((1, 152), (128, 0)),
        ((8, 152), (128, 152)),  # 128 and 24
        ((8, 128), (128, 0)),
        ((8, 192), (64, 0)),
        ((4, 12, 197, 64), (64, 0)),
        ((4, 12, 197, 197), (128, 197)),
        ((8, 100), (128, 100)),
        ((8, 40), (64, 40)),
        ((8, 16, 7, 7), (64, 49)),  # rows of less than 16 share groups with the rows of the same plane
        ((8, 16, 14, 14), (128, 196)),
        ((4, 8, 50, 19), (32, 19)),
        ((8, 64, 16), (32, 16)),
        ((8, 3), (128, 0)),
        ((2, 16, 3), (64, 48)),
        ((0, 152), (128, 152)),
    ],
)
def test_the_groups_of_a_shape(shape, expected):
    stride = torch.empty(shape, device="meta").stride()
    assert fit(shape, stride, 128) == expected


def test_rows_lie_along_the_least_stride():
    x = torch.empty(4, 100, 6, 5)
    assert fit(tuple(x.shape), x.stride(), 128) == (32, 30)  # planes, as lines are too short
    assert fit((4, 100, 3, 5), (1500, 15, 5, 1), 128) == (128, 1500)  # images, as planes are
    last = x.contiguous(memory_format=torch.channels_last)
    assert fit(tuple(last.shape), last.stride(), 128) == (128, 100)
    turned = torch.empty(9, 152).t()
    assert fit(tuple(turned.shape), turned.stride(), 128) == (128, 152)


@pytest.mark.parametrize("group", [32, 64, 128, 256, 512, 1024])
@given(width=st.integers(1, 3000))
def test_payloads_have_at_most_twice_the_scales(group, width):
    """Against the same elements in one row; or one scale for 16 elements."""
    fitted, rows = fit((1000, width), (width, 1), group)
    scales = 1000 * -(-width // fitted) if rows else -(-1000 * width // fitted)
    assert scales <= max(2 * -(-1000 * width // group), -(-1000 * width // 16))
