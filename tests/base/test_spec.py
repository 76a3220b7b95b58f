import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Site, Spec
from actstore.errors import SpecError


@pytest.mark.parametrize(
    ("tensor", "shape", "stride", "nbytes"),
    [
        (torch.zeros(2, 3), (2, 3), (3, 1), 24),
        (torch.zeros(2, 3).t(), (3, 2), (1, 3), 24),
        (torch.zeros(2, 1, dtype=torch.bfloat16).expand(2, 5), (2, 5), (1, 0), 20),
        (torch.zeros(()), (), (), 4),
        (torch.zeros(0, 4, dtype=torch.float64), (0, 4), (4, 1), 0),
        (torch.zeros(3, dtype=torch.bool), (3,), (1,), 3),
        (torch.zeros(4, dtype=torch.complex64)[::2], (2,), (2,), 16),
    ],
)
def test_a_spec_says_what_must_come_back(tensor, shape, stride, nbytes):
    spec = Spec.of(tensor)
    assert (spec.shape, spec.stride, spec.dtype, spec.device) == (shape, stride, tensor.dtype, tensor.device)
    assert spec.nbytes == nbytes
    assert spec.numel == tensor.numel()
    assert type(spec.shape) is tuple, "torch.Size is slower to hash and to compare"
    assert {spec: 1}[Spec.of(tensor)] == 1
    assert pickle.loads(pickle.dumps(spec)) == spec


@given(st.lists(st.integers(0, 5), max_size=4), st.randoms(use_true_random=False))
def test_an_empty_tensor_of_a_spec_has_that_spec(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    spec = Spec.of(torch.zeros(shape).permute(order))
    spec.check(spec.empty())
    assert spec.empty().untyped_storage().nbytes() == spec.nbytes


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, dtype=torch.float16),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(6),
    ],
)
def test_another_tensor_is_refused_with_both_specs(other):
    spec = Spec.of(torch.zeros(2, 3))
    with pytest.raises(SpecError) as caught:
        spec.check(other)
    assert str(caught.value) == (
        f"a tensor came back as {Spec.of(other)}, but float32 2x3 stride (3, 1) on cpu was saved."
    )
    assert caught.value.expected == spec
    assert caught.value.found == Spec.of(other)


def test_specs_and_sites_are_written_for_people():
    assert str(Spec.of(torch.zeros(()))) == "float32 scalar stride () on cpu"
    assert str(Site("blocks.3.mlp", 2)) == "blocks.3.mlp[2]"
    assert str(Site("blocks.3.attn", 0, "qkv")) == "blocks.3.attn/qkv[0]"
    assert str(Site("", 5)) == "(top)[5]"
    assert Site("a", 0) == Site("a", 0, "")
