"""The transfer engine on a CUDA device: right bytes at any pace, no wait in forward, all memory back at the end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.nn import LayerNorm, Linear, Module, ModuleList, ReLU, Sequential
from torch.nn.functional import mse_loss

from actstore import ActivationStore, Disk, Verify, Window
from actstore.devices import Accelerator

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic

DEVICE = "cuda"
WIDTH, TOKENS, BLOCKS = 256, 512, 4  # a block saves some tensors of 512 KiB, and some of 2 MiB
POLICIES = [
    "raw @ host", "raw @ disk", "raw @ host > disk", "int8 @ host", "int8 @ host > disk", "zmask(expack) @ host",
]  # fmt: skip
WHEN_FULL = ["wait", "keep", "spill"]
CYCLES = 2_000_000  # about a millisecond


class Block(Module):
    def __init__(self, pace=None):
        super().__init__()
        self.body = Sequential(LayerNorm(WIDTH), Linear(WIDTH, 4 * WIDTH), ReLU(), Linear(4 * WIDTH, WIDTH))
        self.pace = pace

    def forward(self, x):
        if self.pace is not None:
            self.pace()
        return x + self.body(x)


class Net(Module):
    def __init__(self):
        super().__init__()
        self.blocks = ModuleList(Block() for _ in range(BLOCKS))
        self.head = Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OnStreams(Net):
    """Its blocks compute on two streams in turn."""

    def __init__(self):
        super().__init__()
        self.streams = [torch.cuda.Stream() for _ in range(2)]

    def forward(self, x):
        here = torch.cuda.current_stream()
        for index, block in enumerate(self.blocks):
            stream = self.streams[index % 2]
            stream.wait_stream(here)
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                x = block(x)
            here.wait_stream(stream)
            x.record_stream(here)
        return self.head(x)


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().to(DEVICE)


def batch(seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, WIDTH, generator=generator).to(DEVICE) for _ in range(2)]


def forward(model, data):
    return mse_loss(model(data[0]), data[1])


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def step(model, data, store=None):
    """Loss and gradients."""
    model.zero_grad(set_to_none=True)
    if store is None:
        loss = forward(model, data)
    else:
        with store:
            loss = forward(model, data)
    loss.backward()
    return [loss.detach(), *gradients(model)]


def on_device(policy):
    """The policy whose numbers are the same, and that moves nothing."""
    return policy.split(" @ ")[0]


def expected(model, data, policy):
    """Loss and gradients of one step that moves nothing."""
    store = ActivationStore(model, on_device(policy), min_bytes=0)
    found = step(model, data, store)
    store.close()
    return found


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def late_copies(monkeypatch):
    """Each copy of the store begins a while after it may."""
    copy = Accelerator.copy

    def late(self, dst, src, stream, after=()):
        with self.on(stream):
            torch.cuda._sleep(CYCLES)
        return copy(self, dst, src, stream, after)

    monkeypatch.setattr(Accelerator, "copy", late)


# -- the bytes are right ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when_full", WHEN_FULL)
@pytest.mark.parametrize("policy", POLICIES)
def test_verified_bytes_through_a_small_window(model, policy, when_full, tmp_path):
    data = batch()
    wanted = expected(model, data, policy)
    if "int8" not in policy:
        assert same(wanted, step(model, data))
    store = ActivationStore(
        model, policy, min_bytes=0, tiers=[Disk(tmp_path), Window("1MiB", when_full=when_full)], observe=[Verify()]
    )
    for _ in range(4):
        assert same(step(model, data, store), wanted)
    assert store.report().live_bytes == 0
    store.close()


@pytest.mark.parametrize("pace", ["ahead", "behind", "late copies"])
@pytest.mark.parametrize("window", ["1MiB", None])
@pytest.mark.parametrize("policy", POLICIES)
def test_any_pace_of_host_device_and_link(model, policy, window, pace, tmp_path, monkeypatch):
    data = batch()
    wanted = expected(model, data, policy)
    if pace == "late copies":
        late_copies(monkeypatch)
    else:
        run = torch.cuda.synchronize if pace == "behind" else lambda: torch.cuda._sleep(CYCLES)
        for block in model.blocks:
            block.pace = run
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path), Window(window)])
    for _ in range(4):
        assert same(step(model, data, store), wanted)
    store.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_on_several_streams(policy, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, data = OnStreams().cuda(), batch()
    wanted = expected(model, data, policy)
    late_copies(monkeypatch)
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path), Window("1MiB")])
    for _ in range(4):
        found = step(model, data, store)
        torch.cuda.synchronize()
        assert same(found, wanted)
    store.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_other_shapes_in_every_step(model, policy, tmp_path):
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path), Window("4MiB")], observe=[Verify()])
    for seed, tokens in enumerate((512, 130, 1000, 7, 513, 512, 64, 900)):
        data = batch(seed, tokens)
        assert same(step(model, data, store), expected(model, data, policy))
    assert store.report().live_bytes == 0
    store.close()


@pytest.mark.filterwarnings("ignore:gpu_direct=True, but kvikio finds no GPUDirect Storage:RuntimeWarning")
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("policy", ["raw @ disk", "int8 @ disk", "zmask(expack) @ disk"])
def test_bytes_past_host_memory(model, policy, own_stream, cudart, tmp_path):
    pytest.importorskip("kvikio")
    data = batch()
    wanted = expected(model, data, policy)
    store = ActivationStore(
        model, policy, min_bytes=0, tiers=[Disk(tmp_path, gpu_direct=True), Window("1MiB")], observe=[Verify()]
    )
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            found = step(model, data, store)
            torch.cuda.synchronize()
            assert same(found, wanted)
    assert {medium.tier: medium.peak_bytes for medium in store.report().media}["disk"] > 0
    assert not cudart.registered or "zmask" in policy  # whose lengths cross pinned memory
    store.close()


def test_errors_of_kvikio_leave_payloads_on_the_device(model, tmp_path, monkeypatch):
    kvikio = pytest.importorskip("kvikio")

    def fail(*_):
        raise RuntimeError("cuFile error: 5030")

    monkeypatch.setattr(kvikio.CuFile, "raw_write", fail)
    data = batch()
    wanted = expected(model, data, "raw @ disk")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        store = ActivationStore(model, "raw @ disk", min_bytes=0, tiers=[Disk(tmp_path, gpu_direct=True)])
        assert same(step(model, data, store), wanted)
    assert any("cuFile error: 5030" in str(warning.message) for warning in told)
    store.close()


# -- what programs do -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_that_is_used_twice(model, policy, tmp_path):
    data = batch()
    wanted = expected(model, data, policy)
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path), Window("1MiB")], observe=[Verify()])
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with store:
            loss = forward(model, data)
        loss.backward(retain_graph=True)
        assert same(gradients(model), wanted[1:])
        model.zero_grad(set_to_none=True)
        loss.backward()
        assert same(gradients(model), wanted[1:])
    del loss
    assert store.report().live_bytes == 0
    store.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_exceptions_in_forward_and_outputs_that_nobody_uses(model, policy, tmp_path):
    data = batch()
    wanted = expected(model, data, policy)
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path), Window("1MiB")])

    def fail():
        raise KeyError("in forward")

    for _ in range(3):
        assert same(step(model, data, store), wanted)
        model.blocks[2].pace = fail
        with pytest.raises(KeyError, match="in forward"):
            step(model, data, store)
        model.blocks[2].pace = None
        with store:
            model(data[0])  # and its graph dies at once
    gc.collect()
    assert store.report().live_bytes == 0
    store.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_two_models_whose_passes_interleave(policy, tmp_path):
    torch.manual_seed(1)
    models, data = [Net().to(DEVICE) for _ in range(2)], batch()
    wanted = [expected(model, data, policy) for model in models]
    stores = [
        ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path), Window("1MiB")], observe=[Verify()])
        for model in models
    ]
    for turn in range(4):
        losses = []
        for model, store in zip(models, stores, strict=True):
            model.zero_grad(set_to_none=True)
            with store:
                losses.append(forward(model, data))
        for index in (0, 1) if turn % 2 else (1, 0):
            losses[index].backward()
        for model, numbers in zip(models, wanted, strict=True):
            assert same(gradients(model), numbers[1:])
    for store in stores:
        store.close()


def test_two_threads_with_a_stream_each(tmp_path):
    torch.manual_seed(2)
    models, data = [Net().cuda() for _ in range(2)], batch()
    wanted = [step(model, data) for model in models]
    store = ActivationStore(policy="raw @ host > disk", min_bytes=0, tiers=[Disk(tmp_path), Window("1MiB")])

    def train(model):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(6):
                found = step(model, data, store)
            stream.synchronize()
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as threads:
        for found, numbers in zip(threads.map(train, models), wanted, strict=True):
            assert same(found, numbers)
    store.close()


# -- forward does not wait --------------------------------------------------------------------------------------------

HOST_POLICIES = ["raw @ host", "int8 @ host", "zmask(expack) @ host"]


@pytest.fixture
def no_sync():
    torch.cuda.synchronize()
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("when_full", WHEN_FULL)
@pytest.mark.parametrize("policy", HOST_POLICIES)
def test_forward_makes_no_call_that_waits(model, policy, when_full, no_sync):
    data = batch()
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Window("1MiB", when_full=when_full)])
    step(model, data, store)  # compiles kernels, pins memory
    no_sync()
    with store:
        loss = forward(model, data)
    torch.cuda.set_sync_debug_mode("default")
    loss.backward()
    assert loss.isfinite()
    store.close()


@pytest.mark.parametrize("when_full", WHEN_FULL)
@pytest.mark.parametrize("policy", HOST_POLICIES)
def test_forward_returns_while_the_device_has_not_begun(model, policy, when_full):
    data = batch()
    wanted = expected(model, data, policy)
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Window("1MiB", when_full=when_full)])
    for _ in range(2):
        step(model, data, store)
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    torch.cuda._sleep(1_000_000_000)  # about half a second; forward takes a hundredth of that
    slept = torch.cuda.Event()
    slept.record()
    with store:
        loss = forward(model, data)
    assert not slept.query()
    loss.backward()
    assert same(gradients(model), wanted[1:])
    store.close()


# -- memory -----------------------------------------------------------------------------------------------------------


class Cudart:
    """The runtime, with the pages that are registered by now; `refuses` says whether it registers more."""

    def __init__(self, real, *, refuses=False):
        self.real, self.refuses, self.registered, self.asked = real, refuses, set(), 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def cudaHostRegister(self, address, nbytes, flags):
        self.asked += 1
        if self.refuses:
            return 2  # out of memory
        self.registered.add(address)
        return self.real.cudaHostRegister(address, nbytes, flags)

    def cudaHostUnregister(self, address):
        self.registered.remove(address)
        return self.real.cudaHostUnregister(address)


@pytest.fixture
def cudart(monkeypatch):
    cudart = Cudart(torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return cudart


@pytest.mark.parametrize("policy", POLICIES)
def test_all_memory_comes_back(model, policy, cudart, tmp_path):
    data = batch()
    expected(model, data, policy)  # the workspaces of libraries stay
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path), Window("2MiB")])
    for _ in range(3):
        step(model, data, store)
    with store:
        loss = forward(model, data)  # and no backward
    assert cudart.registered
    del loss
    store.close()
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    assert cudart.registered == set()
    assert torch.cuda.memory_allocated() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", ["raw @ host", "int8 @ host"])
def test_a_steady_state_allocates_nothing(model, policy, cudart):
    data = batch()
    store = ActivationStore(model, policy, min_bytes=0)

    def paced_step():
        step(model, data, store)
        torch.cuda.synchronize()  # the same timing in each step

    for _ in range(4):
        paced_step()
    segments, asked = torch.cuda.memory_stats()["segment.all.allocated"], cudart.asked
    for _ in range(20):
        paced_step()
    assert torch.cuda.memory_stats()["segment.all.allocated"] == segments
    assert cudart.asked == asked
    store.close()


@pytest.mark.parametrize("policy", ["raw @ host", "int8 @ host", "zmask(expack) @ host"])
def test_refused_pinned_memory_is_a_warning_and_nothing_more(model, policy, cudart):
    data = batch()
    wanted = expected(model, data, policy)
    cudart.refuses = True
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Window("1MiB")])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert same(step(model, data, store), wanted)
    assert [str(one.message).count("Pageable memory is used from now on") for one in seen] == [1]
    store.close()


# -- torch's own checker ----------------------------------------------------------------------------------------------

_CHECKED = """
import sys, warnings
sys.modules["cupy"] = None  # the checker sees torch's operations only
import torch
from torch.nn import Linear, ReLU, Sequential
from actstore import ActivationStore, Window
from actstore.devices import Accelerator
from actstore.base.ticket import EventTicket

warnings.simplefilter("ignore")
query = EventTicket.ready

def ready(ticket):
    done = query(ticket)
    if done:
        ticket.result()  # does nothing, but tells the checker what the host has seen
    return done

EventTicket.ready = ready
if PLANTED:
    copy = Accelerator.copy
    Accelerator.copy = lambda device, dst, src, stream, after=(): copy(device, dst, src, stream)

torch.manual_seed(0)
model = Sequential(*(layer for _ in range(4) for layer in (Linear(512, 512), ReLU()))).cuda()
x = torch.randn(1024, 512, device="cuda")
for window in ("3MiB", "64MiB"):
    store = ActivationStore(model, POLICY, min_bytes=0, tiers=[Window(window)])
    for _ in range(4):
        with store:
            loss = model(x).square().mean()
        loss.backward()
    del loss
    store.close()
torch.cuda.synchronize()
print("finished")
"""


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "copies that wait for nothing"])
@pytest.mark.parametrize("policy", ["raw @ host", "int8 @ host"])
def test_the_cuda_sanitizer_has_no_complaint(policy, planted):
    code = f"POLICY, PLANTED = {policy!r}, {planted}\n{_CHECKED}"
    root = Path(__file__).resolve().parents[2]
    environ = os.environ | {"TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=200, check=False
    )
    said = ("CSAN detected a possible data race" in done.stderr, "finished" in done.stdout)
    assert said == (planted, not planted), done.stderr[-4000:]
