"""The states of a parcel."""

from itertools import product

import pytest
import torch

from actstore.devices import Cpu
from actstore.errors import StateError
from actstore.tiers import Slot
from actstore.transfer.buffers import Buffers
from actstore.transfer.order import Lessons, TransferRun
from actstore.transfer.parcel import NEXT, Berth, Parcel, ParcelState


@pytest.fixture
def parcel():
    slot = Slot(4096)
    slot.tier = None
    return Parcel(Buffers(Cpu(torch.device("cpu"))).take(4096), slot, None, TransferRun(Lessons()))


def test_the_table_is_complete_and_every_way_ends():
    assert set(NEXT) == set(ParcelState)
    for state in set(ParcelState) - {ParcelState.DROPPED}:
        assert ParcelState.DROPPED in NEXT[state]
    assert NEXT[ParcelState.DROPPED] == set()


@pytest.mark.parametrize(("here", "there"), list(product(ParcelState, ParcelState)))
def test_only_what_the_table_allows(parcel, here, there):
    parcel.state = here
    if there in NEXT[here]:
        parcel.turn(there)
        assert parcel.state is there
    else:
        with pytest.raises(StateError, match=f"from {here.name} to {there.name}"):
            parcel.turn(there)


def test_a_berth_is_a_part_of_the_buffer(parcel):
    parcel.buffer.memory.copy_(torch.arange(4096) % 251)
    berth = Berth(None, parcel, 64, 100, None, 0)
    assert torch.equal(berth.memory, parcel.buffer.memory[64:164])
    parcel.buffer = None
    with pytest.raises(StateError, match="Close the store after the last backward"):
        _ = berth.memory
