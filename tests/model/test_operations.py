"""Operations of modules, for the ways in which models call attention."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from actstore.model.operations import Operation, is_attention, mixes_positions, operations


def eager_attention(module, x):
    return module.weights(x @ x.mT) @ x


@torch.library.custom_op("actstore_test::flash_attn_fwd", mutates_args=())
def flash_attn_fwd(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Processor:
    def __call__(self, module, x):
        return module.mixed(functional.scaled_dot_product_attention(x, x, x))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.weights, self.processor = nn.Linear(4, 4), nn.Softmax(-1), Processor()

    def mixed(self, x):
        return self.layer(x)


class ByFunction(Base):
    def forward(self, x):
        return eager_attention(self, self.layer(x))


class ByMethod(Base):
    def mixed(self, x):
        return torch.bmm(x.mT.softmax(-1), x)

    def forward(self, x):
        return self.mixed(x)


class ByProcessor(Base):
    def forward(self, x):
        return self.processor(self, x)


class ByFunctionClass(Base):
    def forward(self, x):
        return FlashAttnFunc.apply(x)


class ByOperator(Base):
    def forward(self, x):
        return torch.ops.actstore_test.flash_attn_fwd(x)


class ByWrappedOperator(Base):
    def forward(self, x):
        return flash_attn_fwd(x)


class ByModuleWithoutWeights(Base):
    def __init__(self):
        super().__init__()
        self.core = Core()

    def forward(self, x):
        return self.core(self.layer(x))


class Core(nn.Module):
    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x)


ATTENTION = [*Base.__subclasses__(), Core]


class Gate(Base):  # squeeze and excitation
    scale = torch.tensor([2.0, 3.0, 4.0, 5.0])  # on the class, as Ultralytics has its anchors

    def forward(self, x):
        return x * self.scale * self.layer(x.mean(-1, keepdim=True)).sigmoid()


class Router(Base):
    def forward(self, x):
        return self.layer(x).softmax(-1).topk(2)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ByFunction()

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_is_found_in_any_form(kind):
    assert is_attention(kind())
    assert mixes_positions(kind())


def test_a_multihead_attention_is_one():
    assert operations(nn.MultiheadAttention(4, 2)) == {Operation.ATTENTION}


def test_other_modules_are_none():
    assert not operations(Gate())
    assert operations(Router()) == {Operation.SOFTMAX}
    assert not is_attention(Router())
    assert not operations(nn.TransformerEncoderLayer(4, 2))


def test_a_module_around_attention_is_none_itself():
    assert not is_attention(Around())
    assert mixes_positions(Around())
    assert not mixes_positions(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()))
    assert mixes_positions(nn.ModuleDict({"query": nn.Linear(4, 4)}))  # code around it runs the attention
