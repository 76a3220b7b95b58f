"""A recomputed module runs again under the settings of PyTorch that its first run had."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from actstore import ActivationStore
from actstore.errors import StateError
from tests.autograd.checks import check_same
from tests.autograd.models import WIDTH
from tests.recompute.regions import Runs

RECOMPUTE = ["recompute", "recompute(raw @ disk)", "recompute(segment=2)"]


def settings():
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "order": tuple(torch._C._get_sdp_priority_order()),
        "onednn": torch._C._get_mkldnn_enabled(),
    }


class Notes(nn.Module):
    """Notes the settings of each run."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Linear(WIDTH, WIDTH), Runs()

    def forward(self, x):
        self.seen.append(settings())
        return torch.tanh(self.inner(x) + torch.ones(()).to(x))


@pytest.fixture
def restored():
    before = settings()
    yield before
    torch.set_num_threads(before["threads"])
    torch.set_default_dtype(before["dtype"])
    torch.use_deterministic_algorithms(before["deterministic"])
    torch._C._set_mkldnn_enabled(before["onednn"])


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_the_second_run_has_the_settings_of_the_first(decision, restored):
    model, x = nn.Sequential(Notes(), Notes(), Notes()), torch.randn(3, WIDTH)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch._C._set_mkldnn_enabled(False)
    with ActivationStore(model, f"[0-9] : {decision}", min_bytes=0), sdpa_kernel([SDPBackend.MATH], set_priority=True):
        torch.use_deterministic_algorithms(True)
        first = settings()
        loss = model(x).sum()
    torch.use_deterministic_algorithms(restored["deterministic"])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch._C._set_mkldnn_enabled(True)
    now = settings()
    differ = {name for name in now if now[name] != first[name]}
    assert differ >= {"threads", "dtype", "deterministic", "flash", "onednn"}
    loss.backward()
    assert settings() == now
    seen = [each for block in model for each in block.seen]
    assert len(seen) >= 6
    assert all(each == first for each in seen)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        heads = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return scaled_dot_product_attention(*heads)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_takes_the_same_way_outside_of_the_context_that_chose_it(backend):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attends()), torch.randn(2, 8, WIDTH)
    leaves = list(model.parameters())
    with sdpa_kernel([backend]):
        with ActivationStore(model, "0 : recompute", min_bytes=0):
            loss = model(x).square().sum()
        wanted = model(x).square().sum()
    check_same(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves))


def test_denormals_are_flushed_as_in_the_first_run():
    class Notes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.seen = nn.Linear(WIDTH, WIDTH), Runs()

        def forward(self, x):
            self.seen.append(float(torch.tensor(1e-38) * 0.1))
            return torch.tanh(self.inner(x))

    model, x = nn.Sequential(Notes()), torch.randn(3, WIDTH)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        with ActivationStore(model, "0 : recompute", min_bytes=0):
            loss = model(x).sum()
    finally:
        torch.set_flush_denormal(False)
    loss.backward()
    assert model[0].seen == [0.0, 0.0]
    assert float(torch.tensor(1e-38) * 0.1) > 0


class DoublesFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.nn.functional.linear else result


class DoublesOperators(TorchDispatchMode):
    entered = 0

    def __enter__(self):
        self.entered += 1
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.ops.aten.addmm.default else result


@pytest.mark.parametrize("kind", [DoublesFunctions, DoublesOperators])
@pytest.mark.parametrize("decision", [*RECOMPUTE, "recompute(decisions=kept)"])
def test_modes_around_forward_are_around_the_second_run(kind, decision):
    torch.manual_seed(0)
    model, x, mode = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
        torch.randn(3, WIDTH),
        kind(),
    )
    leaves = list(model.parameters())
    with mode:
        wanted = model(x).square().sum()
        with ActivationStore(model, f"[0-9] : {decision}", min_bytes=0):
            loss = model(x).square().sum()
    wanted = torch.autograd.grad(wanted, leaves)
    check_same(torch.autograd.grad(loss, leaves, retain_graph=True), wanted)
    with mode:
        assert torch.autograd.grad(loss, leaves)[0].shape == wanted[0].shape
    assert getattr(mode, "entered", 2) == 2
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_mode_that_is_gone_is_refused():
    model, x, mode = (
        nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
        torch.randn(3, WIDTH),
        DoublesFunctions(),
    )
    with mode, ActivationStore(model, "0 : recompute", min_bytes=0):
        loss = model(x).square().sum()
    del mode
    gc.collect()
    with pytest.raises(StateError, match="mode=DoublesFunctions: it was around the forward"):
        loss.backward()


def test_another_precision_of_products_is_refused():
    model, x = nn.Sequential(Notes()), torch.randn(3, WIDTH)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        loss = model(x).sum()
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(StateError, match=r"mkldnn\.matmul was .* and is 'bf16'"):
            loss.backward(retain_graph=True)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    loss.backward()


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_the_second_run_makes_tensors_on_the_device_of_the_first(decision):
    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.seen = nn.Linear(WIDTH, WIDTH), Runs()

        def forward(self, x):
            self.seen.append(torch.get_default_device().type)
            return torch.tanh(self.inner(x) * torch.ones(WIDTH))

    model, x = nn.Sequential(Makes(), Makes()), torch.randn(3, WIDTH)
    leaves = list(model.parameters())
    with ActivationStore(model, f"[0-9] : {decision}", min_bytes=0):
        loss = model(x).sum()
    wanted = torch.autograd.grad(model(x).sum(), leaves)
    with torch.device("meta"):
        found = torch.autograd.grad(loss, leaves, torch.ones((), device="cpu"))
        assert torch.get_default_device().type == "meta"
    assert torch.get_default_device().type == "cpu"
    check_same(found, wanted)
    assert {device for block in model for device in block.seen} == {"cpu"}


class Tanh(nn.Module):
    def forward(self, weight):
        return weight.tanh()


@pytest.mark.parametrize("around", ["the region", "the store"])
@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_second_run_computes_the_parametrizations_that_the_first_computed(decision, around):
    def gradients(policy):
        torch.manual_seed(0)
        model, x = (
            nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))),
            torch.randn(3, WIDTH),
        )
        for block in model:
            parametrize.register_parametrization(block[0], "weight", Tanh())
        store = ActivationStore(model, policy, min_bytes=0)
        if around == "the store":
            with parametrize.cached(), store:
                loss = (model(x) * model(x.cos())).sum()
        else:
            with store, parametrize.cached():
                loss = (model(x) * model(x.cos())).sum()
        with parametrize.cached():  # of another forward
            model(x)
            cache = dict(parametrize._cache)
            loss.backward()
            assert parametrize._cache == cache
        return [weight.grad for weight in model.parameters()]

    check_same(gradients(f"[0-9] : {decision}"), gradients("keep"))
