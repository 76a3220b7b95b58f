"""Which part of a storage one payload holds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.autograd.regions import MAX_STORAGE_RATIO, can_be_lossy, is_whole, region_of
from actstore.base.layout import layout_of


def rebuilt(source, region, tensor):
    """`tensor` once more, from the payload's elements alone."""
    memory = torch.full((tensor.untyped_storage().nbytes() // tensor.dtype.itemsize,), -1, dtype=tensor.dtype)
    flat = source.as_strided((source.numel(),), (1,), source.storage_offset())
    if region.compact is not None:
        memory.as_strided(*region.compact, region.start).copy_(flat.view(region.compact[0]))
    else:
        memory[region.start : region.start + region.numel] = flat
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def check_region(tensor, *, lossless=True):
    source, region = region_of(tensor, lossless=lossless)
    layout = layout_of(tensor.shape, tensor.stride())
    assert layout_of(source.shape, source.stride()).dense
    assert source.numel() == region.numel
    assert not source.requires_grad
    assert region.covers(tensor.storage_offset(), layout)
    assert torch.equal(rebuilt(source, region, tensor), tensor.detach())
    return source, region


def views(numel=720):
    """(shape, stride, offset) of any view that fits into a storage."""
    dims = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4)
    return st.tuples(dims, st.integers(0, 40)).filter(
        lambda v: v[1] + sum(max(n - 1, 0) * step for n, step in v[0]) < numel
    )


@given(views(), st.booleans())
def test_any_view_is_rebuilt_from_its_region(view, lossless):
    dims, offset = view
    tensor = torch.arange(720.0).as_strided([n for n, _ in dims], [step for _, step in dims], offset)
    _, region = check_region(tensor, lossless=lossless)
    if not lossless and can_be_lossy(layout_of(tensor.shape, tensor.stride())):  # not one foreign element
        unique = {int(value) for value in tensor.reshape(-1)}
        assert region.numel == len(unique)


@given(views(), views())
def test_covers_is_never_wrong(one, other):
    memory = torch.arange(720.0)
    a, b = (memory.as_strided([n for n, _ in dims], [s for _, s in dims], at) for dims, at in (one, other))
    source, region = region_of(a, lossless=True)
    if region.covers(b.storage_offset(), layout_of(b.shape, b.stride())):
        assert torch.equal(rebuilt(source, region, b), b)


BIG = torch.arange(10_000.0).view(100, 100)


@pytest.mark.parametrize(
    ("view", "start", "numel"),
    [
        (lambda: BIG, 0, 10_000),
        (BIG.t, 0, 10_000),
        (lambda: BIG[:50], 0, 10_000),  # the other half may be saved as well: one payload for both
        (lambda: BIG[:20], 0, 2000),
        (lambda: BIG[40:42], 4000, 200),
        (lambda: BIG[4, ::2], 400, 99),  # with gaps that are not worth a gather
        (lambda: BIG[:, :2], 0, 200),  # gathered
        (lambda: BIG[0, 7], 7, 1),
        (lambda: BIG[:0], 0, 0),
        (lambda: BIG[3, :1].expand(50), 300, 1),
        (lambda: BIG[5:7].view(-1).unfold(0, 5, 1), 500, 200),
    ],
)
def test_known_regions(view, start, numel):
    tensor = view()
    _, region = check_region(tensor)
    assert (region.start, region.numel) == (start, numel)


def test_the_whole_storage_goes_only_where_it_is_little_more():
    memory = torch.arange(100.0)
    for n in range(1, 101):
        _, region = region_of(memory[:n], lossless=True)
        assert region.numel == (100 if n * MAX_STORAGE_RATIO >= 100 else n)


def test_a_lossy_codec_takes_the_whole_storage_only_where_one_operator_wrote_it():
    x = torch.randn(90, requires_grad=True)
    written = (x * 1)[:45]
    assert region_of(written, lossless=False)[1].numel == 90
    changed = x * 1
    with torch.no_grad():
        changed[50:] = 1e30
    assert region_of(changed[:45], lossless=False)[1].numel == 45
    leaf = torch.randn(90)[:45].requires_grad_()
    assert region_of(leaf, lossless=False)[1].numel == 45
    assert region_of(leaf, lossless=True)[1].numel == 90


def test_lazy_bits_are_not_part_of_the_source():
    z = torch.randn(6, dtype=torch.complex64)
    for lazy in (z.conj(), z.conj().imag, torch._neg_view(z)):
        source, _ = region_of(lazy, lossless=True)
        assert not source.is_conj()
        assert not source.is_neg()
        assert source.untyped_storage().data_ptr() == z.untyped_storage().data_ptr()
        assert not is_whole(lazy, z.nbytes)
    assert is_whole(z, z.nbytes)


@pytest.mark.parametrize(
    ("tensor", "whole"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), False),
        (torch.zeros(3, 4)[1:], False),
        (torch.zeros(3, 4).view(12), True),
        (torch.zeros(5, 1).t(), True),
        (torch.zeros(1).expand(1), True),
        (torch.zeros(1).expand(2), False),
        (torch.zeros(0, 4), True),
    ],
)
def test_is_whole(tensor, whole):
    assert is_whole(tensor, tensor.untyped_storage().nbytes()) is whole
