"""One rank's part of a training job, plain and under stores, compared bit for bit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import monotonic, sleep

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from actstore import ActivationStore, Report
from actstore.base.storage import hold_weak
from tests.autograd.checks import check_drained, same_bits
from tests.distributed.launch import TRACING

WIDTH, HEADS, TOKENS, BATCH = 32, 4, 16, 4
LOSSLESS = (
    "keep", "derive", "raw", "raw @ host", "raw @ disk", "expack", "expack @ disk",
    "blocks.* : recompute", "blocks.* : recompute(raw @ disk)",
)  # fmt: skip
DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
COLLECTIVE_S = 20.0

Context = Callable[[], AbstractContextManager[object]]


class Block(nn.Module):
    """Attention and an MLP; each projection by itself, so that tensor parallelism can split it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = [f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.proj(seen))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(number: int, rank: int = -1) -> Tensor:
    """The micro-batch `number` of a rank, the same at every call."""
    generator = torch.Generator().manual_seed(1000 * number + rank + 1)
    return torch.randn(BATCH, TOKENS, WIDTH, generator=generator)


@dataclass
class Rank:
    """What a rank trains.

    Attributes
    ----------
    model : whose modules policies name, and whose parameters get gradients
    step : (number of the step, context to run forwards in) -> loss; forward and backward
    """

    model: nn.Module
    step: Callable[[int, Context], Tensor]


def loss_of(output: Tensor) -> Tensor:
    output = output.full_tensor() if isinstance(output, DTensor) else output
    return output.float().square().mean()


def micro_batches(
    model: nn.Module,
    rank: int,
    count: int = 1,
    alone: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> Callable[[int, Context], Tensor]:
    """A step that accumulates the gradients of `count` micro-batches; micro-batch i runs inside ``alone(i)``."""

    def step(number: int, context: Context) -> Tensor:
        losses = []
        for i in range(count):
            with alone(i):
                with context():
                    loss = loss_of(model(batch(number * count + i, rank)))
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    return step


Trace = list[dict[str, Tensor]]  # for each step the loss and the gradients by name


def train(
    build: Callable[[], Rank], policy: str | None, steps: int = 2, **options: object
) -> tuple[Trace, Report | None]:
    """Train a fresh model, under a store where a policy is given, and check what the store leaves behind."""
    torch.manual_seed(0)
    rank = build()
    store = ActivationStore(rank.model, policy, min_bytes=0, **options) if policy is not None else None
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1)
    trace: Trace = []
    for number in range(steps):
        torch.manual_seed(100 * number + dist.get_rank())
        optimizer.zero_grad()
        loss = rank.step(number, lambda: store or nullcontext())
        grads = {
            name: local(p.grad).detach().clone() for name, p in rank.model.named_parameters() if p.grad is not None
        }
        trace.append({"loss": loss.detach().clone()} | grads)
        optimizer.step()
    if store is None:
        return trace, None
    report = store.report()
    del loss
    wait_for_collectives(store)
    check_drained(store)
    store.close()
    return trace, report


def wait_for_collectives(store: ActivationStore) -> None:
    """Wait for the tensors of collectives that have ended: Gloo's thread lets them go some milliseconds later."""
    end = monotonic() + COLLECTIVE_S
    while store.report().live_bytes and monotonic() < end:
        sleep(0.001)


def check_equal(
    build: Callable[[], Rank], policies: tuple[str, ...] = LOSSLESS, **options: object
) -> dict[str, Report]:
    """Each policy gives the gradients of the job without a store, and leaves no file and no thread."""
    train(build, None)  # the first step of a process may round in another way
    wanted, _ = train(build, None)
    again, _ = train(build, None)
    problems = different(again, wanted, "plain, run twice")
    reports: dict[str, Report] = {}
    for policy in policies:
        with nothing_left():
            found, report = train(build, policy, **options)
        assert report is not None
        reports[policy] = report
        problems += different(found, wanted, policy)
    assert not problems, "\n".join(problems)
    return reports


def check_lossy(build: Callable[[], Rank], policy: str = "int8", most: float = 0.05) -> None:
    """A lossy policy is off by a little, and by the same in every run."""
    wanted, _ = train(build, None)
    found, _ = train(build, policy)
    again, _ = train(build, policy)
    problems = different(again, found, f"{policy}, run twice")
    errors = {
        n: float((g - wanted[0][n]).norm() / wanted[0][n].norm())
        for n, g in found[0].items()
        if wanted[0][n].norm() > 1e-6
    }
    assert not problems, "\n".join(problems)
    assert max(errors.values()) < most, errors
    assert max(errors.values()) > 0, "nothing was encoded"


def different(found: Trace, wanted: Trace, what: str) -> list[str]:
    problems = []
    for number, (ours, plain) in enumerate(zip(found, wanted, strict=True)):
        names = [n for n in plain if n not in ours or not same_bits(ours[n], plain[n])]
        if names or list(ours) != list(plain):
            problems.append(f"{what}: step {number} differs in {names or [set(ours) ^ set(plain)]}")
    return problems


def local(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Saved:
    """Hooks that count what plain autograd saves on this rank: each storage once, parameters and buffers excluded."""

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}
        self.parameters: set[int] = set()

    def pack(self, tensor: Tensor) -> Tensor:
        inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        inner = getattr(inner, "elem", inner)
        storage = inner.untyped_storage()
        hold_weak(storage)  # for the life of the process: no address is used twice
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            self.parameters.add(storage._cdata)
        self.keys[storage._cdata] = storage.nbytes()
        return tensor.detach()

    @property
    def nbytes(self) -> int:
        return sum(nbytes for key, nbytes in self.keys.items() if key not in self.parameters)


def saved_nbytes(build: Callable[[], Rank]) -> int:
    """What plain autograd saves in the last forward of a step, in bytes."""
    torch.manual_seed(0)
    rank = build()
    made: list[Saved] = []

    def context() -> AbstractContextManager[object]:
        made.append(Saved())
        return saved_tensors_hooks(made[-1].pack, lambda tensor: tensor)

    rank.step(0, context)
    return made[-1].nbytes


def check_acted(reports: dict[str, Report], saved: int) -> None:
    """All that autograd saves was counted, and went where each policy says; parameters did not."""
    for policy, report in reports.items():
        assert report.saved_bytes == saved, f"{policy}: {report.saved_bytes} of {saved}\n{report}"
    for policy in ("raw", "raw @ host", "raw @ disk"):
        kept = [(site.site, site.note) for site in reports[policy].sites if site.note.startswith("kept")]
        assert kept == [], policy
        assert saved <= reports[policy].stored_bytes <= 1.3 * saved, f"{policy}: {saved}\n{reports[policy]}"
    used = {medium.tier: medium.peak_bytes for medium in reports["raw @ disk"].media}
    assert used["disk"] > 0.5 * saved, f"{used}: {saved}"
    recomputed = reports["blocks.* : recompute(raw @ disk)"]
    assert 0 < recomputed.stored_bytes < 0.5 * saved


@contextmanager
def nothing_left() -> Iterator[None]:
    """What runs inside leaves no thread of the store and no open file."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    assert left == []
    assert open_files() - files == set()


def open_files() -> set[str]:
    found = set()
    with TRACING:
        for number in os.listdir("/proc/self/fd"):
            try:
                found.add(os.readlink(f"/proc/self/fd/{number}"))
            except FileNotFoundError:  # the one that lists the folder
                continue
    kept = "/kernels.lock"  # of compiled kernels, until the process ends
    return {
        path for path in found if path.startswith("/") and not path.startswith(("/dev/", "/proc/")) and kept not in path
    }
