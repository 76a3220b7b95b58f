"""Tensors that backward derives from lossy payloads: the operator on the decoded input, where nothing decides by it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore, SampleErrors
from actstore.codecs import Int4, Int8
from tests.autograd.checks import check_drained, check_same
from tests.autograd.test_derived import OPERATORS, WIDTH, Called, Reader, build

CODECS = {"int8": Int8(), "int4": Int4()}
SHAPE = 4, WIDTH, 6
DECIDE = ("hardswish", "hardtanh", "relu6", "leaky relu", "elu", "selu")  # by a bound, of which one bit waits


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def decoded(x, codec):
    """What a payload of `x` decodes to."""
    bound = codec.bind(x)
    payload, back = torch.empty(bound.nbytes, dtype=torch.uint8), torch.empty_like(x)
    bound.encode(x, payload, 0)
    bound.decode(payload, back, 0)
    return back


def derived_sites(store):
    """Sites that saved bytes of which none wait."""
    return {
        str(site.site) for site in store.report().sites if site.saved_bytes and not site.stored_bytes + site.held_bytes
    }


def standardized(x, exact, norm, dims):
    """A norm of `x`, an error included, by the statistics that the norm has of `exact`, for native kernels by hand."""
    x, exact = x.float(), exact.float()
    mean = exact.mean(dims, keepdim=True)
    rstd = (exact.var(dims, unbiased=False, keepdim=True) + norm.eps).rsqrt()
    return (x - mean) * rstd


def gradient_of_the_reader(model, x, policy, **options):
    """What backward reads of the operator's output, as the gradient of the reader's weight times a number of bits."""
    store = ActivationStore(model, policy, min_bytes=0, **options)
    with store:
        out = model.second(model.operator(model.first(x)))
    sites = derived_sites(store)
    (found,) = torch.autograd.grad(out, [model.second.weight], torch.full_like(out, 2.0))
    del out
    check_drained(store)
    return found / 2, sites


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in (*DECIDE, "mul") and "norm" not in name])
def test_an_operator_runs_on_its_decoded_input(name, codec):
    model, x = build(name), torch.randn(SHAPE)
    found, sites = gradient_of_the_reader(model, x, f"derive({codec})")
    assert "second[0]" in sites
    with torch.no_grad():
        h = model.first(x)
        wanted = model.operator(decoded(h, CODECS[codec]))
    check_same(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in OPERATORS if "norm" in name])
def test_a_norm_has_exact_statistics(name, dtype):
    """The statistics are those of the exact input; that of the decoded one are others."""
    model, x = build(name, dtype), torch.randn(SHAPE).to(dtype)
    found, sites = gradient_of_the_reader(model, x, "derive(int4)")
    if name == "rms norm" and dtype.itemsize < 4:
        return  # on a CPU a cast of a product
    assert "second[0]" in sites
    norm = model.operator
    with torch.no_grad():
        h = model.first(x)
        back = decoded(h, Int4())
        if isinstance(norm, nn.GroupNorm):
            parts = (each.unflatten(1, (4, -1)) for each in (back, h))
            wanted = standardized(*parts, norm, (2, 3)).flatten(1, 2)
        elif isinstance(norm, nn.RMSNorm):
            wanted = back * (h.square().mean(-1, keepdim=True) + torch.finfo(dtype).eps).rsqrt()
        else:
            wanted = standardized(back, h, norm, tuple(range(-len(norm.normalized_shape), 0)))
        for own, fold in ((norm.weight, torch.mul), (getattr(norm, "bias", None), torch.add)):
            if own is not None:
                wanted = fold(wanted, own[:, None] if isinstance(norm, nn.GroupNorm) else own)
        tolerance = 4 * torch.finfo(dtype).eps
        assert torch.allclose(found.float(), wanted.float(), rtol=tolerance, atol=2 * tolerance)
        assert dtype.itemsize < 4 or not torch.allclose(found, norm(back), rtol=tolerance, atol=2 * tolerance)
    again, _ = gradient_of_the_reader(model, x, "derive(int4)")
    check_same(again, found)


@pytest.mark.parametrize("name", DECIDE)
def test_what_decides_by_its_input_is_no_source(name):
    """Backward of the operator reads a bit an element of its input, or all of it; its output has a payload."""
    model, x = build(name), torch.randn(SHAPE)
    found, sites = gradient_of_the_reader(model, x, "derive(int8)")
    assert "second[0]" not in sites
    check_same(found, gradient_of_the_reader(model, x, "int8")[0])


READ = {
    "its sign": torch.abs,
    "its value": lambda y: y.clamp(-0.1, 0.1),
    "as a divisor": lambda y: 1.0 / y,
    "its own sign": F.relu,
    "many of one element": lambda y: y.mean(1, keepdim=True) * torch.ones(SHAPE),
}


@pytest.mark.parametrize("read", READ)
def test_decisions_are_those_of_the_codec_alone(read):
    """What decides by an output of GELU gets what it gets under the codec alone: signs, or all bits."""
    model = nn.Sequential(Reader(SHAPE), nn.GELU(), Called(READ[read]), Reader(SHAPE), Called(torch.sum))
    x, found = torch.randn(SHAPE), []
    for policy in ("int8", "derive(int8)"):
        store = ActivationStore(model, policy, min_bytes=0)
        with store:
            loss = model(x)
        found.append(torch.autograd.grad(loss, [model[0].weight]))
    if read != "its own sign":  # ReLU's input is not saved, and its output is encoded alike
        assert not derived_sites(store) & {"2[0]"}
    check_same(*found)


def test_a_chain_of_products():
    """SwiGLU: of five tensors that it saves two wait, and three are made of them."""

    class SwiGlu(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x)).sum()

    model, x = SwiGlu(), torch.randn(8, 32)
    store = ActivationStore(model, "derive(int8)", min_bytes=0)
    with store:
        loss = model(x)
    loss.backward()
    gate, up = (decoded(layer(x).detach(), Int8()) for layer in (model.gate, model.up))
    check_same(model.down.weight.grad, torch.ones(8, 32).t().mm(F.silu(gate) * up))
    assert derived_sites(store) == {"(top)[2]", "down[0]"}


@pytest.mark.parametrize(
    ("first", "rest", "derives"),
    [
        ("int8", "int8", True),
        ("raw", "int8", True),
        ("int4", "int8", False),
        ("int8(round=dither)", "int8", False),
        ("int8", "keep", False),
        ("int8", "raw", False),
    ],
)
def test_it_is_made_of_payloads_of_its_own_codec(first, rest, derives):
    """So it has no larger error than the user allows at its own site."""
    model = build("gelu")
    _, sites = gradient_of_the_reader(model, torch.randn(SHAPE), f"operator : {first}; * : derive({rest})")
    assert ("second[0]" in sites) == derives


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_it_waits_anywhere(tier):
    model, x = build("silu"), torch.randn(SHAPE)
    found, sites = gradient_of_the_reader(model, x, "derive(int8)" if tier == "device" else f"derive(int8 @ {tier})")
    assert "second[0]" in sites
    check_same(found, F.silu(decoded(model.first(x).detach(), Int8())))


# -- errors -----------------------------------------------------------------------------------------------------------


def errors_of(model, x, policy):
    store = ActivationStore(model, policy, min_bytes=0, observe=[SampleErrors(every=1)])
    for _ in range(2):
        with store:
            loss = model(x)
        loss.backward()
    return store.report()


@pytest.mark.parametrize("tier", ["", " @ disk", " @ host"])
def test_its_error_is_measured_and_predicted(tier):
    model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8), Called(torch.sum)), torch.randn(32, 16)
    report = errors_of(model, x, f"derive(int8{tier})")
    found = {str(site.site): site.error for site in report.sites if site.error is not None}
    exact = model[:2](x).detach()
    back = F.gelu(decoded(model[0](x).detach(), Int8()))
    assert found["2[0]"].measured == found["2[0]"].payloads == 1
    assert found["2[0]"].relative == pytest.approx(float((back - exact).norm() / exact.norm()), rel=1e-3)
    effects = {effect.site: effect for effect in report.gradients.sites}
    assert effects["2[0]"].variance > 0
    assert effects["2[0]"].nodes == ("AddmmBackward0",)


def test_an_error_that_has_left_is_not_measured(monkeypatch):
    """A sampled step moves no payload: where the bytes have left the device, it says so."""
    monkeypatch.setattr("actstore.transfer.Engine.peek", lambda self, berth: None)
    model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8), Called(torch.sum)), torch.randn(32, 16)
    found = {str(site.site): site.error for site in errors_of(model, x, "derive(int8 @ disk)").sites}
    assert (found["2[0]"].payloads, found["2[0]"].measured) == (1, 0)


def test_one_site_alone_has_an_error():
    """As `measure_gradient_error` measures it: a derived site then has a payload of its own."""
    from actstore import measure_gradient_error

    model, x = (
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8), Called(torch.sin), Called(torch.sum)),
        torch.randn(32, 16),
    )
    store = ActivationStore(model, "derive(int8)", min_bytes=0)
    found = measure_gradient_error(lambda: model(x).backward(), store, draws=2, each_site=True)
    of = {each.effect.site: each for each in found.sites}
    assert 0.5 < of["2[0]"].measured / of["2[0]"].effect.variance ** 0.5 < 2
