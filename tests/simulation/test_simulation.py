"""The simulation itself: what is ordered passes, each order that is missing is flagged, under every schedule."""

import gc
import os
import threading
import weakref

import pytest
import torch

from actstore.base.reaper import Reaper
from actstore.base.ticket import JobTicket
from actstore.codecs import Int8
from actstore.transfer import engine
from tests.simulation import POISON, SimDevice, TraceOperators, install, simulation, use
from tests.simulation.locks import SimCondition

NBYTES = 1024
SEEDS = range(25)


def fill(device, memory, value):
    device.compute(writes=[memory], what="fill")
    memory.fill_(value)


def values(device, memory):
    device.compute(reads=[memory], what="look")
    return set(memory.tolist())


def round_trip(device, leave_out=""):
    """Two payloads through the same pinned memory; returns what came back."""

    def after(rule, *tickets):
        return [] if rule == leave_out else list(tickets)

    compute, out, back = device.current(), device.stream(), device.stream()
    host, seen, fetched = device.pinned(NBYTES), [], []
    sources, targets = ([device.empty(NBYTES) for _ in range(2)] for _ in range(2))
    for value, source in enumerate(sources):
        fill(device, source, value)
    made = device.record(compute)
    for source, target in zip(sources, targets, strict=True):
        waits = after("an offload comes after what made its source", made)
        waits += after("an offload comes after the last fetch of its memory", *fetched)
        offloaded = device.copy(host, source, out, waits)
        waits = after("a fetch comes after its offload", offloaded)
        waits += after("a fetch comes after the last use of its memory", device.record(compute))
        fetched = [device.copy(target, host, back, waits)]
        for ticket in after("a source is used again after its offload", offloaded):
            ticket.wait_on(compute)
        fill(device, source, 9)
        for ticket in after("a reader comes after the fetch", *fetched):
            device.wait(compute, ticket)
        seen.append(values(device, target))
        fill(device, target, 9)
        if len(seen) == 1:  # the second goes into the same memory
            targets[1].set_(target)
    device.scheduler.host_may_wait = True
    for ticket in after("pinned memory is returned after its last copy", *fetched):
        ticket.result()
    device.unpin(host)
    return seen


RULES = [
    "an offload comes after what made its source",
    "an offload comes after the last fetch of its memory",
    "a fetch comes after its offload",
    "a fetch comes after the last use of its memory",
    "a source is used again after its offload",
    "a reader comes after the fetch",
    "pinned memory is returned after its last copy",
]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_ordered_program_passes(seed):
    with simulation(seed) as device:
        assert round_trip(device) == [{0}, {1}]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", RULES)
def test_each_order_left_out_is_flagged_under_every_schedule(seed, rule):
    device = SimDevice(seed)
    round_trip(device, rule)
    device.finish()
    with pytest.raises(AssertionError, match="nothing orders"):
        device.check()
    device.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fetch_before_its_own_offload_is_flagged(seed):
    device = SimDevice(seed)
    compute, host, source = device.current(), device.pinned(NBYTES), device.empty(NBYTES)
    fill(device, source, 1)
    device.copy(host, source, device.stream(), after=[device.record(compute)])
    target = device.empty(NBYTES)
    device.wait(compute, device.copy(target, host, device.stream(), after=[device.record(compute)]))
    device.finish()
    assert [race.base for race in device.checker.races] == [host.data_ptr()]
    device.close()


def test_wrong_bytes_show_for_some_seeds_and_right_ones_for_others():
    seen = set()
    for seed in SEEDS:
        device = SimDevice(seed)
        compute, host, source = device.current(), device.pinned(NBYTES), device.empty(NBYTES)
        fill(device, source, 1)
        device.copy(host, source, device.stream(), after=[device.record(compute)])
        device.enter()
        target = device.empty(NBYTES)
        device.wait(compute, device.copy(target, host, device.stream(), after=[device.record(compute)]))
        seen |= values(device, target)
        device.finish()
        device.unpin(host)
        device.close()
    assert seen == {1, POISON}


@pytest.mark.parametrize("seed", SEEDS)
def test_what_nobody_looks_at_yet_runs_in_order_too(seed):
    with simulation(seed) as device:
        host, source, target = device.pinned(NBYTES), device.empty(NBYTES), device.empty(NBYTES)
        fill(device, source, 4)
        offloaded = device.copy(host, source, device.stream(), [device.record(device.current())])
        fetched = device.copy(target, host, device.stream(), [offloaded])
        device.finish()
        assert target.tolist() == [4] * NBYTES
        for ticket in (offloaded, fetched):
            ticket.wait_on(device.current())


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_poisoned_and_reused_at_once():
    with simulation() as device:
        first = device.empty(NBYTES)
        address = first.data_ptr()
        assert values(device, first) == {POISON}
        fill(device, first, 3)
        view = first[5:].view(torch.uint8)
        del first
        other = device.empty(NBYTES)
        assert other.data_ptr() != address
        del view
        again = device.empty(NBYTES)
        assert again.data_ptr() == address
        assert values(device, again) == {POISON}
        with device.on(device.compute_stream()):
            del again
            assert device.empty(NBYTES).data_ptr() != address  # memory stays with its stream
        assert device.held_nbytes == (NBYTES, 0)


def test_pinned_memory_is_poisoned_when_it_comes_back():
    for _ in range(2):
        with simulation() as device:
            host = device.pinned(1 << 20)
            assert host.data_ptr() % 4096 == 0
            assert set(host.unique().tolist()) == {POISON}
            device.host(host[4096:8192], write=True, what="fill")
            host[4096:8192] = 1
            device.unpin(host)
            assert device.held_nbytes == (0, 0)


def test_what_is_left_of_one_simulation_is_poison_in_the_next():
    for _ in range(2):
        with simulation() as device:
            memories = [device.empty(nbytes) for nbytes in (NBYTES, 1 << 19)]
            for memory in memories:
                assert set(memory.unique().tolist()) == {POISON}
                fill(device, memory, 1)


def test_pinned_memory_can_be_refused():
    with simulation() as device:
        device.refuse_pinned = True
        assert device.pinned(64) is None


def test_memory_used_after_it_was_returned_is_flagged():
    device = SimDevice()
    host, source = device.pinned(NBYTES), device.empty(NBYTES)
    device.unpin(host)
    device.copy(host[:NBYTES], source, device.current())
    with pytest.raises(AssertionError, match="memory that was returned"):
        device.check()
    device.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_device_memory_freed_under_a_copy_is_flagged(seed):
    device = SimDevice(seed)
    host, source = device.pinned(NBYTES), device.empty(NBYTES)
    copied = device.copy(host, source, device.stream(), after=[device.record(device.current())])
    del source
    device.finish()
    assert len(device.checker.races) == 1
    assert "last reference was gone" in str(device.checker.races[0])
    assert copied.ready()
    device.close()


@pytest.mark.parametrize("known", [True, False])
def test_a_query_that_says_ready_lets_the_host_free(known):
    device = SimDevice()
    host, source = device.pinned(NBYTES), device.empty(NBYTES)
    copied = device.copy(host, source, device.stream(), after=[device.record(device.current())])
    device.finish()
    if known:
        assert copied.ready()
    del source
    device.finish()
    assert bool(device.checker.races) is not known
    device.close()


def test_a_copy_of_what_is_gone_copies_poison():
    device = SimDevice(timed=True)
    device.links["out"].latency_ns = 1
    host, source = device.pinned(NBYTES), torch.zeros(NBYTES, dtype=torch.uint8)
    device.host(host, write=True, what="fill")
    host.fill_(1)
    device.copy(host, source, device.stream(), [device.record(device.current())])
    del source
    device.finish()
    assert set(host[:NBYTES].tolist()) == {POISON}
    device.close()


@pytest.mark.parametrize("early", [True, False])
def test_tensors_of_the_user_are_watched_too(early):
    device = SimDevice()
    host, source = device.pinned(NBYTES), torch.full((NBYTES,), 7, dtype=torch.uint8)
    device.compute(writes=[source])
    copied = device.copy(host, source, device.stream(), after=[device.record(device.current())])
    if not early:
        copied.wait_on(device.current())
    del source
    device.finish()
    assert bool(device.checker.races) is early
    device.close()


def test_a_queued_copy_keeps_nothing_alive():
    with simulation(timed=True) as device:
        source = device.empty(NBYTES)
        weak = weakref.ref(source)
        device.links["out"].latency_ns = 100
        device.copy(device.pinned(NBYTES), source, device.stream(), [device.record(device.current())]).wait_on(
            device.current()
        )
        del source
        assert weak() is None


def test_only_bytes_that_overlap_conflict():
    with simulation() as device:
        memory = device.pinned(4 * NBYTES)
        parts = [device.empty(NBYTES) for _ in range(4)]
        ready = device.record(device.current())
        copies = [
            device.copy(memory[i * NBYTES : (i + 1) * NBYTES], part, device.stream(), [ready])
            for i, part in enumerate(parts)
        ]
        for copied in copies:
            copied.wait_on(device.current())


def test_an_access_to_a_part_hides_nothing_of_the_rest():
    device = SimDevice()
    memory, source = device.pinned(2 * NBYTES)[: 2 * NBYTES], device.empty(2 * NBYTES)
    device.copy(memory, source, device.stream(), [device.record(device.current())]).wait_on(device.current())
    fill(device, memory[:NBYTES], 1)
    device.copy(source[NBYTES:], memory[NBYTES:], device.stream())
    assert any(race.base == memory.data_ptr() for race in device.checker.races)
    device.close()


def test_the_checker_remembers_no_more_than_it_needs():
    with simulation() as device:
        memory = device.empty(NBYTES)
        for value in range(50):
            fill(device, memory, value)
        assert device.checker.live(memory.data_ptr()) == 1
        for _ in range(50):
            values(device, memory)
        assert device.checker.live(memory.data_ptr()) == 2


# -- hosts, jobs, locks -----------------------------------------------------------------------------------------------


def test_the_host_may_not_wait():
    device = SimDevice(timed=True)
    device.links["out"].latency_ns = 1
    copied = device.copy(device.pinned(NBYTES), device.empty(NBYTES), device.stream())
    with pytest.raises(AssertionError, match="the host waits for the device: the main thread"):
        copied.result()
    with pytest.raises(AssertionError, match="the host waits"):
        device.check()
    device.close()


def job(device, host, source, stream, made):
    device.copy(host, source, stream, after=made).result()
    return 0, 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wait", [True, False])
def test_jobs_run_beside_the_host(seed, wait):
    device = SimDevice(seed)
    workers = device.workers(2, "worker")
    device.scheduler.host_may_wait = True
    compute, stream = device.current(), device.stream()
    source, host = device.empty(NBYTES), device.pinned(NBYTES)
    fill(device, source, 5)
    made = [device.record(compute)]
    ticket = JobTicket([workers.submit(job, device, host, source, stream, made)])
    if wait:
        ticket.wait_on(compute)
        assert host.tolist() == [5] * NBYTES
    fill(device, source, 6)
    device.finish()
    assert bool(device.checker.races) is not wait
    ticket.result()
    assert ticket.span() == (0, 1)
    device.unpin(host)
    workers.shutdown()
    device.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [1, 2])
def test_jobs_know_what_their_thread_did_and_who_submitted_them(seed, count):
    device = SimDevice(seed)
    workers = device.workers(count, "worker")
    device.scheduler.host_may_wait = True
    memory = device.pinned(NBYTES)
    device.host(memory, write=True, what="fill")
    futures = [workers.submit(device.host, memory, True, "work") for _ in range(3)]
    for future in futures:
        future.result()
    assert bool(device.checker.races) is (count > 1)
    assert all("work of job" in str(race.first) for race in device.checker.races)
    device.unpin(memory)
    device.close()


def test_a_job_that_fails_says_so():
    def fail():
        raise SystemExit("gone")

    with simulation() as device:
        device.scheduler.host_may_wait = True
        future = device.workers(1, "worker").submit(fail)
        assert isinstance(future.exception(), SystemExit)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_lock_orders_the_threads_that_take_it(seed):
    for locked in (True, False):
        device, steps = SimDevice(seed), []
        memory = device.pinned(NBYTES)
        with use(device):
            lock = engine.Lock()

        def add(device=device, memory=memory, lock=lock, locked=locked, steps=steps):
            for _ in range(3):
                if locked:
                    lock.acquire()
                device.host(memory, write=True, what="add")
                steps.append(device.scheduler.here.name)
                device.enter()
                if locked:
                    lock.release()

        futures = [device.scheduler.spawn(add, name=name) for name in ("first", "second")]
        for future in futures:
            future.result()
        assert len(steps) == 6
        assert bool(device.checker.races) is not locked
        assert type(lock) is not type(threading.Lock())
        device.unpin(memory)
        device.close()


@pytest.mark.usefixtures("installed")
def test_threads_that_wait_for_each_other_are_reported():
    told = []
    for seed in SEEDS:
        device = SimDevice(seed)
        with use(device):
            first, second = engine.Lock(), engine.Lock()

        def take(one, other, device=device):
            with one:
                device.enter()
                with other:
                    pass

        futures = [device.scheduler.spawn(take, first, second), device.scheduler.spawn(take, second, first)]
        try:
            for future in futures:
                future.result()
        except AssertionError as error:
            told.append(str(error))
        device.close()
    assert told
    assert all("deadlock: the main thread waits for a thread; a thread for a lock" in text for text in told)
    assert len(told) < len(SEEDS)


@pytest.mark.usefixtures("installed")
def test_a_lock_taken_twice_is_reported():
    device = SimDevice()
    with use(device):
        lock = engine.Lock()
    with lock, pytest.raises(AssertionError, match="holds itself"):
        lock.acquire()
    device.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_conditions_wake_who_waits(seed):
    with simulation(seed) as device:
        device.scheduler.host_may_wait = True
        condition = SimCondition(device.scheduler)
        things = []

        def consume():
            with condition:
                condition.wait_for(lambda: things)
                return things.pop()

        taken = [device.workers(2, "consumer").submit(consume) for _ in range(2)]
        for thing in (1, 2):
            with condition:
                things.append(thing)
                condition.notify_all()
        assert sorted(future.result() for future in taken) == [1, 2]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("seed", SEEDS)
def test_who_takes_from_a_queue_knows_what_was_put_there(seed):
    with simulation(seed) as device:
        memory, taken = device.pinned(NBYTES), []
        lock = engine.Lock()
        reaper = Reaper(lock, taken.append)

        def put():
            device.host(memory, write=True, what="fill")
            reaper.put(memory)

        thread = device.scheduler.spawn(put)
        while not taken:
            reaper.drain()
            device.enter()
        device.unpin(taken.pop())
        thread.result()


def test_a_thread_computes_on_its_own_stream():
    with simulation() as device:
        other = device.compute_stream()
        streams = device.scheduler.spawn(device.current, stream=other)
        assert streams.result() is other
        assert device.current() is device.scheduler.main_stream
        with device.on(other):
            assert device.current() is other


def test_compute_streams_are_not_ordered_by_the_host():
    device = SimDevice()
    memory = device.empty(NBYTES)
    fill(device, memory, 1)
    made = device.record(device.current())
    other = device.compute_stream()
    with device.on(other):
        values(device, memory)
    assert len(device.checker.races) == 1
    with device.on(other):
        made.wait_on(other)
        values(device, memory)
    assert len(device.checker.races) == 1
    device.close()


# -- time -------------------------------------------------------------------------------------------------------------


def test_virtual_times_add_up():
    with simulation(timed=True) as device:
        device.links["out"].gbps, device.links["out"].latency_ns = 0.5, 10
        compute, out = device.current(), device.stream()
        source, host = device.empty(1000), device.pinned(4096)
        device.compute(500, writes=[source])
        parts = host[:1000], host[1000:2000]
        tickets = [device.copy(part, source, out, [device.record(compute)]) for part in parts]
        assert not tickets[0].ready()
        assert tickets[0].span() is None
        device.compute(1000)
        stall = device.wait(compute, tickets[0])
        assert stall is not None
        device.compute(100)  # now the host has come to 500 + 2010 + 100
        assert stall.span() == (1500, 2510)
        assert tickets[0].span() == (500, 2510)
        assert device.wait(compute, tickets[0]) is None
        assert not tickets[1].ready()
        tickets[1].wait_on(compute)
        device.compute(1)
        assert tickets[1].span() == (2510, 4520)
        assert device.mark(compute).span() == (4521, 4521)
        device.unpin(host)


def test_links_run_beside_each_other():
    with simulation(timed=True) as device:
        device.links["out"].gbps = device.links["in"].gbps = 1
        device.scheduler.host_may_wait = True
        host, one, two = device.pinned(4096), device.empty(1000), device.empty(1000)
        made = [device.record(device.current())]
        tickets = [
            device.copy(host[:1000], one, device.stream(), made),
            device.copy(two, host[1000:2000], device.stream(), made),
        ]
        for ticket in tickets:
            ticket.result()
            assert ticket.span() == (0, 1000)
            ticket.wait_on(device.current())


@pytest.mark.usefixtures("installed")
def test_files_take_their_time(tmp_path):
    with simulation(timed=True) as device:
        device.scheduler.host_may_wait = True
        device.links["disk"].gbps = 1
        host = device.pinned(4096)
        fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
        workers = device.workers(2, "writer")
        futures = [workers.submit(os.pwrite, fd, memoryview(host.numpy()), i * 4096) for i in range(3)]
        assert not futures[0].done()
        device.compute(4096)
        assert [future.done() for future in futures] == [True, False, False]
        assert [future.result() for future in futures] == [4096] * 3
        assert device.scheduler.main.now_ns == 3 * 4096
        os.close(fd)
        device.unpin(host)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_file_read_into_memory_that_a_copy_reads_is_flagged(tmp_path, seed):
    device = SimDevice(seed)
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.pwrite(fd, bytes(NBYTES), 0)
    host, target = device.pinned(NBYTES), device.empty(NBYTES)
    with use(device):
        for _ in range(2):
            os.preadv(fd, [memoryview(host.numpy())], 0)
            device.copy(target, host, device.stream(), [device.record(device.current())]).wait_on(device.current())
    assert len(device.checker.races) == 1
    assert "a read of a file" in str(device.checker.races[0])
    os.close(fd)
    device.close()


# -- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_codecs_and_operators_are_seen():
    for waits in (True, False):
        device = SimDevice()
        with use(device), TraceOperators(device):
            source = torch.randn(256)
            bound = Int8().bind(source)
            payload, host = device.empty(bound.nbytes), device.pinned(4096)[: bound.nbytes]
            bound.encode(source, payload, 0)
            copied = device.copy(host, payload, device.stream(), [device.record(device.current())])
            if waits:
                copied.wait_on(device.current())
            source.mul_(2)
            assert device.checker.races == []
            payload.zero_()
        assert bool(device.checker.races) is not waits
        device.close()


def test_the_same_seed_does_the_same():
    def run(seed):
        order = []
        with simulation(seed) as device:
            workers = device.workers(2, "worker")
            for i in range(6):
                workers.submit(order.append, i)
                device.scheduler.spawn(order.append, -i)
                device.compute()
                order.append("host")
        return order

    runs = [run(seed) for seed in range(10)]
    assert runs == [run(seed) for seed in range(10)]
    assert len(set(map(str, runs))) > 3


def test_collections_are_left_as_they_were():
    with simulation():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.fixture
def installed(monkeypatch):
    install(monkeypatch)
