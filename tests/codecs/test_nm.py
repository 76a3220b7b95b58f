"""nm: which elements are kept of each group."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Nm
from actstore.codecs.sparse import NM_GROUPS
from actstore.errors import ConfigError, SpecError
from tests.codecs.contract import check_codec, tensor_of
from tests.codecs.test_int8 import elements
from tests.codecs.test_topk import check_rows, roundtrip

pairs = st.sampled_from(NM_GROUPS).flatmap(lambda m: st.tuples(st.integers(1, m - 1), st.just(m)))


@given(elements(), pairs)
def test_keeps_the_largest(case, pair):
    dtype, data = case
    x, (n, m) = tensor_of(data, getattr(torch, dtype)), pair
    payload, back = roundtrip(Nm(n, m), x)
    check_rows(x, payload, back, m, lambda size: min(n, size))


@pytest.mark.parametrize("m", NM_GROUPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits(dtype, m):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(m))
    for y in (x, x[order]):
        payload, back = roundtrip(Nm(m // 2, m), y)
        check_rows(y, payload, back, m, lambda size: size // 2)
    check_codec(Nm(m - 1, m), x[order][:2048])


@pytest.mark.parametrize("m", NM_GROUPS)
def test_of_equal_ones_the_first_are_kept(m):
    signs = torch.where(torch.arange(4 * m) % 2 == 0, 1.0, -1.0)
    for n in range(1, m):
        _, back = roundtrip(Nm(n, m), signs)
        assert (back.view(-1, m) != 0).int().tolist() == [[1] * n + [0] * (m - n)] * 4


@pytest.mark.parametrize(("n", "m"), [(0, 4), (4, 4), (-1, 8), (True, 4), (1.0, 4)])
def test_other_numbers_to_keep_are_refused(n, m):
    with pytest.raises(ConfigError, match=f"n must be from 1 to {m - 1}"):
        Nm(n, m)


@pytest.mark.parametrize("m", [0, 2, 5, 64, 4.0, "4"])
def test_other_groups_are_refused(m):
    with pytest.raises(ConfigError, match="must be 4, 8, 16 or 32"):
        Nm(1, m)


def test_is_for_floats():
    with pytest.raises(SpecError, match="Use 'raw'"):
        Nm().size(Spec.of(torch.ones(5, dtype=torch.float64)))
