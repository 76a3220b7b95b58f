"""A mixture whose experts are spread over the ranks: rows of tokens travel to them and back by all-to-all."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from actstore import ActivationStore
from tests.distributed.counting import check_counts
from tests.distributed.training import (
    LOSSLESS,
    WIDTH,
    Rank,
    batch,
    check_acted,
    check_equal,
    check_lossy,
    loss_of,
    micro_batches,
    saved_nbytes,
    train,
)

EACH, CHOSEN, DEPTH = 2, 2, 2  # experts of a rank, experts of a token, blocks
COLLECTIVES = 3  # of a block in forward; backward sends no counts


class Dispatch(nn.Module):
    """Sends rows to the ranks of their experts, and says how many came from each rank for each expert."""

    def forward(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        came = all_to_all_single(counts, None, None, dist.group.WORLD)
        return send(rows, came, counts), came


class Combine(nn.Module):
    """Sends rows back to where they came from."""

    def forward(self, rows: Tensor, counts: Tensor, came: Tensor) -> Tensor:
        return send(rows, counts, came)


def send(rows: Tensor, come: Tensor, go: Tensor) -> Tensor:
    return all_to_all_single_autograd(rows, come.sum(1).tolist(), go.sum(1).tolist(), dist.group.WORLD)


class Mixture(nn.Module):
    """Sends each token to its best experts."""

    def __init__(self) -> None:
        super().__init__()
        count = EACH * dist.get_world_size()
        self.router = nn.Linear(WIDTH, count)
        experts = [nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(count)]
        self.experts = nn.ModuleList(experts[EACH * dist.get_rank() :][:EACH])
        self.dispatch, self.combine = Dispatch(), Combine()
        self.chosen = nn.Identity()  # for hooks, which see the experts of all tokens in each run

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.choose(tokens)
        order = self.chosen(chosen).flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.router.out_features).view(-1, EACH)
        rows, came = self.dispatch(tokens[order // CHOSEN], counts)
        expert = torch.arange(EACH).repeat(len(came)).repeat_interleave(came.flatten())
        results = torch.zeros(rows.shape)
        for i, each in enumerate(self.experts):
            index = (expert == i).nonzero().squeeze(1)
            results = results.index_copy(0, index, each(rows[index]))
        back = self.combine(results, counts, came) * weights.flatten()[order, None]
        return torch.zeros(tokens.shape).index_add(0, order // CHOSEN, back).view(x.shape)

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of the experts of each token."""
        return self.router(tokens).softmax(-1).topk(CHOSEN)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.moe = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Mixture()

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.mix(self.norm(x)))
        return x + self.moe(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build() -> Rank:
    model = Model()
    return Rank(model, micro_batches(model, dist.get_rank()))


RULED = "blocks.*/@collective : keep; blocks.* : recompute"


def once(wait: str, region: str = "recompute") -> str:
    """Recomputed blocks, whose exchanges run once; what they return waits."""
    return f"blocks.*.moe.dispatch : {wait}; blocks.*.moe.combine : {wait}; blocks.* : {region}"


ALIKE = tuple(policy for policy in LOSSLESS if "expack" not in policy and policy != "derive")
ONCE = (RULED, *(once(wait) for wait in ("keep", "raw", "raw @ host", "raw @ disk")))


def experts_are_exact() -> None:
    check_equal(build, (*ALIKE, *ONCE))
    # One step: in the next one tokens take other ways, and other bytes are saved.
    reports = {policy: report for policy in ALIKE if (report := train(build, policy, steps=1)[1])}
    check_acted(reports, saved_nbytes(build))


def experts_exchange_as_often() -> None:
    """A recomputed block exchanges its rows again, and one whose exchanges are excepted does not."""
    once_only = dict.fromkeys(("keep", "raw @ disk", RULED, ONCE[1], ONCE[-1]), 0)
    check_counts(build, once_only | {"blocks.* : recompute": DEPTH * COLLECTIVES})


def experts_with_a_loss() -> None:
    for policy in ("int8", "blocks.* : recompute(int8)", once("int8", "recompute(int8)")):
        check_lossy(build, policy)


def no_token_is_rerouted() -> None:
    """The second run sends tokens where the first one did, and would not if it chose anew from what came back."""
    for policy in ("blocks.* : recompute(int8)", once("keep", "recompute(int8)")):
        torch.manual_seed(0)
        model = Model()
        inputs: list[Tensor] = []
        routes: list[Tensor] = []
        block = model.blocks[1]
        block.norm.register_forward_hook(lambda _, args, out, seen=inputs: seen.append(args[0].detach()))
        block.moe.chosen.register_forward_hook(lambda _, args, out, seen=routes: seen.append(out))
        with ActivationStore(model, policy, min_bytes=0):
            loss = loss_of(model(torch.cat([batch(i, dist.get_rank()) for i in range(32)])))
        loss.backward()
        first, second = routes
        assert torch.equal(first, second), policy
        given, decoded = inputs
        assert not torch.equal(given, decoded)
        with torch.no_grad():
            _, anew = block.moe.choose((decoded + F.gelu(block.mix(block.norm(decoded)))).flatten(0, -2))
        flips = (anew != first).sum()
        dist.all_reduce(flips)
        assert flips > 0, policy
