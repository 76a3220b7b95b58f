"""Payloads whose fetched bytes serve as a tensor's memory: whoever asks gets the bytes that were put, always."""

import gc
import threading
import weakref
from time import sleep

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from actstore import ActivationStore, Window
from actstore.base.spec import Site
from actstore.codecs import Int8, Raw
from actstore.devices import Cpu, cpu
from actstore.errors import StateError
from actstore.store.payload import Payload
from actstore.store.store import Store
from actstore.store.tierset import StoreOptions
from actstore.tiers.parts import Mover
from actstore.transfer import engine, parcel
from actstore.transfer.parcel import ParcelState
from actstore.transfer.traffic import Traffic
from tests.autograd.checks import check_drained, gc_off, same_bits, settle
from tests.contracts.clean import traffic

CPU = torch.device("cpu")
NUMEL = 100


@pytest.fixture
def all_freed():
    """Each world counts what is left itself; planted bugs leave something on purpose."""


@pytest.fixture(autouse=True)
def small_payloads_travel_alone(monkeypatch):
    monkeypatch.setattr(engine, "SMALL_NBYTES", 64)


class Owned(Payload):
    __slots__ = ()

    def __init__(self, account):
        super().__init__(account)

    def __del__(self):
        self.free()


class World:
    """A store with a few payloads, and the tensors that were borrowed from it."""

    def __init__(self, count, readers=1, codec=None):
        self.store = Store(StoreOptions(window=Window(16 * 4096)))
        self.originals = [torch.randn(NUMEL) for _ in range(count)]
        self.entries = []
        forward = self.store.begin(CPU)
        for i, tensor in enumerate(self.originals):
            entry = Owned(self.store.ledger.account(Site("m", i)))
            route = self.store.route(entry.account, tensor, codec or Raw(), ("disk",))
            assert self.store.put(entry, tensor, route, 0, forward)
            entry.room.readers = readers
            self.entries.append(entry)
        self.store.end(forward)
        self.engine = self.entries[0].room.engine
        self.land()

    def land(self):
        for entry in self.entries:
            entry.room.parcel.motion.wait_on(None)
        self.engine.poll()

    def borrow(self, i, **options):
        return self.store.borrow(self.entries[i], torch.float32, **options)

    def parcel(self, i):
        return self.entries[i].room.parcel

    def end(self):
        """Everything is gone: nothing is on its way, and no byte is booked."""
        self.entries.clear()
        settle(self.engine)
        assert traffic(self.engine) == {}
        assert [(a.held, a.away) for a in self.store.ledger.accounts() if a.held or a.away] == []
        self.store.close()


@pytest.fixture
def world():
    world = World(4)
    yield world
    world.end()


def test_no_copy_is_made(world):
    world.store.get(world.entries[3], torch.empty(NUMEL))  # whatever is fetched ahead from now on
    tensor = world.borrow(0)
    assert same_bits(tensor, world.originals[0])
    assert tensor.data_ptr() == world.parcel(0).buffer.memory.data_ptr()


def test_the_buffer_goes_back_with_the_last_tensor_over_it(world):
    tensor = world.borrow(1)
    view = tensor[3:]
    del tensor
    world.entries[1].free()
    world.engine.poll()
    assert world.engine._traffic.buffers.used_nbytes >= 4096
    assert same_bits(view, world.originals[1][3:])
    used = world.engine._traffic.buffers.used_nbytes
    del view
    world.engine.poll()
    assert world.engine._traffic.buffers.used_nbytes == used - 4096


def test_the_second_reader_is_served_by_the_same_bytes():
    world = World(1, readers=2)
    first = world.borrow(0)
    address = first.data_ptr()
    del first
    second = world.borrow(0)
    assert second.data_ptr() == address
    assert sum(a.misses for a in world.store.ledger.accounts()) <= 1
    del second
    world.end()


def test_two_at_once_share_their_memory_and_their_version(world):
    first = world.borrow(0)
    second = world.borrow(0)
    assert second.data_ptr() == first.data_ptr()
    second.add_(1)
    assert first._version == second._version == 1
    third = world.borrow(0)
    assert third.data_ptr() != first.data_ptr()
    assert same_bits(third, world.originals[0])
    assert same_bits(first, world.originals[0] + 1)


def test_what_somebody_changed_is_fetched_again(world):
    world.borrow(0).zero_()
    assert same_bits(world.borrow(0), world.originals[0])
    changed = world.borrow(1)
    changed.zero_()
    assert same_bits(world.borrow(1), world.originals[1])
    assert not changed.any()


def test_what_is_taken_for_good_goes_with_the_tensor(monkeypatch):
    """Without a call of the engine, as a compiled graph counts on."""
    mapped, map_pages = [], cpu.map_pages

    def mapping(nbytes):
        pages = map_pages(nbytes)
        mapped.append(weakref.ref(pages))
        return pages

    monkeypatch.setattr(cpu, "map_pages", mapping)
    world = World(1, readers=2)
    with gc_off():
        taken = world.borrow(0, for_good=True)
        assert world.parcel(0).buffer is None
        taken.numpy().fill(0)
        exist = sum(pages() is not None for pages in mapped)
        del taken
        assert sum(pages() is not None for pages in mapped) == exist - 1
        assert same_bits(world.borrow(0), world.originals[0])
    world.end()


def test_what_is_on_its_way_out_is_taken_when_the_tier_has_it(monkeypatch):
    begun, write = threading.Event(), Mover.write

    def late(*arguments):
        begun.wait(10)
        sleep(0.02)
        return write(*arguments)

    monkeypatch.setattr(Mover, "write", late)
    monkeypatch.setattr(World, "land", lambda self: None)
    world = World(1)
    assert world.parcel(0).state is ParcelState.OFFLOADING
    assert world.borrow(0) is None
    begun.set()
    assert same_bits(world.borrow(0, for_good=True), world.originals[0])
    assert world.parcel(0).state is ParcelState.RESIDENT
    world.end()


def test_a_tensor_survives_the_store():
    world = World(2)
    tensor = world.borrow(1)
    world.store.close()
    world.entries.clear()
    gc.collect()
    assert same_bits(tensor, world.originals[1])
    del tensor
    world.engine.poll()
    assert world.engine._traffic.buffers.used_nbytes == 0
    assert traffic(world.engine) == {}


def test_who_decodes_gets_a_copy():
    world = World(1, codec=Int8())
    assert world.borrow(0) is None
    world.end()


def test_inference_gets_a_copy(world):
    with torch.inference_mode():
        assert world.borrow(0) is None


def test_a_payload_that_has_not_left_is_copied():
    world = World(1)
    parcel = world.parcel(0)
    slot, parcel.slot = parcel.slot, None  # as if the disk had failed
    assert world.borrow(0) is None
    parcel.slot = slot
    world.end()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("borrow"), st.integers(0, 3)),
        st.tuples(st.just("take"), st.integers(0, 3)),
        st.tuples(st.just("copy"), st.integers(0, 3)),
        st.tuples(st.just("scribble"), st.integers(0, 5)),
        st.tuples(st.just("release"), st.integers(0, 5)),
        st.tuples(st.just("view"), st.integers(0, 5)),
        st.tuples(st.just("free"), st.integers(0, 3)),
        st.tuples(st.just("poll"), st.just(0)),
    ),
    max_size=30,
)


def run(actions, readers):
    world, held = World(4, readers), []
    try:
        use(world, held, actions)
        world.end()
    finally:
        world.entries.clear()
        world.store.close()


def use(world, held, actions):
    """Go through the actions; `held` are the tensors that are in use. What was taken for good changes silently."""
    freed, taken = set(), set()
    for action, i in actions:
        if action == "poll":
            world.engine.poll()
        elif action == "free":
            world.entries[i].free()
            freed.add(i)
        elif action in ("borrow", "take", "copy"):
            if i in freed:
                continue
            tensor = torch.empty(NUMEL) if action == "copy" else world.borrow(i, for_good=action == "take")
            if action == "copy":
                world.store.get(world.entries[i], tensor)
            if action == "take":
                taken.add(tensor.data_ptr())
            else:
                taken.discard(tensor.data_ptr())
            assert same_bits(tensor, world.originals[i]), "somebody's changes came back"
            held.append(tensor)
        elif held:
            tensor = held[i % len(held)]
            if action == "scribble" and tensor.data_ptr() in taken:
                tensor.numpy().fill(i)
            elif action == "scribble":
                tensor.fill_(i)
            elif action == "release":
                del held[i % len(held)]
            else:
                held.append(tensor[:10])
        tensor = None
    held.clear()


@given(actions=ACTIONS, readers=st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_any_order_of_any_use(actions, readers):
    run(actions, readers)


def never_spoiled(monkeypatch):
    monkeypatch.setattr(parcel.Loan, "is_changed", lambda self: False)


def back_at_once(monkeypatch):
    """The buffer is used again while the tensor lives."""
    lend = Traffic.lend

    def early(self, berth, dtype, returned, **options):
        tensor = lend(self, berth, dtype, returned, **options)
        self.release(berth.parcel, 1)
        return tensor

    monkeypatch.setattr(Traffic, "lend", early)


def never_back(monkeypatch):
    monkeypatch.setattr(parcel, "Finalizer", lambda *_: None)


def lent_for_good(monkeypatch):
    """What changes silently is lent again."""
    lend = Traffic.lend
    monkeypatch.setattr(Traffic, "lend", lambda self, berth, dtype, returned, **_: lend(self, berth, dtype, returned))


@pytest.mark.parametrize("bug", [never_spoiled, back_at_once, never_back, lent_for_good])
def test_planted_bugs_are_found(monkeypatch, bug):
    bug(monkeypatch)

    @given(actions=ACTIONS, readers=st.integers(1, 3))
    @settings(max_examples=300, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    def search(actions, readers):
        run(actions, readers)

    with pytest.raises((AssertionError, StateError)):
        search()


class Scribble(torch.autograd.Function):
    """Its backward changes what it saved, as some do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(grad)


def test_a_backward_that_scribbles_twice():
    x = torch.randn(5000, requires_grad=True)
    with gc_off(), ActivationStore(policy="raw @ disk", min_bytes=0) as store:
        y = Scribble.apply(x * 1)
    for _ in range(3):
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert same_bits(grad, 2 * x.detach())
    del y, grad
    check_drained(store)
    store.close()


def test_who_waits_while_another_thread_spoils_the_bytes_gets_those_of_the_tier(world, monkeypatch):
    """Between its wait and its use a reader has no lock."""
    waits, go = threading.Event(), threading.Event()
    wait = Cpu.wait

    def held_back(self, stream, ticket):
        found = wait(self, stream, ticket)
        if threading.current_thread().name == "reader":
            waits.set()
            assert go.wait(20)
        return found

    monkeypatch.setattr(Cpu, "wait", held_back)
    found = torch.empty(NUMEL)
    reader = threading.Thread(target=lambda: world.store.get(world.entries[3], found), name="reader")
    reader.start()
    assert waits.wait(20)
    lent = world.borrow(3)
    lent.zero_()
    del lent
    world.engine.poll()  # the bytes are given up
    go.set()
    reader.join()
    assert same_bits(found, world.originals[3])
    assert world.parcel(3).users == 0
