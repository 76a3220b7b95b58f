"""Predicted gradient errors beside those that the payloads made."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore, SampleErrors
from actstore.accuracy.influence.node_error import convolution_change


def mlp(activation, depth=3, width=128):
    layers = [each for _ in range(depth) for each in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers, nn.Linear(width, 10)), torch.randn(256, width)


def convolutions(activation=nn.ReLU, norm=nn.BatchNorm2d, **options):
    layers, width = [], 4
    for wide in (8, 16):
        layers += [nn.Conv2d(width, wide, 3, padding=1, **options), norm(wide), activation()]
        width = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)), torch.randn(8, 4, 12, 12)


class Residual(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        return F.relu(x + self.norms[1](self.convs[1](F.relu(self.norms[0](self.convs[0](x))))))


def resnet():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(), Residual())
    return model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]), torch.randn(16, 3, 12, 12)


def encoder(activation, **options):
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, activation, batch_first=True, **options)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(body, nn.Flatten(), nn.Linear(32 * 16, 10)), torch.randn(16, 16, 32)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


MODELS = {
    "MLP, ReLU": lambda: mlp(nn.ReLU),
    "MLP, ReLU, deep": lambda: mlp(nn.ReLU, 8),
    "MLP, leaky ReLU": lambda: mlp(nn.LeakyReLU),
    "MLP, GELU": lambda: mlp(nn.GELU),
    "MLP, tanh": lambda: mlp(nn.Tanh),
    "MLP, sigmoid": lambda: mlp(nn.Sigmoid),
    "MLP, SiLU": lambda: mlp(nn.SiLU),
    "MLP, Hardswish": lambda: mlp(nn.Hardswish),
    "MLP, ELU": lambda: mlp(nn.ELU),
    "MLP, LayerNorm": lambda: mlp(lambda: nn.Sequential(nn.LayerNorm(128), nn.ReLU())),
    "convolutions": convolutions,
    "convolutions, no norm": lambda: convolutions(norm=nn.Identity),
    "convolutions, GroupNorm": lambda: convolutions(nn.SiLU, lambda width: nn.GroupNorm(2, width)),
    "convolutions, Hardswish": lambda: convolutions(nn.Hardswish),
    "convolutions, groups and strides": lambda: convolutions(groups=4, stride=2),
    "ResNet": resnet,
    "post-norm encoder, ReLU": lambda: encoder("relu"),
    "pre-norm encoder, GELU": lambda: encoder("gelu", norm_first=True),
    "LSTM": lambda: (Recurrent(), torch.randn(32, 6, 64)),
}


def gradients(model, x, y, store=None):
    model.zero_grad()
    if store is None:
        loss = F.cross_entropy(model(x), y)
    else:
        with store:
            loss = F.cross_entropy(model(x), y)
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.parametrize("policy", ["int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_the_predicted_error_is_that_of_the_gradients(name, policy):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    y = torch.randint(10, (len(x),))
    plain = gradients(model, x, y)
    store = ActivationStore(model, policy, min_bytes=0, observe=[SampleErrors(every=1)])
    found = gradients(model, x, y, store)
    effect = store.report().gradients
    error = float((found - plain).norm() / plain.norm())
    assert error / 2 <= effect.variance**0.5 <= 2 * error, (effect.variance**0.5, error, str(effect))


@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 1, "stride": 2}, {"dilation": 2, "padding": (2, 1)}, {"groups": 2, "padding": 1}],
    ids=str,
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_convolution_in_closed_form(options, layout):
    """Each element has an error of its own, as large as a tenth of it."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, **options)
    x = torch.randn(2, 4, 7, 8).to(memory_format=layout)
    y = conv(x)
    grad = torch.randn_like(y)
    slopes = torch.autograd.functional.jacobian(
        lambda x: torch.nn.grad.conv2d_weight(x, conv.weight.shape, grad, **options), x
    )
    wanted = 0.1 * (slopes.square().sum((0, 1, 2, 3)) * x.square()).sum().sqrt()
    found = convolution_change(y.grad_fn, x, grad, torch.tensor(0.1))
    torch.testing.assert_close(found, wanted)


def test_convolutions_have_room_in_a_step_without_room():
    """Their errors need no second run."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(32, 32, 3, padding=1) for _ in range(3)]
    model, x = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 256, 10)), torch.randn(32, 32, 16, 16)
    store = ActivationStore(model, "int8", min_bytes=0, observe=[SampleErrors(every=1)])
    gradients(model, x, torch.randint(10, (32,)), store)
    assert store.report().gradients.missing == ()
