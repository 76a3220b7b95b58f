"""measure_gradient_error tells bias from variance, and leaves all as it was."""

import json

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Encode, Keep, Rules
from actstore.check import measure_gradient_error
from actstore.errors import ConfigError, StateError
from tests.accuracy.jitter import Jitter

ROWS, WIDTH = 256, 32


@pytest.fixture
def training():
    """A model of two layers with ReLU, a step of it, and steps on other batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    batches = torch.randn(4, ROWS, WIDTH)

    def step_on(x):
        return lambda: model(x).square().mean()

    return model, step_on(batches[0]), [step_on(x) for x in batches[1:]]


def planted(noise, gain=1.0):
    return Rules([("2", Encode(Jitter(noise, gain), protected=False))], default=Keep())


def test_the_variance_in_closed_form(training):
    """Noise in the second layer's input moves its weight alone, by sum_n |c_n|^2 |e_n|^2."""
    model, step, _ = training
    model[1] = nn.SiLU()  # ReLU would keep its result, which then has no payload
    store = ActivationStore(model, planted(0.1), min_bytes=0)
    result = measure_gradient_error(step, store, draws=24)
    hidden = {}
    hook = model[2].register_forward_hook(lambda _, inputs, out: hidden.update(x=inputs[0], out=out))
    (grad,) = torch.autograd.grad(step(), hidden["out"])
    hook.remove()
    expected = 0.01 * grad.square().sum() * WIDTH * hidden["x"].square().mean()
    rows = {row.name: row for row in result.weights}
    assert rows["2.weight"].variance == pytest.approx(expected.item(), rel=0.15)  # 24 draws of 256 directions: 2 %
    assert all(row.square == 0 for name, row in rows.items() if name != "2.weight")
    assert result.deviation == pytest.approx(expected.sqrt().item() / result.norm, rel=0.1)
    assert result.bias < result.least_bias


@pytest.mark.parametrize("policy", ["int4(round=stochastic)", "int4(round=dither)", "int8(round=stochastic) @ host"])
def test_rounding_at_random_has_no_bias_where_it_is_read_linearly(policy):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)), torch.randn(ROWS, WIDTH)
    store = ActivationStore(model, policy, min_bytes=0)
    result = measure_gradient_error(lambda: model(x).square().mean(), store, draws=16)
    assert result.deviation > 0
    assert result.bias < result.least_bias


def test_rounding_at_random_has_a_bias_behind_relu(training):
    """ReLU's backward asks which of its outputs are above 0, and what was 0 and is rounded up then is."""
    model, step, _ = training
    result = measure_gradient_error(step, ActivationStore(model, "int4(round=dither)", min_bytes=0), draws=8)
    assert result.bias > 5 * result.least_bias


def test_rounding_to_nearest_has_nothing_but_a_bias(training):
    model, step, _ = training
    result = measure_gradient_error(step, ActivationStore(model, "int4", min_bytes=0), draws=2)
    assert result.deviation == result.least_bias == 0
    assert result.bias > 1e-3


@pytest.mark.filterwarnings("ignore:step 1.*its gain is farther from 1:RuntimeWarning")
def test_a_codec_that_shrinks_is_seen_as_a_bias(training):
    """dW = c^T x, and so 5 % less of x are 5 % less of dW."""
    model, step, _ = training
    model[1] = nn.SiLU()  # as above
    result = measure_gradient_error(step, ActivationStore(model, planted(0.05, gain=0.95), min_bytes=0), draws=12)
    rows = {row.name: row for row in result.weights}
    assert rows["2.weight"].relative_bias == pytest.approx(0.05, rel=0.1)
    assert result.bias > 2 * result.least_bias


def test_an_exact_store_has_no_error(training):
    model, step, _ = training
    result = measure_gradient_error(step, ActivationStore(model, "raw @ host", min_bytes=0), draws=2, each_site=True)
    assert result.bias == result.deviation == 0
    assert result.sites == ()
    assert all(row.square == 0 for row in result.weights)


def test_the_noise_is_that_of_the_batches(training):
    model, step, others = training
    result = measure_gradient_error(step, ActivationStore(model, "int8", min_bytes=0), draws=2, others=others)
    found = []
    for each in (step, *others):
        gradients = torch.autograd.grad(each(), list(model.parameters()))
        found.append(torch.cat([g.flatten() for g in gradients]))
    expected = torch.stack(found).double().var(0).sum().sqrt() / found[0].double().norm()
    assert result.noise == pytest.approx(expected.item(), rel=1e-6)


def test_each_site_alone_adds_up_to_all(training):
    model, step, _ = training
    store = ActivationStore(model, "int4(round=stochastic)", min_bytes=0)
    result = measure_gradient_error(step, store, draws=12, each_site=True)
    assert [site.site for site in result.sites] == ["1[0]"]  # which the last layer reads, too
    assert result.sites[0].measured == pytest.approx(result.error, rel=0.2)
    store = ActivationStore(model, Rules([], default=Encode(Jitter(0.1), protected=False)), min_bytes=0)
    result = measure_gradient_error(step, store, draws=12, each_site=True)
    assert len(result.sites) > 1
    assert sum(site.measured**2 for site in result.sites) == pytest.approx(result.error**2, rel=0.2)


def test_all_is_left_as_it_was(training):
    model, step, others = training
    step().backward()
    grads = [p.grad for p in model.parameters()]
    values = [p.clone() for p in (*model.parameters(), *grads)]
    random = torch.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trains():
        loss = step()
        loss.backward()
        optimizer.step()
        return loss

    result = measure_gradient_error(trains, ActivationStore(model, "int4", min_bytes=0), draws=2, others=others[:1])
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*model.parameters(), *grads), values, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    fresh = torch.autograd.grad(step(), list(model.parameters()))
    assert result.norm == pytest.approx(sum(g.double().square().sum().item() for g in fresh) ** 0.5, rel=1e-6)


def test_text_and_json(training):
    model, step, others = training
    store = ActivationStore(model, "int4(round=stochastic)", min_bytes=0)
    result = measure_gradient_error(step, store, draws=3, others=others, each_site=True)
    text = str(result)
    for part in ("by 3 draws", "deviation", "bias", "noise", "predicted", "each site alone", "2.weight", "1[0]"):
        assert part in text, part
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values["deviation"] == result.deviation
    assert [row["name"] for row in values["weights"]] == [name for name, _ in model.named_parameters()]
    assert [site["site"] for site in values["sites"]] == ["1[0]"]


def test_what_does_not_fit_is_refused(training):
    model, step, _ = training
    store = ActivationStore(model, "int8", min_bytes=0)
    with pytest.raises(ConfigError, match="draws=1: must be 2 or more"):
        measure_gradient_error(step, store, draws=1)
    with pytest.raises(ConfigError, match="must be an ActivationStore"):
        measure_gradient_error(step, model)
    with store, pytest.raises(StateError, match="inside a store's context"):
        measure_gradient_error(step, store)
    with pytest.raises(ConfigError, match="all gradients of the plain step are 0"):
        measure_gradient_error(lambda: 0 * step(), store)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(StateError, match=r"two plain runs of the step .* differ by"):
        measure_gradient_error(lambda: model(torch.randn(4, WIDTH, generator=generator)).sum(), store)
    with pytest.raises(StateError, match=r"gradient of 0.weight is not finite"):
        measure_gradient_error(lambda: step() * float("inf"), store)


def test_a_store_that_never_samples_by_itself_predicts_all_the_same(training):
    model, step, _ = training
    store = ActivationStore(model, "int8", min_bytes=0)
    assert store.report().gradients is None
    result = measure_gradient_error(step, store, draws=2)
    assert result.predicted is not None
