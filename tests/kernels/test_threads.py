"""Large tensors on several threads: the same bytes, from many callers at once, and after a fork."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest
import torch

from actstore.base.spec import Spec
from actstore.codecs import Int8
from actstore.kernels.cpu import threads
from actstore.kernels.cpu.threads import SPLIT_NBYTES, split


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("units", [1, 2, 3, 4, 1000])
def test_ranges_cover_everything_once(units):
    ranges = []
    split(lambda tag, first, last: ranges.append((tag, first, last)), (7,), units)
    assert len(ranges) == min(3, units)
    assert all(tag == 7 for tag, _, _ in ranges)
    assert sorted(unit for _, first, last in ranges for unit in range(first, last)) == list(range(units))


def large():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SPLIT_NBYTES // 4 + 77, generator=generator)
    x[[5, SPLIT_NBYTES // 8, -1]] = torch.tensor([torch.nan, torch.inf, -0.0])
    return x


def encode(codec, x):
    payload = torch.full((codec.size(Spec.of(x)).nbytes,), 0xA5, dtype=torch.uint8)
    codec.encode(x, payload)
    return payload


def decode(codec, payload, x):
    back = torch.empty_like(x)
    codec.decode(payload, back)
    return back.view(torch.uint8)


@pytest.mark.parametrize("codec", [Int8(), Int8(1024)], ids=str)
def test_the_threads_of_torch_write_the_same_bytes(codec, monkeypatch):
    used = []
    real = threads.split_in_team
    monkeypatch.setattr("actstore.kernels.cpu.language.split_in_team", lambda *a: used.append(real(*a)) or used[-1])
    for numel in (threads.TEAM_NBYTES // 4, threads.TEAM_NBYTES // 4 + 33, 5 * threads.TEAM_NBYTES // 4 + 1):
        x = large()[:numel].clone()
        many = encode(codec, x)
        many_back = decode(codec, many, x)
        torch.set_num_threads(1)
        assert torch.equal(many, encode(codec, x))
        assert torch.equal(many_back, decode(codec, many, x))
        torch.set_num_threads(3)
    assert used == ([threads._parallel is not None] * 2 + [False] * 2) * 3


@pytest.mark.parametrize("codec", [Int8(), Int8(1024)], ids=str)
def test_large_tensors_have_the_same_bytes(codec, monkeypatch):
    monkeypatch.setattr(threads, "_parallel", None)
    x = large()
    used = []
    monkeypatch.setattr(threads, "_workers", lambda pool=threads._workers: used.append(1) or pool())
    many = encode(codec, x)
    many_back = decode(codec, many, x)
    assert len(used) == 4
    torch.set_num_threads(1)
    assert torch.equal(many, encode(codec, x))
    assert torch.equal(many_back, decode(codec, many, x))
    assert len(used) == 4


def test_many_callers_at_once():
    x, codec = large(), Int8()
    expected = encode(codec, x)
    start = threading.Barrier(6)

    def call(_):
        start.wait()
        return all(torch.equal(encode(codec, x), expected) for _ in range(5))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(call, range(6)))


def _digest(payload, x):
    """Without operations of torch that run on several threads: those hang in a forked child."""
    Int8().encode(x, payload)
    return sha256(payload.numpy()).hexdigest()


def _child(results, payload, x):
    results.put(_digest(payload, x))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_has_its_own_workers():
    x = large()
    payload = encode(Int8(), x)  # the pool exists now
    expected = sha256(payload.numpy()).hexdigest()
    payload.zero_()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_child, args=(results, payload, x))
    child.start()
    child.join(120)
    alive = child.is_alive()
    if alive:
        child.kill()
    assert not alive
    assert child.exitcode == 0
    assert results.get() == expected
    assert _digest(payload, x) == expected
