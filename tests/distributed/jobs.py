"""The jobs that ranks run. Each raises on the ranks where a store changes what plain training does."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from actstore import ActivationStore, Disk, Host, Report
from tests.distributed.training import (
    Block,
    Context,
    Model,
    Rank,
    batch,
    check_acted,
    check_equal,
    check_lossy,
    different,
    loss_of,
    micro_batches,
    saved_nbytes,
    train,
)

# -- data parallel ----------------------------------------------------------------------------------------------------


def build_ddp(count: int = 1, dropout: float = 0.0) -> Rank:
    """DDP; all micro-batches but the last in `no_sync`."""
    model = DistributedDataParallel(Model(dropout=dropout))
    return Rank(
        model,
        micro_batches(model, dist.get_rank(), count, lambda i: nullcontext() if i == count - 1 else model.no_sync()),
    )


def ddp() -> None:
    reports = check_equal(build_ddp)
    check_acted(reports, saved_nbytes(build_ddp))
    sites = {site.site.split("[")[0] for site in reports["raw"].sites}
    assert {"blocks.0", "blocks.1.norm2", "head"} <= sites, sites


def ddp_no_sync_dropout() -> None:
    check_equal(partial(build_ddp, 3, 0.25))
    check_lossy(partial(build_ddp, 2))


def ddp_budgets() -> None:
    """Each rank has a budget of its own. What does not fit goes to the next tier of that rank, or is kept there."""
    build, last = partial(build_ddp, 2), dist.get_rank() == dist.get_world_size() - 1
    ladder = check_equal(build, ("raw @ host > disk",), tiers=[Host(20_000 if last else "1GiB")])["raw @ host > disk"]
    assert (disk_peak(ladder) > 0) == last
    alone = check_equal(build, ("raw @ disk",), tiers=[Disk(budget=20_000 if last else "1GiB")])["raw @ disk"]
    assert any("no room" in site.note for site in alone.sites) == last
    assert 0 < disk_peak(alone) <= 20_000 or not last
    shared = check_equal(build, ("raw @ disk",), tiers=[Disk(budget=f"{20_000 * dist.get_world_size()}/node")])[
        "raw @ disk"
    ]
    assert 0 < disk_peak(shared) <= 20_000


def disk_peak(report: Report) -> int:
    """The most bytes on disk at once."""
    return sum(medium.peak_bytes for medium in report.media if medium.tier == "disk")


def ddp_one_rank_fails() -> None:
    """A forward that fails on one rank leaves no trace there, and the next step is that of plain training."""
    torch.manual_seed(0)
    wanted, _ = train(build_ddp, None)
    torch.manual_seed(0)
    rank = build_ddp()
    store = ActivationStore(rank.model, "raw @ disk", min_bytes=0)
    last = dist.get_world_size() - 1

    def fail(module: nn.Module, args: object) -> None:
        if dist.get_rank() == last:
            raise ZeroDivisionError

    hook = rank.model.module.blocks[1].down.register_forward_pre_hook(fail)
    failed = False
    try:
        with store:
            output = rank.model(batch(0, dist.get_rank()))
        del output
    except ZeroDivisionError:
        failed = True
    assert failed == (dist.get_rank() == last)
    hook.remove()
    assert store.report().live_bytes == 0
    torch.manual_seed(dist.get_rank())
    loss = rank.step(0, lambda: store)
    grads = {name: p.grad.clone() for name, p in rank.model.named_parameters()}
    problems = different([{"loss": loss} | grads], wanted[:1], "after a failed forward")
    assert not problems, problems
    store.close()


# -- fully sharded ----------------------------------------------------------------------------------------------------


def build_fsdp(*, reshard: bool, bf16: bool = False, count: int = 1, dropout: float = 0.0) -> Rank:
    """FSDP2, a group for each block and one for the rest; all micro-batches but the last do not reduce gradients."""
    model = Model(dropout=dropout)
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), reshard=reshard, bf16=bf16)

    def alone(i: int) -> nullcontext[None]:
        model.set_requires_gradient_sync(i == count - 1)
        return nullcontext()

    return Rank(model, micro_batches(model, dist.get_rank(), count, alone))


def shard(model: Model, mesh: DeviceMesh, *, reshard: bool, bf16: bool = False) -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)


def fsdp_reshard() -> None:
    build = partial(build_fsdp, reshard=True)
    reports = check_equal(build)
    saved = saved_nbytes(build)
    check_acted(reports, saved)
    model = Model()
    assert saved == saved_nbytes(
        lambda: Rank(model, micro_batches(model, dist.get_rank()))
    )  # unsharded weights are not


def fsdp_no_reshard() -> None:
    build = partial(build_fsdp, reshard=False)
    check_acted(check_equal(build), saved_nbytes(build))


def fsdp_bf16_accumulation_dropout() -> None:
    build = partial(build_fsdp, reshard=True, bf16=True, count=2, dropout=0.25)
    check_acted(check_equal(build), saved_nbytes(build))
    check_lossy(partial(build_fsdp, reshard=True))


# -- tensor and sequence parallel -------------------------------------------------------------------------------------


def build_tp(*, sequence: bool = False, replicas: int = 1) -> Rank:
    """Megatron's split of attention and MLP; with `sequence`, norms and residuals hold a part of the tokens.

    With `replicas`, FSDP2 shards each part over as many ranks.
    """
    model = Model()
    width = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, width), mesh_dim_names=("data", "tensor"))
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {name: RowwiseParallel() for name in ("proj", "down")}
    if sequence:
        plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("proj", "down")}
        plan |= {name: SequenceParallel() for name in ("norm1", "norm2")}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    if replicas > 1:
        shard(model, mesh["data"], reshard=True)

    def step(number: int, context: Context) -> Tensor:
        x = batch(number, dist.get_rank() // width)
        if sequence:
            x = x.chunk(width, 1)[dist.get_rank() % width].contiguous()  # of its own: `keep` counts small slices whole
        with context():
            loss = loss_of(model(x))
        loss.backward()
        return loss

    return Rank(model, step)


def tensor_parallel() -> None:
    check_acted(check_equal(build_tp), saved_nbytes(build_tp))
    check_lossy(build_tp)


def sequence_parallel() -> None:
    build = partial(build_tp, sequence=True)
    check_acted(check_equal(build), saved_nbytes(build))
    check_lossy(build)


def sharded_tensor_parallel() -> None:
    build = partial(build_tp, sequence=True, replicas=2)
    check_acted(check_equal(build), saved_nbytes(build))


# -- pipelines --------------------------------------------------------------------------------------------------------


def build_pipeline(schedule: type, chunks: int = 1) -> Rank:
    """A block for each stage, `chunks` stages a rank; forward and backward of all micro-batches in one context."""
    world, rank = dist.get_world_size(), dist.get_rank()
    count = world * chunks
    blocks = nn.ModuleList(Block(0.0) for _ in range(count))
    mine = (rank, count - 1 - rank) if schedule is ScheduleZBVZeroBubble else range(rank, count, world)
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks[i] for i in mine)})
    stages = [PipelineStage(blocks[i], i, count, torch.device("cpu")) for i in mine]
    runner = schedule(stages if chunks > 1 else stages[0], n_microbatches=2 * world, loss_fn=lambda y, _: loss_of(y))

    def step(number: int, context: Context) -> Tensor:
        x = torch.cat([batch(2 * world * number + i) for i in range(2 * world)])
        losses: list[Tensor] = []
        with context():
            first = (x,) if rank == 0 else ()
            if count - 1 in mine:
                runner.step(*first, target=x, losses=losses)
            else:
                runner.step(*first)
        return torch.stack(losses).detach() if losses else torch.zeros(1)

    return Rank(model, step)


def check_pipeline(schedule: type, chunks: int) -> None:
    # To learn shapes, PyTorch 2.13 runs each stage once on uninitialised memory, in the first step: on NaN, at times.
    warnings.filterwarnings("ignore", "step 1: .* elements lost", RuntimeWarning)
    build = partial(build_pipeline, schedule, chunks)
    reports = check_equal(build)
    for policy, report in reports.items():
        assert report.saved_bytes > 0, policy
        assert (report.stored_bytes > 0) == (policy not in ("keep", "derive", "blocks.* : recompute")), (
            f"{policy}\n{report}"
        )
    check_lossy(build)


def pipeline_gpipe() -> None:
    check_pipeline(ScheduleGPipe, 1)


def pipeline_1f1b() -> None:
    check_pipeline(Schedule1F1B, 1)


def pipeline_interleaved() -> None:
    check_pipeline(ScheduleInterleaved1F1B, 2)


def pipeline_zero_bubble() -> None:
    check_pipeline(ScheduleInterleavedZeroBubble, 2)


def pipeline_zero_bubble_v() -> None:
    """The first rank has the first stage and the last one."""
    check_pipeline(ScheduleZBVZeroBubble, 2)


# -- ends -------------------------------------------------------------------------------------------------------------


def one_rank_leaves() -> None:
    """The last rank ends by an exception with payloads in flight, while the others wait for it."""
    model = Model()
    store = ActivationStore(model, "raw @ disk", min_bytes=0)
    if dist.get_rank() == dist.get_world_size() - 1:
        with store:
            output = model(batch(0))
            raise SystemExit(f"left with {output.numel()} outputs")
    dist.barrier()
