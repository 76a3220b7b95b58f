"""What a shape with strides means for the storage under it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.layout import layout_of, storage_view


def addresses(shape, stride):
    """Every element's place, by walking through all of them."""
    places = torch.zeros(1, dtype=torch.long)
    for n, step in zip(shape, stride, strict=True):
        places = (places[:, None] + torch.arange(n) * step).reshape(-1)
    return places.tolist()


def check_layout(shape, stride):
    places = addresses(shape, stride)
    span, dense, compact = layout_of(shape, stride)
    assert span == (max(places) + 1 if places else 0)
    assert dense == (sorted(places) == list(range(span)))
    if compact is not None:
        inner = addresses(*compact)
        assert len(set(inner)) == len(inner)
        assert set(inner) == set(places)
        assert list(compact[1]) == sorted(compact[1], reverse=True) or 0 in shape
    elif len(set(places)) == len(places):  # it may give up on what is disjoint in an unusual way, never the reverse
        assert not dense


small = st.integers(0, 4)


@given(st.lists(st.tuples(small, st.integers(0, 12)), max_size=4))
def test_any_shape_and_stride(dims):
    check_layout(tuple(n for n, _ in dims), tuple(step for _, step in dims))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False), st.data())
def test_views_of_a_dense_tensor(shape, random, data):
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.empty(shape).permute(order)
    assert layout_of(tensor.shape, tensor.stride()).dense
    axis = data.draw(st.integers(0, len(shape) - 1))
    part = tensor.narrow(axis, 0, data.draw(st.integers(1, tensor.shape[axis])))
    check_layout(tuple(part.shape), part.stride())
    assert layout_of(part.shape, part.stride()).compact is not None
    check_layout((*part.shape, 3), (*part.stride(), 0))


@pytest.mark.parametrize(
    ("shape", "stride", "span", "dense", "compact"),
    [
        ((), (), 1, True, ((), ())),
        ((0, 3), (3, 1), 0, True, ((0, 3), (3, 1))),
        ((5,), (1,), 5, True, ((5,), (1,))),
        ((5, 1), (1, 5), 5, True, ((5,), (1,))),
        ((2, 3), (1, 2), 6, True, ((3, 2), (2, 1))),
        ((2, 3), (6, 1), 9, False, ((2, 3), (6, 1))),
        ((2, 3), (0, 1), 3, False, ((3,), (1,))),
        ((4, 3), (0, 0), 1, False, ((), ())),
        ((5, 4), (1, 1), 8, False, None),
        ((2, 2, 2, 2), (8, 1, 4, 2), 16, True, ((2, 2, 2, 2), (8, 4, 2, 1))),
    ],
)
def test_known_layouts(shape, stride, span, dense, compact):
    assert layout_of(shape, stride) == (span, dense, compact)


def test_a_view_of_the_storage():
    tensor = torch.arange(12.0, requires_grad=True).view(3, 4).t()[1:]
    view = storage_view(tensor, 2, 5)
    assert view.tolist() == [2, 3, 4, 5, 6]
    assert not view.requires_grad
    assert view.data_ptr() == tensor.untyped_storage().data_ptr() + 8
