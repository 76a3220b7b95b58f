"""Operators of other libraries in rules, as attention kernels register them: alone, and called by a Function."""

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from actstore import ActivationStore

WIDTH = 16
calls = Counter()


@torch.library.custom_op("actstore_test_kernel::attention_fwd", mutates_args=())
def attention_fwd(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    calls["kernel"] += 1
    scores = q @ k.mT
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attention_bwd(grad, q, k, v, out, log_sum):
    weights = (q @ k.mT - log_sum[..., None]).exp()
    scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    return scores @ k, scores.mT @ q, weights.mT @ grad


attention_fwd.register_autograd(
    lambda ctx, grad, _: attention_bwd(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


class AttentionFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        out, log_sum = torch.ops.actstore_test_kernel.attention_fwd(*args)
        ctx.save_for_backward(*args, out, log_sum)
        return out

    @staticmethod
    def backward(ctx, grad):
        return attention_bwd(grad, *ctx.saved_tensors)


class Block(nn.Module):
    def __init__(self, by_function):
        super().__init__()
        self.qkv, self.out, self.by_function = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), by_function

    def forward(self, x):
        calls["block"] += 1
        qkv = self.qkv(x).chunk(3, -1)
        return x + self.out(AttentionFunc.apply(*qkv) if self.by_function else attention_fwd(*qkv)[0])


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("word", ["@actstore_test_kernel.attention_fwd", "@actstore_test_kernel.*"])
def test_a_kernel_of_a_recomputed_block_runs_once(by_function, word):
    plain = nn.Sequential(*(Block(by_function) for _ in range(3)))
    model, x = copy.deepcopy(plain), torch.randn(2, 8, WIDTH)
    plain(x).sum().backward()
    store = ActivationStore(model, f"*/{word} : keep; @blocks : recompute", min_bytes=0)
    calls.clear()
    with store:
        loss = model(x).sum()
    loss.backward()
    assert calls == {"kernel": 3, "block": 6}
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@torch.library.custom_op("actstore_test_kernel::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    calls["noisy"] += 1
    return x + torch.rand_like(x)  # as a kernel with dropout draws: no tag says so


noisy.register_autograd(lambda ctx, grad: grad)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        return self.after(self.dropout(noisy(self.before(x)))).tanh()


def test_draws_after_a_kernel_that_draws_are_those_of_the_first_run():
    plain = nn.Sequential(Drawing(), Drawing())
    model, x = copy.deepcopy(plain), torch.randn(2, 8, WIDTH)
    torch.manual_seed(0)
    plain(x).sum().backward()
    store = ActivationStore(model, "*/@actstore_test_kernel.noisy : keep; @blocks : recompute", min_bytes=0)
    torch.manual_seed(0)
    calls.clear()
    with store:
        loss = model(x).sum()
    loss.backward()
    assert calls["noisy"] == 2
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_saved_result_of_a_kernel_has_its_name():
    model = nn.Sequential(Block(False), Block(False))
    store = ActivationStore(model, "*/@actstore_test_kernel.attention_fwd : int8; * : keep", min_bytes=0)
    with store:
        model(torch.randn(2, 8, WIDTH)).sum().backward()
    decisions = {site.site: site.decision for site in store.report().sites}
    assert decisions["0.out[0]"] == decisions["0[3]"] == "int8"
    assert not decisions["0.qkv[0]"]  # kept


def test_the_statistics_of_a_kernel_are_never_lossy():
    model = nn.Sequential(Block(False))
    store = ActivationStore(model, "int8", min_bytes=0)
    with store:
        model(torch.randn(2, 8, WIDTH)).sum().backward()
    notes = {site.site: site.note for site in store.report().sites}
    assert notes["0[4]"] == "kept: a statistic: one element for many"
    assert not notes["0[3]"]  # the result beside it


@torch.library.custom_op("actstore_test_kernel::cut", mutates_args=())
def cut(x: Tensor) -> Tensor:
    return x.clamp_min(0.5)


cut.register_autograd(
    lambda ctx, grad: grad * (ctx.saved_tensors[0] > 0.5),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Cut(nn.Module):
    def forward(self, x):
        return cut(x)


def test_a_registered_backward_that_compares_gets_exact_numbers():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Cut(), nn.Linear(WIDTH, WIDTH))
    store = ActivationStore(model, "int8", min_bytes=0)
    with store:
        model(torch.randn(8, WIDTH)).sum().backward()
    notes = {site.note for site in store.report().sites}
    assert "kept: backward of GeneratedBackwardFor_actstore_test_kernel_cut_default needs all of its bits" in notes
