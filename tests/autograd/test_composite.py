"""Tensors that are made of others, such as DTensor: their parts wait like tensors of their own."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from actstore import ActivationStore
from actstore.errors import MutationError
from tests.autograd.checks import check_drained, check_same, gc_off

SIZE = 64 * 16 * 4  # bytes of one of the tensors
MOVED = ["raw", "raw @ host", "raw @ disk", "expack @ disk"]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One process is a mesh, too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def dtensor(mesh: DeviceMesh, seed: int = 0) -> Tensor:
    return distribute_tensor(values(seed), mesh, [Shard(0)])


def two(_: DeviceMesh, seed: int = 0) -> Tensor:
    return TwoTensor(values(seed), values(seed + 10))


def jagged(_: DeviceMesh, seed: int = 0) -> Tensor:
    offsets = torch.tensor([0, 10, 15, 64])
    return torch.nested.nested_tensor_from_jagged(values(seed), offsets, min_seqlen=5, max_seqlen=49)


def values(seed: int) -> Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))


KINDS = {"dtensor": (dtensor, 1), "two": (two, 2), "jagged": (jagged, 1)}  # and how many tensors each is made of


def plain(tensor: Tensor) -> tuple[Tensor, ...]:
    if isinstance(tensor, DTensor):
        return (tensor.to_local(),)
    return (tensor.a, tensor.b) if isinstance(tensor, TwoTensor) else (tensor.values(),)


def program(x: Tensor) -> Tensor:
    return (x * x.sin()).exp()


def gradient(make, mesh, store=None):
    x = make(mesh).requires_grad_()
    if store is None:
        y = program(x)
    else:
        with store:
            y = program(x)
    y.backward(torch.ones_like(y))
    return plain(x.grad.detach())


@pytest.mark.parametrize("policy", MOVED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_wrapper_are_moved_exactly(mesh, kind, policy):
    make, count = KINDS[kind]
    store = ActivationStore(policy=policy, min_bytes=0)
    with gc_off():
        check_same(gradient(make, mesh, store), gradient(make, mesh))
        report = store.report()
        assert report.saved_bytes == 3 * count * SIZE  # x, x.sin() and the output; x is saved twice
        assert report.stored_bytes == pytest.approx(report.saved_bytes, rel=0.3)
        assert [site.note for site in report.sites if "kept" in site.note] == []
        check_drained(store)
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_that_is_dropped_leaves_nothing(mesh, kind):
    store = ActivationStore(policy="raw @ disk", min_bytes=0)
    with gc_off():
        with store:
            y = program(KINDS[kind][0](mesh).requires_grad_())
        del y
        check_drained(store)
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_small_parts_are_kept_and_counted(mesh, kind):
    make, count = KINDS[kind]
    store = ActivationStore(policy="raw @ disk")
    check_same(gradient(make, mesh, store), gradient(make, mesh))
    assert store.report().saved_bytes == 3 * count * SIZE
    assert store.report().stored_bytes == 0
    check_drained(store)


@pytest.mark.parametrize("policy", ["keep", "raw"])
@pytest.mark.parametrize("kind", ["dtensor", "two"])
def test_a_write_to_the_wrapper_has_plains_verdict(mesh, kind, policy):
    def run(store):
        x = KINDS[kind][0](mesh).requires_grad_()
        with store:
            y = x * 2
            z = y.sin()
        with torch.no_grad():
            y.add_(1)
        z.backward(torch.ones_like(z))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(torch.enable_grad())
    store = ActivationStore(policy=policy, min_bytes=0)
    with pytest.raises(MutationError, match="modified by an inplace operation"):
        run(store)


@pytest.mark.parametrize("kind", ["dtensor", "two"])
def test_views_between_two_writes_do_not_share_a_payload(mesh, kind):
    def run(store):
        x = KINDS[kind][0](mesh).requires_grad_()
        y = x * 2
        with store:
            first = y.view(-1).sin()
            second = y.view(-1).cos()
            with torch.no_grad():
                y.add_(1)
            third = y.view(-1).cos()
        (third if store_is_last else first + second).backward(torch.ones_like(first))
        return plain(x.grad.detach())

    store_is_last = True
    store = ActivationStore(policy="raw", min_bytes=0)
    check_same(run(store), run(torch.enable_grad()))
    assert store.report().stored_bytes == 2 * KINDS[kind][1] * SIZE  # the second shares the first one's, the third not
    store_is_last = False
    with pytest.raises(MutationError):
        run(store)


def test_allowed_mutation_gives_the_value_at_the_time_of_saving(mesh):
    x = dtensor(mesh).requires_grad_()
    store = ActivationStore(policy="raw", min_bytes=0, allow_mutation=True)
    with store:
        y = x * 2
        z = y.sin()
    with torch.no_grad():
        y.add_(1)
    z.backward(torch.ones_like(z))
    check_same(x.grad.to_local(), 2 * (x * 2).cos().detach().to_local())


def test_lossy_codecs_take_the_values_of_a_wrapper_and_not_the_parts_of_others(mesh):
    for kind, lossy in (("dtensor", True), ("jagged", True), ("two", False)):
        store = ActivationStore(policy="unprotected int8", min_bytes=0)
        make = KINDS[kind][0]
        found, wanted = gradient(make, mesh, store), gradient(make, mesh)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
        assert [0 < error < 0.05 for error in errors] == [lossy] * len(errors), (kind, errors)
        if not lossy:
            check_same(found, wanted)
            assert {site.note for site in store.report().sites} == {"kept: a part of a TwoTensor"}


def test_what_requires_no_gradient_is_never_lossy_in_a_wrapper(mesh):
    def run(store):
        weight = dtensor(mesh, 1).requires_grad_()
        with store:
            y = dtensor(mesh) * weight
        y.backward(torch.ones_like(y))
        return weight.grad.to_local()

    check_same(run(ActivationStore(policy="int8 @ host", min_bytes=0)), run(torch.enable_grad()))


@pytest.mark.parametrize("with_model", [True, False])
def test_parameters_and_buffers_of_every_class_are_neither_moved_nor_counted(mesh, with_model):
    linear = nn.Linear(16, 16, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Replicate()]))
    linear.register_buffer("scale", distribute_tensor(torch.ones(64, 16), mesh, [Shard(0)]))
    store = ActivationStore(linear if with_model else None, "raw", min_bytes=0)
    x = dtensor(mesh).requires_grad_()
    with store:
        y = linear(linear(x)) * linear.scale
    report = store.report()
    assert report.saved_bytes == report.stored_bytes == (2 if with_model else 3) * SIZE  # no model: no buffers
    y.backward(torch.ones_like(y))
    check_drained(store)


@pytest.mark.parametrize("policy", ["keep", "raw @ disk"])
def test_a_collective_that_still_runs_is_waited_for(monkeypatch, policy):
    late = []

    def wait(self):
        if late:
            self.elem.copy_(late.pop())  # what the collective brings, once
        return self.elem

    def run(store):
        weight = torch.full((16,), 2.0, requires_grad=True)
        late.append(values(0))
        gathered = AsyncCollectiveTensor(torch.zeros(64, 16)).requires_grad_()
        with store:
            y = gathered * weight
        y.sum().backward()
        return weight.grad

    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", wait)
    store = ActivationStore(policy=policy, min_bytes=0)
    check_same(run(store), run(torch.enable_grad()))
    assert store.report().saved_bytes == SIZE + 64
    assert store.report().stored_bytes == (SIZE + 64 if policy == "raw @ disk" else 0)
    check_drained(store)


class Sealed(torch.Tensor):
    """A wrapper whose part can be read, and not set."""

    @staticmethod
    def __new__(cls, part):
        return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)

    def __init__(self, part):
        self._part = part

    @property
    def part(self):
        return self._part

    def __tensor_flatten__(self):
        return ["part"], None

    @staticmethod
    def __tensor_unflatten__(parts, form, shape, stride):
        return Sealed(parts["part"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        inner = [each._part if isinstance(each, Sealed) else each for each in args]
        return return_and_correct_aliasing(function, args, kwargs or {}, Sealed(function(*inner, **(kwargs or {}))))


def test_a_wrapper_that_cannot_be_taken_apart_is_kept():
    def gradient(store):
        x = Sealed(values(0)).requires_grad_()
        with store or nullcontext():
            y = x.sin()
        y.backward(Sealed(values(1)))
        return (x.grad._part,)

    check_same(gradient(ActivationStore(policy="raw", min_bytes=0)), gradient(None))
