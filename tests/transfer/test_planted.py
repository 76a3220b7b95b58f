"""Bugs that peers have had, planted one at a time: the programs of tests/transfer/programs.py must find each."""

import re
from contextlib import contextmanager

import pytest
import torch

from actstore.base.ticket import DONE
from actstore.errors import ActstoreError
from actstore.store import store
from actstore.store.store import Store
from actstore.tiers.arena import Arena
from actstore.tiers.host import HostTier
from actstore.transfer.buffers import Buffers
from actstore.transfer.engine import Engine
from actstore.transfer.parcel import ParcelState
from actstore.transfer.traffic import Traffic
from actstore.transfer.window import FlightWindow
from tests.simulation import SimDevice, here
from tests.transfer.programs import PAGE, Options, check, small_memory

ROOMY = {"host": None, "disk": None, "when_full": "wait"}
HOST = Options(ladder=("host",), store=ROOMY)
AHEAD = Options(ladder=("host",), lanes=3, store=ROOMY | {"window": 16 * PAGE})
DROPPED = Options(ladder=("host",), lanes=3, steps=3, unread=0.4, store=ROOMY)
DISK = Options(ladder=("disk",), lanes=2, unread=0.6, store=ROOMY)
UNORDERED = "nothing orders the"
WRONG = UNORDERED + "|wrong bytes came back|another checksum"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_memory(monkeypatch)


@pytest.fixture
def all_freed():
    """Not that of the folder: these programs do leave things."""


def resident_when_the_copy_is_enqueued(patch):
    """Not wrong by itself: what comes later waits for the copy."""
    dispatch = Traffic.dispatch

    def at_once(self, parcel):
        dispatch(self, parcel)
        if parcel.state is ParcelState.OFFLOADING:
            self.land(parcel)

    patch.setattr(Traffic, "dispatch", at_once)


def reload_before_its_own_offload(patch):
    """Megatron-LM 7398."""
    resident_when_the_copy_is_enqueued(patch)
    read = HostTier.read

    def early(self, slot, dst, after=()):
        slot.written = DONE
        return read(self, slot, dst, after)

    patch.setattr(HostTier, "read", early)


def source_freed_when_the_copy_is_enqueued(patch):
    """torchtune 1867."""
    resident_when_the_copy_is_enqueued(patch)

    def unload(self, parcel):
        buffer, parcel.buffer = parcel.buffer, None
        if buffer is not None:
            self.buffers.give(buffer, [self.device.record(stream) for stream in parcel.reads])

    patch.setattr(Traffic, "unload", unload)


def source_used_again_before_its_copy(patch):
    """The same one floor below: the next owner does not ask."""
    give = Buffers.give
    patch.setattr(Buffers, "give", lambda self, buffer, after, *holder: give(self, buffer, (), *holder))


def host_memory_returned_when_the_copy_is_enqueued(patch):
    """A finalizer frees at once while a copy runs."""
    free = Arena.free
    patch.setattr(Arena, "free", lambda self, taken, after=(): free(self, taken))


def compute_stream_cached_at_first_use(patch):
    """FSDP2, recompute and custom functions change it."""

    class Cached:
        def __init__(self, device):
            self._device = device
            self._stream = None

        def current(self):
            self._stream = self._stream or self._device.current()
            return self._stream

        def __getattr__(self, name):
            return getattr(self._device, name)

    init = Engine.__init__
    patch.setattr(Engine, "__init__", lambda self, device, *args, **more: init(self, Cached(device), *args, **more))


def encoding_on_the_copy_stream(patch):
    """The copy stream touches a tensor of the user's; the compute stream even waits for it."""
    route = Store.route

    @contextmanager
    def elsewhere(device, stream):
        with device.on(stream):
            yield
            done = device.record(stream)
        done.wait_on(device.current())

    def route_elsewhere(self, account, src, codec, tiers):
        device, bind = here(), codec.bind

        class Elsewhere(type(codec)):
            def bind(self, src):
                bound, stream = bind(src), device.compute_stream()

                def encode(src, out, key):
                    with elsewhere(device, stream):
                        return bound.encode(src, out, key)

                return bound._replace(encode=encode)

        return route(self, account, src, Elsewhere(), tiers)

    patch.setattr(Store, "route", route_elsewhere)


def packed_and_never_unpacked(patch):
    """axolotl 3638: what nobody asks for is never freed."""
    patch.setattr(store, "Finalizer", lambda *_: None)


def interleaved_graphs_share_state(patch):
    """The serial numbers of two graphs are looked up in one table."""
    board, arrive, leave = Engine.board, Engine.arrive, Engine.leave

    def shared_board(self, *args):
        berth = board(self, *args)
        if berth is not None:
            vars(self).setdefault("shared", {})[berth.serial] = berth
        return berth

    patch.setattr(Engine, "board", shared_board)
    patch.setattr(Engine, "arrive", lambda self, berth: arrive(self, self.shared[berth.serial]))
    patch.setattr(Engine, "leave", lambda self, berth: leave(self, self.shared[berth.serial]))


def buffers_by_call_order(patch):
    """Unsloth: the n-th tensor of each forward goes to the n-th buffer."""
    begin, reserve = Engine.begin, HostTier.reserve
    rows, calls = [], [0]

    def restart(self):
        calls[0] = 0
        return begin(self)

    def by_order(self, nbytes):
        slot = reserve(self, nbytes)
        if slot is not None:
            if calls[0] == len(rows):
                rows.append(torch.empty(4 * PAGE, dtype=torch.uint8))
            slot.buffer = rows[calls[0]][:nbytes]
            calls[0] += 1
        return slot

    patch.setattr(Engine, "begin", restart)
    patch.setattr(HostTier, "reserve", by_order)


def fetch_into_memory_still_in_use(patch):
    """The target was allocated on the compute stream, which may still be at work on it."""
    read = HostTier.read
    patch.setattr(HostTier, "read", lambda self, slot, dst, after=(): read(self, slot, dst))


def decoding_before_the_fetch(patch):
    """trl 7195."""
    patch.setattr(SimDevice, "wait", lambda self, stream, ticket: None)


def window_not_counted(patch):
    """torchtitan 467 and others: whatever the link, all of forward is on its way at once."""
    patch.setattr(FlightWindow, "admits", lambda self, nbytes, limit_nbytes: True)


def host_waits_for_the_copy(patch):
    """trl 7195, put right the wrong way."""
    write = HostTier.write

    def synchronous(self, *args):
        ticket = write(self, *args)
        ticket.result()
        return ticket

    patch.setattr(HostTier, "write", synchronous)


def skipped_write_taken_for_an_order(patch):
    """Ours, once: a dropped write waits for nothing, and its buffer was used again as if it had."""
    unload = Traffic.unload

    def trusting(self, parcel):
        unload(self, parcel)
        if self.leaving:
            ticket, buffer, _ = self.leaving.pop()
            self.leaving.append((ticket, buffer, []))

    patch.setattr(Traffic, "unload", trusting)


# Each: how many programs may run until it is found, their kind, and what the finding says
FOUND = {
    reload_before_its_own_offload: (100, AHEAD, "wrong bytes came back"),
    source_freed_when_the_copy_is_enqueued: (20, HOST, WRONG),
    source_used_again_before_its_copy: (10, HOST, UNORDERED),
    host_memory_returned_when_the_copy_is_enqueued: (150, DROPPED, UNORDERED),
    compute_stream_cached_at_first_use: (20, HOST, UNORDERED),
    encoding_on_the_copy_stream: (2, HOST, UNORDERED),
    packed_and_never_unpacked: (10, HOST, "bytes held|bytes away|parcels|open"),
    interleaved_graphs_share_state: (60, HOST, WRONG),
    buffers_by_call_order: (40, HOST, WRONG),
    fetch_into_memory_still_in_use: (20, HOST, UNORDERED),
    decoding_before_the_fetch: (20, HOST, WRONG),
    window_not_counted: (40, HOST, "through a window"),
    host_waits_for_the_copy: (2, HOST, "the host waits"),
    skipped_write_taken_for_an_order: (100, DISK, UNORDERED),
}


def finding(seed, folder, options):
    """What is wrong with a program, or nothing."""
    try:
        check(seed, folder, options)
    except (AssertionError, ActstoreError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:the system refused:RuntimeWarning")
@pytest.mark.parametrize("plant", FOUND, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant, monkeypatch, disk_folder):
    programs, options, says = FOUND[plant]
    assert [finding(seed, disk_folder, options) for seed in range(programs)] == [""] * programs
    with monkeypatch.context() as patch:
        plant(patch)
        found = [finding(seed, disk_folder, options) for seed in range(programs)]
    assert any(re.search(says, text) for text in found), found
