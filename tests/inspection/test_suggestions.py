"""What an inspection suggests: predicted peaks against measured ones, and remedies that are not a store's."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore, inspect_step
from actstore.inspection.saved import InspectedTensor
from actstore.inspection.suggestions import suggest
from actstore.inspection.timeline import MemoryPoint, Timeline
from tests.inspection.test_inspect import inspected

WIDTH, TOKENS, BATCH = 64, 128, 16


class Block(nn.Module):
    def __init__(self, attends):
        super().__init__()
        self.attends, self.norm = attends, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        if self.attends:
            heads = self.norm(x).view(BATCH, TOKENS, 4, WIDTH // 4).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tried(attends=False, **options):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(attends) for _ in range(6))), torch.randn(BATCH, TOKENS, WIDTH)
    return inspect_step(lambda: model(x).square().mean(), ActivationStore(model), try_policies=True, **options)


@pytest.mark.usefixtures("one_thread")
def test_predicted_peaks_are_near_the_measured_ones():
    found = tried()
    policies = {suggestion.policy: suggestion for suggestion in found.suggestions}
    assert set(policies) == {"int8", "* : recompute", "* : recompute(int8)"}
    for suggestion in policies.values():
        assert suggestion.peak_bytes == pytest.approx(suggestion.tried_peak_bytes, rel=0.15)
        assert suggestion.tried_peak_bytes < 0.6 * found.plain.peak.held_bytes
    assert [each.peak_bytes for each in found.suggestions] == sorted(each.peak_bytes for each in found.suggestions)
    assert policies["* : recompute"].added_ms > 0
    text = str(found).split("To lower the plain peak:\n")[1].splitlines()
    assert len(text) == 3
    assert all("(predicted)" in line and "(measured)" in line for line in text)
    assert len(json.loads(found.to_json())["suggestions"]) == 3
    assert "To lower the plain peak:" in found.to_html()


def test_attention_is_kept_where_there_is_one():
    policies = {suggestion.policy: suggestion for suggestion in tried(attends=True).suggestions}
    kept = policies["*/@sdpa : keep; * : recompute"]
    assert kept.peak_bytes == pytest.approx(kept.tried_peak_bytes, rel=0.25)


def test_nothing_is_suggested_where_nothing_helps():
    found = inspected(layers=1)
    assert found.suggestions == ()
    assert "To lower" not in str(found)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Takes(False) for _ in range(4))

    def forward(self, x):
        cache = pytest.importorskip("transformers").DynamicCache()
        cache.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
        for layer in self.layers:
            x = layer(x, cache)
        return x


class Takes(Block):
    def forward(self, x, cache):
        return super().forward(x)


def test_a_policy_that_cannot_run_says_why():
    model, x = Cached(), torch.randn(BATCH, TOKENS, WIDTH)
    found = inspect_step(lambda: model(x).sum(), ActivationStore(model), try_policies=True)
    errors = {each.policy: each.error for each in found.suggestions}
    assert not errors.pop("int8")
    assert len(errors) == 2
    assert all("that has values already" in error for error in errors.values())
    assert str(found).count("it cannot run: layers.0") == 2
    assert model.layers[0].down.weight.grad is None


def tensor_of(nbytes, operator="linear", module="head", at=0.0):
    return InspectedTensor(module, operator, "", (nbytes // 4,), "float32", "dense", nbytes, "", 0, "", at, None)


def plain_of(tensors):
    return Timeline("plain", (MemoryPoint(9.0, False, {"head": sum(t.saved_bytes for t in tensors)}, None),))


def test_what_is_not_a_stores_comes_first():
    tensors = [*(tensor_of(2**20, at=at) for at in range(4)), tensor_of(3 * 2**20, "cross_entropy_loss", "")]
    loss, optimizer, *rest = suggest(tensors, plain_of(tensors), 8 * 2**20, torch.device("cpu"))
    assert loss.text.startswith("the loss saves 3.0 MiB (43 %) of logits")
    assert loss.peak_bytes == 4 * 2**20
    assert optimizer.text.startswith("the optimizer holds 8.0 MiB, more than all activations")
    assert not loss.policy + optimizer.policy
    assert [each.policy for each in rest] == ["int8"]
    smaller = [*tensors, *(tensor_of(2**20, at=at) for at in range(4, 12))]
    assert [each.policy for each in suggest(smaller, plain_of(smaller), 2**20, torch.device("cpu"))] == ["int8"]


def test_what_is_beside_activations():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(4, 8)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    beside = inspect_step(step, ActivationStore(model)).beside
    weights = 4 * (8 * 8 + 3 * 8)
    assert beside.weights_bytes == weights + 4 * 2 * 8 + 8  # means, variances, and the number of batches
    assert beside.gradients_bytes == weights
    assert beside.optimizer_bytes == 2 * weights + 4 * 4  # a step count for each of four weights
    assert str(beside) == "beside activations: weights 424 B, gradients 352 B, optimizer 720 B"


def test_the_peak_of_attention_with_dropout_is_at_most_what_is_predicted():
    """Its softmax stays exact; its masks are bits."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 8, 256, 0.1, "gelu", batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(8, 128, 128)
    found = inspect_step(lambda: model(x).square().mean(), ActivationStore(model, "keep"), try_policies=True)
    (int8,) = (each for each in found.suggestions if each.policy == "int8")
    assert int8.tried_peak_bytes <= int8.peak_bytes
