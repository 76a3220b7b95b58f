"""The whole store on a CUDA device: exact, asynchronous, and the memory really goes."""

import os
from contextlib import nullcontext

import pytest
import torch
from torch.nn import GELU, GRU, LSTM, Dropout, LayerNorm, Linear, Module, ModuleList, RMSNorm, Sequential, SiLU
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from actstore import ActivationStore, Auto, Disk, Window
from actstore.bench.trainer import relative_error

pytestmark = pytest.mark.gpu
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic

WIDTH, HEADS, CONTEXT, BATCH, CLASSES = 256, 4, 128, 8, 50
LOSSLESS = [
    "keep",
    "raw",
    "raw @ host",
    "raw @ disk",
    "recompute",
    "recompute(raw @ host)",
    "recompute(raw @ disk)",
    "derive",
    "derive(raw @ host)",
]
LOSSY = [
    "int8",
    "int8 @ host",
    "int8 @ disk",
    "int8 @ host > disk",
    "recompute(int8)",
    "derive(int8)",
    "derive(int8 @ host)",
]


class Block(Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = LayerNorm(WIDTH), Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.mlp = Sequential(LayerNorm(WIDTH), Linear(WIDTH, 4 * WIDTH), GELU(), Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class Net(Module):
    def __init__(self):
        super().__init__()
        self.blocks = ModuleList(Block() for _ in range(4))
        self.head = Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def job():
    torch.manual_seed(0)
    model = Net().cuda()
    x = torch.randn(BATCH, CONTEXT, WIDTH, device="cuda")
    return model, x, torch.randint(CLASSES, (BATCH * CONTEXT,), device="cuda")


def forward(model, x, y):
    return cross_entropy(model(x).flatten(0, 1), y)


def step(job, store=None):
    """Loss and gradients of one step."""
    model, x, y = job
    model.zero_grad(set_to_none=True)
    if store is None:
        loss = forward(model, x, y)
    else:
        with store:
            loss = forward(model, x, y)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("policy", LOSSLESS)
@pytest.mark.parametrize("stream", ["default", "side"])
def test_lossless_is_bit_equal_for_several_steps(job, policy, stream, tmp_path):
    expected = step(job)
    store = ActivationStore(job[0], policy, min_bytes=0, tiers=[Disk(tmp_path)])
    side = torch.cuda.Stream() if stream == "side" else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            found = step(job, store)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert store.report().live_bytes == 0
    store.close()


@pytest.mark.parametrize(
    "policy", ["*/@matmul : keep; * : recompute", "*/@norm : raw; * : recompute", "recompute(int8)"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_norms_are_those_of_plain_training(policy, dtype):
    """RMSNorm has a kernel on CUDA, and a composition with other bits and more bytes for other devices."""
    torch.manual_seed(0)
    blocks = [Sequential(RMSNorm(WIDTH), Linear(WIDTH, WIDTH), SiLU(), RMSNorm(WIDTH)) for _ in range(3)]
    model = Sequential(*blocks).cuda().to(dtype)
    x = torch.randn(BATCH, 32, WIDTH, device="cuda", dtype=dtype)
    found = []
    for store in (ActivationStore(model, "keep", min_bytes=0), ActivationStore(model, policy, min_bytes=0)):
        model.zero_grad(set_to_none=True)
        with store:
            output = model(x)
        output.float().square().mean().backward()
        found.append([store.report().saved_bytes, output.detach(), [p.grad for p in model.parameters()]])
    (nbytes, wanted, grads), (saved, output, others) = found
    assert saved == nbytes
    assert torch.equal(output, wanted)
    assert "int8" in policy or all(torch.equal(a, b) for a, b in zip(others, grads, strict=True))


class Recurrent(Module):
    def __init__(self, kind):
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers=3, dropout=0.3, batch_first=True)

    def forward(self, x):
        return self.cells(x)[0]


def begins_anew(*_):
    """The next of cuDNN's recurrent layers begins its random numbers by a number of the generator."""
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())


@pytest.mark.parametrize(
    "policy",
    ["? : recompute", "? : recompute(raw @ host)", "?.0 : keep; ? : recompute", "?.0.cells : keep; ? : recompute",
     "*/@aten.* : keep; ? : recompute"],
)  # fmt: skip
def test_dropout_of_recurrent_layers_is_that_of_forward(policy):
    """cuDNN has a state of its own for it. Where a region has begun that anew, plain training does here, too."""
    torch.manual_seed(0)
    blocks = [Sequential(Recurrent(kind), Dropout(0.1), Recurrent(kind)) for kind in (LSTM, GRU, LSTM)]
    model = Sequential(*blocks).cuda()
    x = torch.randn(BATCH, 32, WIDTH, device="cuda")
    found = []
    for store in (None, ActivationStore(model, policy, min_bytes=0)):
        plain = [] if store else [module.register_forward_pre_hook(begins_anew) for module in blocks]
        once = {"?.0": 0, "*/@": 1}.get(policy[:3])  # the part that later runs do not run
        parts = [block[once] for block in blocks if store is None and once is not None]
        plain += [part.register_forward_hook(begins_anew) for part in parts]
        torch.manual_seed(1)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            with store or nullcontext():
                loss = model(x).square().mean()
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        for hook in plain:
            hook.remove()
    wanted, found = found[:2], found[2:]
    for a, b in zip(found, wanted, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


@pytest.mark.parametrize("policy", LOSSY)
def test_lossy_is_near_and_repeats(job, policy, tmp_path):
    expected = step(job)
    store = ActivationStore(job[0], policy, min_bytes=0, tiers=[Disk(tmp_path)])
    first, second = step(job, store), step(job, store)
    assert torch.equal(first[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    error = sum((a - b).double().square().sum() for a, b in zip(first[1:], expected[1:], strict=True))
    norm = sum(b.double().square().sum() for b in expected[1:])
    assert 0 < (error / norm).sqrt().item() < 0.03
    store.close()


@pytest.mark.parametrize(
    ("policy", "most"), [("int8", 0.45), ("raw @ host", 0.2), ("int8 @ host", 0.2), ("recompute", 0.3)]
)
def test_the_allocator_sees_what_the_report_says(job, policy, most):
    model, x, y = job
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Window("1MiB")])
    step(job, store)
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    with store:
        loss = forward(model, x, y)
    torch.cuda.synchronize()
    report = store.report()  # lets go of device buffers whose copies have ended
    held = torch.cuda.memory_allocated() - before
    assert report.saved_bytes > 20 * 2**20
    assert held < most * report.saved_bytes
    loss.backward()
    store.close()


@pytest.mark.parametrize("policy", ["keep", "raw", "int8", "raw @ host", "int8 @ host", "recompute(int8 @ host)"])
def test_forward_never_waits_for_the_device(job, policy):
    model, x, y = job
    store = ActivationStore(model, policy, min_bytes=0)
    step(job, store)  # compiles kernels, pins memory
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with store:
            loss = forward(model, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loss.backward()
    assert loss.isfinite()
    store.close()


def test_interleaved_graphs_and_a_slow_device(job):
    model, x, y = job
    expected = step(job)[1:]
    store = ActivationStore(model, "raw @ host", min_bytes=0)
    model.zero_grad(set_to_none=True)
    losses = []
    for _ in range(3):
        with store:
            torch.cuda._sleep(50_000_000)  # the host runs far ahead
            losses.append(forward(model, x, y))
    for index in (1, 0, 2):
        losses[index].backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient + gradient + gradient)
    del losses
    assert store.report().live_bytes == 0
    store.close()


@pytest.mark.parametrize("max_noise", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_plan_lets_tensors_wait_in_host_memory_or_encodes(backend, max_noise):
    """Within a budget of half of the peak, under which the copies' buffers are counted, too."""
    torch._dynamo.reset()
    peaks, grads = {}, {}
    window = Window("4MiB") if not max_noise else Window(when_full="keep")  # nothing leaves
    for budget in (None, 0.5):
        torch.manual_seed(0)
        model, x = Net().cuda(), torch.randn(64, CONTEXT, WIDTH, device="cuda")
        policy = None if budget is None else Auto(int(budget * peaks[None]), max_noise)
        store = None if policy is None else ActivationStore(model, policy, tiers=[window])
        model.compile(backend=backend) if store is None else store.compile(backend=backend)
        if store is not None and max_noise:
            noise = {name: 1e-6 for name, _ in model.named_modules() if name}
            store._controller.resume({"plan": None, "noise": noise}, None)
        for _ in range(2):
            model.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with store or nullcontext():
                loss = model(x).square().mean()
            loss.backward()
            torch.cuda.synchronize()
            peaks[budget] = torch.cuda.max_memory_allocated() - before
        grads[budget] = [weight.grad for weight in model.parameters()]
    assert peaks[0.5] <= 0.5 * peaks[None] + 2**20  # the loss is outside of the graph
    if max_noise:
        assert store.graph_plan.away == 0
        assert relative_error(grads[0.5], grads[None]) < 0.01
        return
    assert store.graph_plan.tier == "host"
    assert store.graph_plan.away > 0
    if backend == "aot_eager":
        assert all(map(torch.equal, grads[0.5], grads[None]))
