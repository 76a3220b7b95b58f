"""The jobs of ranks that share the storage of equal tensors. Each raises on the ranks where something is wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist

from actstore import ActivationStore, Group, Window
from actstore.errors import ReplicaError
from tests.autograd.checks import check_drained
from tests.distributed.jobs import build_tp
from tests.distributed.training import batch, check_equal, loss_of

WAIT_S = 20.0
POLICIES = tuple(f"blocks.* : {wait}" for wait in ("recompute(raw @ group)", "recompute(expack @ group > host)"))


def group() -> list[Group | Window]:
    """The tiers of a store that keeps little on the device of what has left it."""
    return [Group(dist.group.WORLD, wait_s=WAIT_S), Window("4KiB")]


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
