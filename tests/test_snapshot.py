"""A snapshot has the bytes of the moment it was taken, whatever becomes of the tensor; and nobody copies them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore.snapshot import address_of, snapshot, view_of

NUMEL = 50_000


def shared(tensor):
    """Whether the memory under a tensor is also another one's."""
    return torch._C._is_cow_tensor(tensor)


def bytes_of(tensor):
    return tensor.detach().clone().view(torch.uint8).numpy().tobytes()


def taken(tensor):
    memory = snapshot(tensor)
    assert memory is not None
    assert (memory.dtype, memory.shape) == (torch.uint8, (tensor.nbytes,))
    assert address_of(memory) == address_of(tensor)
    return memory


def resize(x):
    x.untyped_storage().resize_(0)


def grow(x):
    x.untyped_storage().resize_(8 * NUMEL)
    x.resize_(2 * NUMEL)


CHANGES = {
    "in place": lambda x: x.add_(1),
    "through .data": lambda x: x.data.mul_(2),
    "through a detached alias": lambda x: x.detach().zero_(),
    "through a view": lambda x: x[10:20].fill_(3),
    "one element": lambda x: x.__setitem__(5, 1.5),
    "through NumPy": lambda x: x.numpy().fill(4),
    "through DLPack": lambda x: torch.from_dlpack(x).fill_(4),
    "other memory": lambda x: x.set_(torch.zeros(3)),
    "its storage is freed": resize,
    "its storage grows": grow,
    "by an operator with out=": lambda x: torch.add(torch.ones(NUMEL), 1, out=x),
    "random numbers": lambda x: x.normal_(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_the_bytes_stay_when_the_tensor_changes(how):
    x = torch.randn(NUMEL)
    wanted = bytes_of(x)
    memory = taken(x)
    CHANGES[how](x)
    assert bytes(view_of(memory)) == wanted
    if how not in ("its storage is freed", "its storage grows", "other memory"):
        assert bytes_of(x) != wanted


def test_the_bytes_stay_when_the_tensor_is_dropped():
    x = torch.randn(NUMEL)
    wanted, address, memory = bytes_of(x), address_of(x), taken(x)
    nbytes = x.nbytes
    del x
    assert all(address_of(torch.full((nbytes // 4,), 7.0)) != address for _ in range(20))
    assert bytes(view_of(memory)) == wanted


def test_who_writes_to_the_snapshot_leaves_the_tensor_alone():
    x = torch.randn(NUMEL)
    wanted, memory = bytes_of(x), taken(x)
    memory.fill_(0)
    assert bytes_of(x) == wanted


def test_the_tensor_has_its_memory_for_itself_again():
    x = torch.randn(NUMEL)
    address, memory = address_of(x), taken(x)
    del memory
    x.add_(1)
    assert address_of(x) == address


def test_two_snapshots_of_one_tensor():
    x = torch.randn(NUMEL)
    first, wanted = taken(x), bytes_of(x)
    second = taken(x)
    x.add_(1)
    third = taken(x)
    del first
    assert bytes(view_of(second)) == wanted
    assert bytes(view_of(third)) == bytes_of(x)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.bfloat16, (33, 7)), (torch.float64, (5,)), (torch.bool, (3, 3)), (torch.complex64, (9,))],
)
def test_any_dtype_and_dense_layout(dtype, shape):
    x = torch.randn(shape).to(dtype).t() if len(shape) == 2 else torch.randn(shape).to(dtype)
    memory = taken(x)
    assert bytes(view_of(memory)) == bytes(x.t().contiguous().view(torch.uint8).view(-1).tolist())


def exported():
    x = torch.randn(NUMEL)
    return x, x.numpy()


REFUSED = {
    "exported to NumPy": exported,
    "from NumPy": lambda: (torch.from_numpy(np.zeros(NUMEL)),),
    "from DLPack": lambda: (torch.from_dlpack(np.zeros(NUMEL)),),
    "from a buffer": lambda: (torch.frombuffer(bytearray(4 * NUMEL), dtype=torch.float32),),
    "in shared memory": lambda: (torch.zeros(NUMEL).share_memory_(),),
    "a part of its storage": lambda: (torch.randn(NUMEL)[1:],),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_memory_that_others_may_have_is_refused(kind):
    x, *_others = REFUSED[kind]()
    assert snapshot(x) is None
    assert not shared(x)


IMAGE = (4, 8, 24, 24)
READERS = {
    "linear": (nn.Linear(64, 64), (32, 64)),
    "layer norm": (nn.LayerNorm(64), (32, 64)),
    "gelu": (F.gelu, (32, 64)),
    "tanh": (torch.tanh, (32, 64)),
    "softmax": (lambda x: x.softmax(-1), (32, 64)),
    "dropout": (F.dropout, (32, 64)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (2, 4, 32, 16)),
    "convolution": (nn.Conv2d(8, 8, 3), IMAGE),
    "batch norm": (nn.BatchNorm2d(8), IMAGE),
    "max pool": (nn.MaxPool2d(2), IMAGE),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", READERS)
def test_operators_that_only_read_do_not_make_torch_copy(name, dtype):
    operator, shape = READERS[name]
    operator = operator.to(dtype) if isinstance(operator, nn.Module) else operator
    x = torch.randn(shape).to(dtype)
    memory = taken(x)
    operator(x)
    assert shared(x)
    assert address_of(x) == address_of(memory)


def test_a_view_is_read_only_and_follows_a_slice():
    memory = taken(torch.arange(1000))
    view = view_of(memory[80:96])
    assert bytes(view) == (10).to_bytes(8, "little") + (11).to_bytes(8, "little")
    assert view.readonly
