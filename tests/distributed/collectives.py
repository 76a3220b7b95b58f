"""The jobs of blocks that communicate in forward, by each way that PyTorch has, under a rule for collectives."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import fully_shard

from actstore import ActivationStore, tag
from tests.distributed.counting import check_counts, collectives
from tests.distributed.jobs import build_tp
from tests.distributed.training import (
    WIDTH,
    Rank,
    batch,
    check_equal,
    check_lossy,
    micro_batches,
    train,
)

# They got new names in PyTorch 2.13.
gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
scatter = getattr(functional, "reduce_scatter_single_autograd", None) or functional.reduce_scatter_tensor_autograd

WAITS = ("keep", "raw", "raw @ host", "raw @ disk", "expack")
DEPTH = 2


def once(wait: str = "keep", region: str = "recompute") -> str:
    """Recomputed blocks, in which collectives run once; what they make waits."""
    return f"blocks.*/@collective : {wait}; blocks.* : {region}"


class Sum(Function):
    """The sum over ranks, in place, as Megatron's row parallel layers compute it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Exchange(Function):
    """An all-to-all of equal parts of the first dimension, begun and waited for by the caller."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        work = dist.all_to_all_single(result, x.contiguous(), async_op=True)
        assert work is not None
        work.wait()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Exchange.apply(grad)  # type: ignore[no-any-return]


class Gather(Function):
    """The rows of all ranks, by a list of tensors; the statistics of all are only read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        most = x.abs().max().reshape(1)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.broadcast(most, 0)
        dist.barrier()
        return torch.cat(parts) / (1 + most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Block(nn.Module):
    """Nonlinear parts, so that backward reads what comes after each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.parts
        x = x + torch.sigmoid(self.mix(first(x).flatten(0, 1))).view_as(x)
        y = tag(self.spread(F.gelu(second(x))), "spread")
        return x + F.gelu(last(F.gelu(third(y))))

    def mix(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def spread(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Writing(Block):
    """Collectives that write to their arguments."""

    COUNT = 6

    def mix(self, rows: Tensor) -> Tensor:
        return Exchange.apply(rows)  # type: ignore[no-any-return]

    def spread(self, x: Tensor) -> Tensor:
        x = Gather.apply(Sum.apply(x * 1.5))
        return x.chunk(dist.get_world_size())[dist.get_rank()]


class Functional(Block):
    """Collectives that return tensors."""

    COUNT = 4

    def mix(self, rows: Tensor) -> Tensor:
        sizes = [len(rows) // dist.get_world_size()] * dist.get_world_size()
        return functional.all_to_all_single_autograd(rows, sizes, sizes, dist.group.WORLD)

    def spread(self, x: Tensor) -> Tensor:
        everything = gather(x, 0, dist.group.WORLD)
        part = scatter(torch.tanh(everything), "sum", 0, dist.group.WORLD)
        with torch.no_grad():
            mean = functional.all_reduce(part.square().mean(), "sum", dist.group.WORLD)
        return part / (1 + mean)


class Differentiable(Block):
    """Those of `torch.distributed.nn`, whose backward communicates, too. PyTorch 2.13 deprecates them."""

    COUNT = 2

    def mix(self, rows: Tensor) -> Tensor:
        return differentiable.all_to_all_single(torch.empty_like(rows), rows)  # type: ignore[no-any-return]

    def spread(self, x: Tensor) -> Tensor:
        return differentiable.all_reduce(x * 1.5)  # type: ignore[no-any-return]


WAYS: tuple[type[Block], ...] = (Writing, Functional, Differentiable)


def build(way: type[Block]) -> Rank:
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional", FutureWarning)
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(*(way() for _ in range(DEPTH)))))
    return Rank(model, micro_batches(model, dist.get_rank()))


def collectives_are_exact() -> None:
    for way in WAYS:
        reports = check_equal(partial(build, way), ("blocks.* : recompute", *map(once, WAITS)))
        assert reports[once("raw @ disk")].stored_bytes > 0
        check_equal(partial(build, way), ("blocks.*/spread : keep; blocks.* : recompute", f"*/spread : raw; {once()}"))


def collectives_run_once() -> None:
    for way in WAYS:
        again = {"blocks.* : recompute": DEPTH * way.COUNT}
        check_counts(partial(build, way), again | dict.fromkeys(("keep", *map(once, WAITS)), 0))


def ranks_may_recompute_other_blocks() -> None:
    """Without the rule, the blocks of the first rank would wait in backward for a rank that calls no collective."""
    policies = (once(), "keep", once("raw @ disk").replace("blocks.*", "blocks.1"))
    first = dist.get_rank() == 0
    for way in WAYS:
        check_equal(partial(build, way), policies if first else policies[::-1])


def collectives_with_a_loss() -> None:
    """What is written has no gradient of its own, and so waits exactly."""
    check_lossy(partial(build, Functional), once("int8"))
    check_equal(partial(build, Writing), (once("int8"),))
    for way in WAYS:
        for wait in ("int8", "keep"):
            check_lossy(partial(build, way), once(wait, "recompute(int8)"))


def a_stored_result_is_summed_in_place() -> None:
    """The sum over ranks is written to what waits; a later run sums what was there before."""
    for rule in ("@aten.mul : keep", "@aten.mul : raw", "@aten.* : keep"):
        check_equal(partial(build, Writing), (f"blocks.*/{rule}; blocks.* : recompute",))
        check_equal(partial(build, Writing), (f"blocks.*/{rule}; {once()}",))


def build_nested(reshard: bool) -> Rank:
    """Blocks in which FSDP gathers the weights of single layers, and of the next ones ahead."""
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(*(Writing() for _ in range(DEPTH)))))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        for part in block.parts:
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    return Rank(model, micro_batches(model, dist.get_rank()))


def weights_are_gathered_again() -> None:
    """The weights of a shard do not wait: a later run gathers them, and spares backward that."""
    for reshard in (True, False):
        check_equal(partial(build_nested, reshard), tuple(map(once, WAITS[:2])))
    check_counts(partial(build_nested, True), {"blocks.* : recompute": DEPTH * Writing.COUNT, once(): 0})
    torch.manual_seed(0)
    _, report = train(partial(build_nested, True), once())
    assert report is not None
    kept = [site.note for site in report.sites if "result of c10d" in site.note]
    assert kept
    assert not [note for note in kept if "_allgather_base_" in note]


def tensor_parallel_layers() -> None:
    """The layers of PyTorch's tensor and sequence parallelism communicate once."""
    for sequence in (False, True):
        check_equal(partial(build_tp, sequence=sequence), tuple(map(once, WAITS)))
        check_counts(partial(build_tp, sequence=sequence), {once(): 0})
        found = collectives(partial(build_tp, sequence=sequence), "blocks.* : recompute").total()
        assert found > collectives(partial(build_tp, sequence=sequence), None).total()


class Totals(nn.Module):
    """Sums over ranks in a buffer, and counts on from there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("total", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.first(x))
        dist.all_reduce(self.total)
        return torch.sigmoid(self.second(torch.tanh(y / (1 + self.total))))


def train_totals(policy: str | None, order: int) -> list[Tensor]:
    """The gradients and buffers after two forwards, whose backward runs in their order or in the other one."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(Totals(), Totals())))
    store: Any = ActivationStore(model, policy, min_bytes=0) if policy else nullcontext()
    losses: list[Tensor] = []
    for number in range(2):
        with store:
            losses.append(model(batch(number)).square().sum())
    for loss in losses[::order]:
        loss.backward()
    return [*(p.grad.clone() for p in model.parameters() if p.grad is not None), *(b.clone() for b in model.buffers())]


def sums_in_buffers_are_counted_once() -> None:
    for order in (1, -1):
        wanted = train_totals(None, order)
        for policy in (once("keep"), once("raw"), "blocks.* : recompute"):
            assert all(map(torch.equal, train_totals(policy, order), wanted)), (policy, order)


class Ahead(nn.Module):
    """Begins a sum over ranks, computes, and then waits for it. Rank 0 lets others take part once it has computed.

    So all ranks wait for ever where rank 0 waits at the beginning.
    """

    def __init__(self, name: str, *, functional_one: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.name, self.functional_one, self.calls = f"ahead/{next(NUMBERS)}/{name}", functional_one, 0

    def forward(self, x: Tensor) -> Tensor:
        store, key = _get_default_store(), f"{self.name}/{self.calls}"
        self.calls += 1
        if dist.get_rank() > 0:
            store.wait([key], timedelta(seconds=30))
        total, work = x.detach().clone(), None
        if self.functional_one:
            total = functional.all_reduce(total, "sum", dist.group.WORLD)
        else:
            work = dist.all_reduce(total, async_op=True)
        y = torch.tanh(self.first(x))
        if dist.get_rank() == 0:
            store.set(key, "computed")
        if work is not None:
            work.wait()
        return x + torch.sigmoid(self.second(y * total))


NUMBERS = count()  # of the modules of a rank: each has its own keys


def build_ahead(*, functional_one: bool) -> Rank:
    blocks = nn.Sequential(*(Ahead(str(i), functional_one=functional_one) for i in range(DEPTH)))
    model = nn.Sequential(OrderedDict(blocks=blocks))
    return Rank(model, micro_batches(model, dist.get_rank()))


def collectives_overlap() -> None:
    """Ranks compute while a collective that they wait for later is under way, in a first run and in a later one."""
    for functional_one in (False, True):
        build_one = partial(build_ahead, functional_one=functional_one)
        check_equal(build_one, ("keep", "blocks.* : recompute", *map(once, WAITS[:-1])))
        check_counts(build_one, {"blocks.* : recompute": DEPTH, once(): 0, once("raw @ disk"): 0})


class Unwaited(nn.Module):
    """Returns a sum over ranks for which its caller waits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        total = functional.all_reduce(x.detach(), "sum", dist.group.WORLD)
        return torch.tanh(self.inner(x)), total  # type: ignore[return-value]


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unwaited() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y, total = block(x)
            x = x + y * total
        return x


def build_unwaited() -> Rank:
    model = Reads()
    return Rank(model, micro_batches(model, dist.get_rank()))


def callers_may_wait_for_collectives() -> None:
    check_equal(build_unwaited, ("blocks.* : recompute", *map(once, WAITS[:-1])))
    check_counts(build_unwaited, {once(): 0, once("raw @ disk"): 0})
