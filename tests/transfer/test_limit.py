"""What is held stays within a limit, whatever copies are under way: random chains on the simulated accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actstore import Disk, Window
from actstore.base.spec import Site
from actstore.store.store import Store
from actstore.store.tierset import StoreOptions
from tests.simulation import SimDevice, simulation
from tests.transfer.programs import CPU, PAGE, RAW, Owned, small_memory

LAYERS = st.lists(
    st.tuples(st.sampled_from(("keep", "host", "disk")), st.sampled_from((1, 700, 1500, PAGE, 3 * PAGE))),
    min_size=1,
    max_size=8,
)


@pytest.fixture(autouse=True, scope="module")
def small() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        small_memory(patch)
        yield


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=LAYERS,
    seed=st.integers(0, 2**16),
    spare=st.integers(0, 2 * PAGE),
    when_full=st.sampled_from(("wait", "spill")),
)
def test_payloads_wait_for_room(
    layers: list[tuple[str, int]], seed: int, spare: int, when_full: str, disk_folder: Path
) -> None:
    """The limit lets the largest payload be beside all that is kept, as a plan sees to: nothing is ever above it."""
    kept = sum(nbytes for place, nbytes in layers if place == "keep")
    moved = max((nbytes for place, nbytes in layers if place != "keep"), default=0)
    with simulation(seed) as device:
        device.scheduler.host_may_wait = True
        store = Store(StoreOptions({"disk": Disk(disk_folder)}, Window(8 * PAGE, when_full)))
        store.ledger.budget.set(kept + moved + spare)
        for _ in range(2):  # the second step knows what backward asks for first, and leaves it on the device
            store.start()
            step(device, store, layers)
            assert store.ledger.peak <= store.ledger.budget.limit
        assert all(account.held == account.away == 0 for account in store.ledger.accounts())
        store.close()
        device.finish()


def step(device: SimDevice, store: Store, layers: list[tuple[str, int]]) -> None:
    """Forward saves each layer's bytes, and backward wants them back, last first."""
    forward = store.begin(CPU)
    saved = []
    for i, (place, nbytes) in enumerate(layers):
        src = torch.full((nbytes,), i + 1, dtype=torch.uint8)
        device.compute(writes=[src], what="forward")
        entry = None
        if place == "keep":
            store.ledger.add(store.ledger.account(Site("kept", i)), nbytes, 0, nbytes)
        else:
            entry = Owned(store, i)
            assert store.put(entry, src, store.route(entry.account, src, RAW, (place,)), nbytes, forward)
        saved.append(entry)
    store.end(forward)
    for i, (_, nbytes) in reversed(list(enumerate(layers))):
        entry = saved.pop()
        if entry is None:
            store.ledger.release([store.ledger.account(Site("kept", i)), nbytes, 0])
            continue
        berth = entry.room
        assert berth is not None
        memory = berth.engine.arrive(berth)
        device.compute(reads=[memory], what="backward")
        assert bool((memory == i + 1).all())
        berth.engine.leave(berth)
        del entry, berth
        store.poll()


def test_without_a_limit_more_is_on_its_way(disk_folder: Path) -> None:
    """The test above can fail."""
    with simulation(0) as device:
        device.scheduler.host_may_wait = True
        store = Store(StoreOptions({"disk": Disk(disk_folder)}, Window(16 * PAGE)))
        store.start()
        step(device, store, [("host", 3 * PAGE)] * 4)
        assert store.ledger.peak > 3 * PAGE
        store.close()
        device.finish()
