"""The jobs of ranks that share the storage of equal tensors. Each raises on the ranks where something is wrong."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path
from time import sleep
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from actstore import ActivationStore, Group, Window
from actstore.errors import ReplicaError, TransferError
from actstore.tiers.group import GroupTier, Peers
from tests.autograd.checks import check_drained, same_bits
from tests.distributed.jobs import build_tp
from tests.distributed.training import Model, batch, check_equal, local, loss_of

WAIT_S = 20.0
POLICIES = tuple(f"blocks.* : {wait}" for wait in ("recompute(raw @ group)", "recompute(expack @ group > host)"))


def group(wait_s: float = WAIT_S) -> list[Group | Window]:
    """The tiers of a store that keeps little on the device of what has left it."""
    return [Group(dist.group.WORLD, wait_s=wait_s), Window("4KiB")]


def group_is_exact() -> None:
    check_equal(build_tp, POLICIES, tiers=group())


def group_holds_a_slice() -> None:
    """Of equal inputs, each rank holds one slice, and the smallest bytes beside it."""
    held = {policy: held_nbytes(policy) for policy in ("recompute", "recompute(raw @ group)")}
    most = (1 / dist.get_world_size() + 0.02) * held["recompute"]
    assert 0 < held["recompute(raw @ group)"] <= most, held


def held_nbytes(policy: str) -> int:
    """The bytes that the inputs of blocks hold between forward and backward, once they have left."""
    torch.manual_seed(0)
    rank = build_tp()
    store = ActivationStore(rank.model, f"blocks.* : {policy}", min_bytes=0, tiers=group() if "group" in policy else ())
    with store:
        loss = loss_of(rank.model(batch(0)))
    land(store)
    held = sum(store._store.ledger.held_by_module().get(f"blocks.{i}", 0) for i in range(2))
    loss.backward()
    store.close()
    return held


def land(store: ActivationStore) -> None:
    """Wait until all that leaves the device has left."""
    for place in store._store._places.values():
        for window in place.engine._traffic.quota.windows.values():
            for parcel in list(window.flights):
                if parcel.motion is not None:
                    parcel.motion.result()
    store._store.poll()


def llama() -> None:
    """Of a Llama under tensor parallelism on four ranks, the inputs of blocks hold 0.27 of what `recompute` holds."""
    found = {policy: train_llama(policy) for policy in ("keep", "recompute", "recompute(raw @ group)")}
    wanted = found["keep"][1]
    for policy, (_, grads) in found.items():
        assert all(map(same_bits, grads, wanted)), policy
    held = {policy: nbytes for policy, (nbytes, _) in found.items()}
    assert 0 < held["recompute(raw @ group)"] <= 0.27 * held["recompute"], held


def train_llama(policy: str) -> tuple[int, list[Tensor]]:
    """The bytes that the inputs of blocks hold between forward and backward, and the gradients of the second step."""
    import transformers  # here: it takes seconds

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    plan: dict[str, ParallelStyle] = {f"*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"*.{name}": RowwiseParallel() for name in rows}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    tiers = [Group(mesh, wait_s=WAIT_S), Window("4KiB")] if "group" in policy else []
    store = ActivationStore(model, f"model.layers.* : {policy}", min_bytes=0, tiers=tiers)
    tokens = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(1))
    held = 0
    for _ in range(2):
        model.zero_grad()
        with store:
            loss = model(input_ids=tokens, labels=tokens).loss
        land(store)
        held = sum(n for name, n in store.held_by_module().items() if name.startswith("model.layers."))
        loss.backward()
    grads = [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
    del loss
    check_drained(store)
    store.close()
    return held, grads


def other_tensors_are_refused() -> None:
    """One element differs on one rank: an error names the site, two ranks and the bytes. The next step is right."""
    rank, own, last = build_tp(), dist.get_rank(), dist.get_world_size() - 1
    store = ActivationStore(rank.model, "blocks.0 : recompute(raw @ group)", min_bytes=0, tiers=group())
    x = batch(0)
    if own == last:
        x[0, 0, 0] += 1
    text = ""
    try:
        with store:
            loss = loss_of(rank.model(x))
        land(store)
    except ReplicaError as error:
        text = str(error)
    slice_nbytes = x.nbytes // dist.get_world_size()
    other = 0 if own == last else last
    wanted = (
        f"ranks {own} and {other} have different tensors: of {x.nbytes} bytes those from 0 to {slice_nbytes} differ"
    )
    assert text.startswith(f"blocks.0[0]: {wanted}"), text
    del loss
    with store:
        loss = loss_of(rank.model(batch(1)))
    loss.backward()
    del loss
    land(store)
    check_drained(store)
    store.close()


def ranks_read_in_their_own_order() -> None:
    """Ranks without collectives go backward in different orders, drop different graphs, and leave nothing."""
    own, last = dist.get_rank(), dist.get_world_size() - 1
    model, store = replicated()
    wanted = [gradients(model, loss_of(model(batch(number)))) for number in range(4)]
    losses: list[Tensor | None] = []
    for number in range(4):
        with store:
            losses.append(loss_of(model(batch(number))))
    order = [own % 4, (own + 1) % 4]  # the other two are dropped
    for number in order:
        loss = losses[number]
        assert loss is not None
        assert all(map(torch.equal, gradients(model, loss), wanted[number])), number
        losses[number] = loss = None
    losses.clear()

    def fail(module: nn.Module, args: object) -> None:
        if own == last:
            raise ZeroDivisionError

    hook = model.blocks[1].register_forward_pre_hook(fail, prepend=True)
    with warnings.catch_warnings(record=True, action="always") as caught:
        with suppress(ZeroDivisionError), store:
            loss_of(model(batch(0)))
        hook.remove()
        with store:
            loss = loss_of(model(batch(1)))
        assert all(map(torch.equal, gradients(model, loss), wanted[1]))
        land(store)
    texts = [str(each.message) for each in caught]
    assert all("has gone on to another step without this tensor" in text for text in texts), texts
    del loss
    check_drained(store)
    tier = tier_of(store)
    store.close()
    assert tier._replicas == {}, list(tier._replicas)


def replicated(wait_s: float = WAIT_S) -> tuple[Model, ActivationStore]:
    """A model that all ranks have, which calls no collective, and its store."""
    torch.manual_seed(0)
    model = Model()
    return model, ActivationStore(model, "blocks.* : recompute(raw @ group)", min_bytes=0, tiers=group(wait_s))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def tier_of(store: ActivationStore) -> GroupTier:
    tier = store._store.place(torch.device("cpu")).tier("group")
    assert isinstance(tier, GroupTier)
    return tier


def loses_a_rank(rank: int, folder: str, wait_s: float) -> None:
    """Rank 1 of two is lost between forward and backward, or once rank 0 asks it for a slice.

    Rank 0 writes what it raises, and what it has left.
    """
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/rendezvous", 2), rank=rank, world_size=2)
    model, store = replicated(wait_s)
    with store:
        loss = loss_of(model(batch(0)))
    land(store)
    dist.barrier()
    Path(folder, f"landed.{rank}").touch()
    while rank == 1 or not Path(folder, "lost").exists():
        sleep(0.01)
    get = Peers.get

    def ask(peers: Peers, rank: int, name: str) -> bytes:
        Path(folder, "asked").touch()
        return get(peers, rank, name)

    with mock.patch.object(Peers, "get", ask), pytest.raises(TransferError) as raised:
        loss.backward()
    del loss
    tier = tier_of(store)
    store.close()
    left = list(tier._replicas)
    Path(folder, "raised").write_text(f"{raised.value.rank} {left} {raised.value}")  # type: ignore[attr-defined]
    os._exit(0)  # the process group of a killed rank does not end by itself
