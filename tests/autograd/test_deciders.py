"""What backward decides by survives lossy payloads: signs behind ReLU, and the sides of other kinks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial, reduce
from itertools import count, cycle

import pytest
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from actstore import ActivationStore

CASES = {
    "hardtanh": F.hardtanh,
    "hardtanh with bounds": lambda x: F.hardtanh(x, -0.5, 0.1),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "hardsigmoid": F.hardsigmoid,
    "threshold": lambda x: F.threshold(x, 0.3, 0.1),
    "Hardshrink": nn.Hardshrink(0.5),
    "Softshrink": nn.Softshrink(0.3),
    "Hardtanh": nn.Hardtanh(-1, 3),
    "ReLU6": nn.ReLU6(),
    "LeakyReLU": nn.LeakyReLU(0.2),
    "ReLU": nn.ReLU(),
    "relu_": lambda x: F.relu(x, inplace=True),
    "torch.relu": torch.relu,
    "a view of relu": lambda x: torch.relu(x).view(-1),
    "hardtanh in place": lambda x: F.hardtanh(x, inplace=True),
    "relu6 in place": lambda x: F.relu6(x, inplace=True),
    "leaky_relu in place": lambda x: F.leaky_relu(x, inplace=True),
    "hardsigmoid in place": lambda x: F.hardsigmoid(x, inplace=True),
    "threshold in place": lambda x: F.threshold(x, 0.3, 0.1, inplace=True),
    "ReLU6 in place": nn.ReLU6(inplace=True),
}
CLAMP = partial(torch.clamp, min=0)
NAMED = {  # what a model calls itself
    "x.clamp": lambda x: x.clamp(0),
    "x.clamp of two": lambda x: x.clamp(-0.5, max=0.3),
    "x.clamp of what is computed": lambda x: x.clamp(0.1 * len(x.shape), 3),
    "x.clamp of tensors": lambda x: x.clamp(torch.zeros_like(x), torch.ones_like(x)),
    "x.clamp of a list": lambda x: x.clamp(*[-0.5, 0.3]),
    "x.clamp of keywords": lambda x: x.clamp(**dict.fromkeys(["min"], 0.1)),
    "x.clamp_": lambda x: x.clone().clamp_(0),
    "x.clamp_min": lambda x: x.clamp_min(0.1),
    "torch.clamp": lambda x: torch.clamp(x, max=1.0),
    "in a row": lambda x: (
        x.add(1)  # in lines of its own
        .clamp(
            0.3,
            3,
        )
        .add(1)
    ),
    "x.abs": lambda x: x.abs(),
    "abs": lambda x: abs(x),  # noqa: PLW0108  (a call by its name)
    "torch.abs": lambda x: torch.abs(x),  # noqa: PLW0108
    "in a list": lambda x: [torch.abs(row) for row in (x,)][0],  # noqa: RUF015
    "x.relu_": lambda x: x.relu_(),
    "torch.hardshrink": lambda x: torch.hardshrink(x, 0.5),
    "F.softshrink": lambda x: F.softshrink(x, 0.3),
    "torch.threshold": lambda x: torch.threshold(x, 0.3, 0.1),
    "F.prelu": lambda x: F.prelu(x, x.new_tensor([0.1])),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "amax": lambda x: x.view(-1, 2).amax(1),
    "x.max": lambda x: x.max(),
    "max of dim": lambda x: x.view(-1, 2).max(1).values,
    "x.median": lambda x: x.median(),
    "norm of order 1": lambda x: x.view(-1, 5).norm(1, dim=1),
    "norm of order inf": lambda x: x.view(-1, 5).norm(torch.inf, dim=1),
    "x.sign": lambda x: x.sign() * x.detach(),
    "copysign": lambda x: torch.copysign(x, x),
    "in a variable": lambda x, f=torch.clamp: f(x, 0),
    "a partial in a variable": lambda x, f=CLAMP: f(x),
    "of torch.ops": lambda x: torch.ops.aten.clamp(x, 0.1),
    "leaky_relu of torch.ops": lambda x: torch.ops.aten.leaky_relu(x, 0.1),
    "hardswish's kink, of torch.ops": lambda x: torch.ops.aten.hardswish(x),  # noqa: PLW0108
    "an overload": lambda x: torch.ops.aten.abs.default(x),  # noqa: PLW0108
}
UNNAMED = {  # in the source, whatever is called
    "map": lambda x: next(map(torch.abs, [x])),
    "map in a list": lambda x: [*map(torch.abs, [x])][0],  # noqa: RUF015
    "map in a sum": lambda x: sum(map(torch.abs, [x])),
    "reduce": lambda x: reduce(torch.maximum, [x, x.flip(0)]),
    "either": lambda x: (torch.abs if x.dim() else torch.sin)(x),
    "an item": lambda x: {"clamp": torch.clamp}["clamp"](x, 0.1, 0.3),
    "getattr": lambda x: getattr(x, "abs")(),  # noqa: B009
    "a script": lambda x: SCRIPT(x),  # noqa: PLW0108
    "linalg": lambda x: torch.linalg.vector_norm(x.view(-1, 5), 1, dim=1),
}
SCRIPT = torch.jit.CompilationUnit("def f(x):\n    return torch.clamp(x, 0.1, 0.3)\n").f


class Rectified(Function):
    """Decides by the sign of its input; classes of it by other numbers."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


class ByOutput(Rectified):
    @staticmethod
    def forward(ctx, x):
        out = x.clamp(0)
        ctx.save_for_backward(out)
        return out


class BySetup(Rectified):
    @staticmethod
    def forward(x):
        return x.clamp(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class ByValue(Rectified):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x > 0.3)


class ByHelper(Rectified):
    @staticmethod
    def backward(ctx, grad):
        return grad * helper(*ctx.saved_tensors)


class ByMethod(Rectified):
    @staticmethod
    def mask(x):
        return [x.ge(each) for each in (0.1,)][0]  # noqa: RUF015

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(0)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return grad * ByMethod.mask(*ctx.saved_tensors)


class ByClamp(Rectified):
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].clamp(0.1).sign()


class ByProduct(Rectified):
    """Whose sign is not that of what it saved."""

    @staticmethod
    def backward(ctx, grad):
        product = ctx.saved_tensors[0] * 3 - 1
        return grad * (product > 0)


class Smooth(Rectified):
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] ** 2 / 2


class Divided(Rectified):
    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.saved_tensors[0]


class Rooted(Rectified):
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].rsqrt()


def helper(x):
    return x < 0.5


FUNCTIONS = {
    each.__name__: each.apply
    for each in (Rectified, ByOutput, BySetup, ByValue, ByHelper, ByMethod, ByClamp, ByProduct)
}
ANY_WAY = ("hardtanh", "relu6", "shrink")  # PyTorch itself passes some NaN and blocks others, by their place
KINKS = [0.0, -0.0, 0.1, 0.3, 0.5, -0.5, 1.0, -1.0, 2.0, 3.0, -3.0, 6.0]


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x * 1.0)  # which saves nothing, but gives a producer


def values(dtype):
    """Numbers at the kinks, just beside them and everywhere, with NaN and infinities."""
    torch.manual_seed(0)
    kinks = torch.tensor(KINKS, dtype=dtype)
    beside = torch.cat([kinks, *(torch.nextafter(kinks, torch.tensor(end, dtype=dtype)) for end in (9.0, -9.0))])
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    return torch.cat([beside.repeat(40), odd, 3 * torch.randn(5000).to(dtype)])


def gradient(function, x, policy):
    model, x = Net(function), x.clone().requires_grad_()
    store = ActivationStore(model, policy, min_bytes=0)
    for _ in range(2):  # the second step follows what the first has learned
        x.grad = None
        with store:
            out = model(x)
        out.backward(torch.ones_like(out))
    report = store.report()
    store.close()
    return x.grad, report


@pytest.mark.parametrize("policy", ["int8", "int4", "fp8", "nf4", "int8 @ host"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_kinks_are_exact(name, policy, dtype):
    x = values(dtype)
    if policy in ("int4", "nf4"):
        x = x[x.isfinite()]  # one NaN takes its group with it, where the values are stored
    if name.lower().startswith(ANY_WAY) or name.lower().endswith(ANY_WAY):
        x = x[~x.isnan()]
    if name in ("ReLU", "relu_", "torch.relu", "a view of relu"):
        x = x[x.isfinite()]  # their results wait as values: what is not finite comes back as NaN
    expected, _ = gradient(CASES[name], x, "keep")
    found, _ = gradient(CASES[name], x, policy)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


def test_the_options_of_a_codec_win():
    x = values(torch.float32)
    x = x[x.isfinite()]
    expected, _ = gradient(torch.relu, x, "keep")
    found, _ = gradient(torch.relu, x, "int8(signs=round)")
    assert not torch.equal(found, expected)  # what small values lose


def test_what_cannot_keep_signs_stays_exact_with_a_reason():
    x = values(torch.float32)
    expected, _ = gradient(torch.relu, x, "keep")
    found, report = gradient(torch.relu, x, "topk(fraction=0.1)")
    assert torch.equal(found, expected)
    assert "ReluBackward0 decides by its sign, which topk loses" in str(report)


IN_PLACE = {name: run for name, run in (CASES | NAMED).items() if name.endswith(("_", "in place"))} | {
    "ELU": nn.ELU(0.3, inplace=True),
    "SELU": nn.SELU(inplace=True),
}
PARTS = {
    "whole": lambda x: x.view(-1, 1),
    "slice": lambda x: x[: len(x) // 2],
    "transposed": lambda x: x[: len(x) // 2 * 2].view(2, -1).t(),
    "view of a view": lambda x: x[1:].view(-1, 1).squeeze(1),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_on_a_view(name, part):
    """As an activation in place does to the output of a linear layer of 3 dimensions, which is a view."""
    x = values(torch.float32)
    x = x[x.isfinite()]
    expected, _ = gradient(lambda x: IN_PLACE[name](PARTS[part](x)), x, "keep")
    found, _ = gradient(lambda x: IN_PLACE[name](PARTS[part](x)), x, "int8")
    of_values = name in ("ELU", "SELU")  # their slopes jump by 0.7
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2 if of_values else 0)


@pytest.mark.parametrize("policy", ["int8", "int4"])
@pytest.mark.parametrize("name", NAMED)
def test_a_model_calls_an_operator_itself(name, policy):
    x = values(torch.float32)
    x = x[x.isfinite()][:5000]
    expected, _ = gradient(NAMED[name], x, "keep")
    found, _ = gradient(NAMED[name], x, policy)
    assert torch.equal(found, expected)


def test_one_line_calls_one_operator_after_the_other():
    x = values(torch.float32)
    x = x[x.isfinite()][:5000]
    found = []
    for policy in ("keep", "int4"):
        turn = cycle([torch.sin, torch.abs])
        grad, _ = gradient(lambda x, turn=turn: [f(x) for f in [next(turn)]][0], x, policy)  # noqa: RUF015
        found.append(grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("policy", ["int4", "nf4 @ disk"])
@pytest.mark.parametrize("name", [*UNNAMED, *FUNCTIONS])
def test_calls_without_a_name_and_functions(name, policy):
    x = values(torch.float32)
    x = x[x.isfinite()][:5000]
    expected, _ = gradient((UNNAMED | FUNCTIONS)[name], x, "keep")
    found, _ = gradient((UNNAMED | FUNCTIONS)[name], x, policy)
    assert torch.equal(found, expected)


def test_what_a_function_saves_is_lossy_but_for_its_signs():
    x = values(torch.float32)
    x = x[x.isfinite()][:5000]
    _, report = gradient(Smooth.apply, x, "int8")
    assert report.lossy
    small, _ = gradient(Smooth.apply, torch.full((5000,), 1e-4).index_fill(0, torch.tensor(0), 1.0), "int8")
    assert small.all()
    _, report = gradient(FUNCTIONS["ByHelper"], x, "int8")
    assert [site.note for site in report.sites] == ["kept: backward of ByHelper needs all of its bits"]


@pytest.mark.parametrize("policy", ["int4", "int8 @ disk"])
def test_a_reentrant_checkpoint_runs_again_from_exact_inputs(policy):
    x = values(torch.float32)
    x = x[x.isfinite()][:5000]

    def function(x):
        return checkpoint(lambda x: x.clamp(0.1, 0.3).square(), x, use_reentrant=True)

    expected, _ = gradient(function, x, "keep")
    found, _ = gradient(function, x, policy)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("steps", ["same", "other"])
@pytest.mark.parametrize("name", NAMED)
def test_a_mode_calls_the_operator(name, steps):
    """As where a default device is set. In the `other` first step, the line of the mode called another operator."""
    x = values(torch.float32)
    x = x[x.isfinite()][:5000]

    def function(calls):
        return lambda x: x.sin() if steps == "other" and next(calls) == 0 else NAMED[name](x)

    with torch.device("cpu"):
        expected, _ = gradient(function(count()), x, "keep")
        found, _ = gradient(function(count()), x, "int4")
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.gelu(F.linear(x.view(-1, 50), torch.ones(50, 50))),
        lambda x: torch.sin(x) @ x,
        lambda x: x.pow(2) * x.sigmoid() / 2,
        lambda x: next(f(x) for f in (torch.sin,)),
        lambda x: torch.ops.aten.sin(x),  # noqa: PLW0108
        lambda x: F.layer_norm(x.view(-1, 50), (50,)).exp(),
        lambda x: F.grid_sample(x.view(1, 1, 50, 100), torch.zeros(1, 50, 100, 2), align_corners=False),
        nn.Sequential(nn.Unflatten(0, (-1, 1, 50)), nn.TransformerEncoderLayer(50, 5, 50, activation=F.gelu)),
        nn.Sequential(nn.Unflatten(0, (-1, 1, 50)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Mish()),
    ],
)
def test_nothing_else_costs_bytes(function):
    x = values(torch.float32)
    _, report = gradient(function, x[x.isfinite()][:5000], "int8")
    assert report.lossy
    assert not [site for site in report.sites if "needs all" in site.note or "decides" in site.note]


@pytest.mark.parametrize(
    ("function", "slope"),
    [
        (F.hardswish, 2.0),
        (nn.Hardswish(), 2.0),
        (nn.Hardswish(inplace=True), 2.0),
        (F.elu, 1.0),
        (nn.ELU(alpha=2.0), 2.0),
        (F.selu, 1.7581),
        (nn.SELU(), 1.7581),
        (F.celu, 1.0),
        (nn.CELU(alpha=0.5), 1.0),
    ],
)
@pytest.mark.parametrize(("policy", "bits"), [("int8", 8), ("int4", 5), ("int3 @ host", 4)])
def test_slopes_are_off_by_half_a_level_of_as_many_bits(function, slope, policy, bits):
    """Hardswish's slope goes from -0.5 to 1.5 where it is not constant, ELU's over `slope`."""
    x = values(torch.float32)
    expected, _ = gradient(function, x, "keep")
    found, report = gradient(function, x, policy)
    assert any(site.note.startswith(f"{bits} bits an element") for site in report.sites)
    off = (found - expected)[x.isfinite()].abs()
    assert 0 < off.max() <= 0.5 * slope / (2**bits - 3) * 1.001 + 1e-6
    assert off[x[x.isfinite()] >= 3].max() == 0


def test_an_activation_in_place_adds_its_bits_to_the_payload_of_its_result():
    """What others read of the result need not keep signs for it."""
    x = values(torch.float32)
    x = x[x.isfinite()][:5000]
    _, report = gradient(lambda x: F.leaky_relu(x, inplace=True).sin(), x, "int8")
    assert [(site.stored_bytes, site.note) for site in report.sites] == [
        (625, "1 bit an element, all that backward of leaky_relu reads"),
        (5088, ""),
    ]


POLES = {
    "x.sqrt": lambda x: x.sqrt(),
    "x.sqrt_": lambda x: x.sqrt_(),
    "torch.log": lambda x: torch.log(x),  # noqa: PLW0108
    "x.pow": lambda x: x.pow(-0.5),
    "x.pow of a keyword": lambda x: x.pow(exponent=-0.5),
    "x.pow above 1": lambda x: x.pow(1.5),
    "x.pow of a variable": lambda x, power=-0.5: x.pow(power),
    "x.pow of either": lambda x: x.pow(-0.5 if x.dim() else 2),
    "x.pow of the other": lambda x: x.pow(2 if x.dim() > 1 else -0.5),
    "**": lambda x: x**-1,
    "** of a tensor": lambda x: x ** x.detach().neg(),
    "**=": lambda x: by_name(x.mul(1), "__ipow__", -0.5),
    "torch.pow": lambda x: torch.pow(x, 0.5),
    "x.reciprocal": lambda x: x.reciprocal(),
    "x.rsqrt": lambda x: x.rsqrt(),
    "1 /": lambda x: 1 / x,
    "/": lambda x: torch.ones_like(x) / x,
    "/=": lambda x: by_name(torch.ones_like(x), "__itruediv__", x),
    "div_": lambda x: torch.ones_like(x).div_(x),
    "/ behind a division": lambda x: (x.detach() / x) + (torch.ones_like(x) / x),
    "torch.div": lambda x: torch.div(torch.ones_like(x), x),
    "atan2": lambda x: torch.atan2(x, x.flip(0)),
    "prod": lambda x: x.view(-1, 5).prod(1),
    "a quotient of one size": lambda x: (x * 1e-3) / (x + 1e-6),
    "the same in place": lambda x: (x * 1e-3).div_(x + 1e-6),
    "Divided": Divided.apply,
    "Rooted": Rooted.apply,
}


def by_name(x, name, *args):
    return getattr(torch.Tensor, name)(x, *args)


def numbers_of_all_sizes():
    torch.manual_seed(0)
    return 10 ** (6 * torch.rand(5000) - 5)


@pytest.mark.parametrize("around", [nullcontext, lambda: torch.device("cpu")], ids=["plain", "in a mode"])
@pytest.mark.parametrize("policy", ["int8", "int4", "e5m6"])
@pytest.mark.parametrize("name", POLES)
def test_what_backward_divides_by_is_as_exact_as_it_was(name, policy, around):
    x = numbers_of_all_sizes()
    with around():
        expected, _ = gradient(POLES[name], x, "keep")
        found, _ = gradient(POLES[name], x, policy)
    assert torch.equal(found, expected)


def test_numerators_and_whole_powers_stay_lossy():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            rows = x.view(-1, 50).mean(1, keepdim=True)
            divided = (x + 1) / self.scale, x.add(2).div_(self.scale), x.add(3) / x.mean()
            return sum(divided) + (x.view(-1, 50).add(4) / rows).view(-1)

    x, model = numbers_of_all_sizes(), Scaled()
    for function, lossy in (
        (model, 4),
        (lambda x: x.pow(2) + x.add(1) ** 3 + torch.pow(x.add(2), 2.0) + x.add(3).square(), 4),
    ):
        _, report = gradient(function, x, "int8")
        assert len([site for site in report.lossy if not site.note]) >= lossy, report
    assert not [site for site in report.sites if "needs all" in site.note]
    with torch.device("cpu"):
        _, report = gradient(lambda x: x.pow(2) + x.add(1) ** 3, x, "int8")
    assert len(report.lossy) == 2


def test_what_has_no_room_for_levels_stays_exact_with_a_reason():
    x = values(torch.float32)
    expected, _ = gradient(F.hardswish, x, "keep")
    found, report = gradient(F.hardswish, x, "topk(fraction=0.01)")
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert "topk has no room for what backward of hardswish reads" in str(report)


class Named(nn.Module):
    """Modules with names of operators that need all bits."""

    def __init__(self):
        super().__init__()
        self.clamp, self.norm = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def forward(self, x):
        return self.norm(self.clamp(x * 1).sin())


@pytest.mark.parametrize("policy", ["clamp : recompute(int8)\nnorm : recompute(int8)", "int8"])
def test_a_module_with_the_name_of_an_operator_is_no_operator(policy):
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    model = Named()
    store = ActivationStore(model, policy, min_bytes=0)
    with store:
        out = model(x)
    out.sum().backward()
    report = store.report()
    store.close()
    assert len(report.lossy) >= 2
    assert not [site for site in report.sites if "needs all" in site.note]


def test_a_function_of_a_users_stays_lossy_as_its_codec_says():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    expected, _ = gradient(Doubled.apply, x, "keep")
    found, report = gradient(Doubled.apply, x, "int8")
    assert report.lossy
    assert not torch.equal(found, expected)
