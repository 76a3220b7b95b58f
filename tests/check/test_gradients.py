"""check_gradients finds what is wrong, and where, and nothing where nothing is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import actstore
from actstore import ActivationStore, Encode, Keep, Rules, check_gradients
from actstore.errors import ConfigError, StateError
from tests.autograd.models import CASES, build
from tests.check.planted import Flip, Odd, OffByOne


def loss_step(name="mlp"):
    model, batch = build(name)

    def step():
        out = model(*batch)
        return out.square().mean()

    return model, step


def in_a_row(*layers):
    torch.manual_seed(0)
    model, x = nn.Sequential(*layers), torch.randn(5, 4)

    def step():
        loss = model(x).square().sum()
        loss.backward()
        return loss

    return model, step


def test_a_lazy_model_is_refused_until_its_first_forward():
    model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), torch.randn(3, 2)
    store = ActivationStore(model, "raw", min_bytes=0)
    with pytest.raises(ConfigError, match=r"'0\.weight' is not initialized.*one forward first"):
        check_gradients(lambda: model(x).square().sum(), store)
    model(x)
    assert check_gradients(lambda: model(x).square().sum(), store).equal


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", ["raw @ host", "recompute"])
def test_a_lossless_store_is_equal(name, policy):
    model, step = loss_step(name)
    where = f"{CASES[name].recompute} : {policy}" if policy == "recompute" else policy
    result = check_gradients(step, ActivationStore(model, where, min_bytes=0))
    assert result.equal, str(result)
    assert result.passed
    assert not result.idle
    assert result.first is None
    assert result.runs == 2
    assert result.loss is not None
    assert result.loss[0] == result.loss[1]
    wanted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [row.name for row in result.parameters] == wanted
    assert [row.name for row in result.buffers] == [name for name, _ in model.named_buffers()]
    assert len(result.outputs) == 1
    assert str(result).startswith("Equal")


def test_a_flipped_bit_is_found_where_it_was_stored():
    model, step = loss_step()
    policy = Rules([("blocks.1.0", Encode(Flip()))], default=Keep())
    result = check_gradients(step, ActivationStore(model, policy, min_bytes=0))
    assert result.verdict == "different"
    first = result.first
    assert (first.kind, first.module, first.operation) == ("gradient", "blocks.1.0", "AddmmBackward0")
    assert not first.incoming
    assert first.shape == (16, 32)
    assert 0 < first.relative_error < 1e-6
    assert 0 < first.max_abs_error < 1e-6
    assert [row.name for row in result.parameters if not row.equal] == ["blocks.1.0.weight"]
    assert "'blocks.1.0'" in str(result)
    assert "gradient of blocks.1.0.weight" in str(result)


def test_a_backward_that_is_off_by_one_float_is_found():
    model, step = in_a_row(nn.Linear(4, 4), Odd(), nn.Linear(4, 4))
    first = check_gradients(step, ActivationStore(model, "raw")).first
    assert (first.kind, first.module, first.operation) == ("gradient", "1", "OffByOneBackward")


def test_a_backward_outside_of_the_context_is_not_off():
    model, _ = in_a_row(nn.Linear(4, 4), Odd(), nn.Linear(4, 4))
    x = torch.randn(5, 4)
    assert check_gradients(lambda: model(x).sum(), ActivationStore(model, "raw")).equal


def test_a_forward_that_differs_is_found_by_its_first_output():
    model, step = in_a_row(nn.Linear(4, 4), Odd(forward=True), nn.Tanh())
    result = check_gradients(step, ActivationStore(model, "raw"))
    first = result.first
    assert (first.kind, first.module, first.call, first.index) == ("forward output", "1", 0, 0)
    assert first.relative_error == pytest.approx(0.5)
    assert result.loss[0] != result.loss[1]
    assert str(first).startswith("output 0 of '1', float32 [5, 4]: relative error 5.00e-01")


def test_the_call_of_a_module_that_is_called_often_is_named():
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.linear = Odd(forward=True), nn.Linear(4, 4)

        def forward(self, x):
            self.odd.in_forward = False
            x = self.odd(self.odd(self.linear(x)))
            self.odd.in_forward = True
            return self.odd(x)

    model, x = Thrice(), torch.randn(2, 4)
    first = check_gradients(lambda: model(x).sum(), ActivationStore(model, "raw")).first
    assert (first.module, first.call) == ("odd", 2)
    assert "'odd', call 3" in str(first)


def test_what_is_wrong_outside_of_the_modules_is_said_to_be_there():
    model, _ = in_a_row(nn.Linear(4, 4))
    odd, x = Odd(), torch.randn(5, 4)
    first = check_gradients(lambda: odd(model(x)).sum().backward(), ActivationStore(model, "raw")).first
    assert (first.module, first.incoming) == ("0", True)
    assert "from outside of the modules" in str(first)


def test_without_a_model_inputs_are_compared():
    x = torch.randn(5, requires_grad=True)
    odd = Odd()

    def step():
        odd(x.exp()).sum().backward()

    result = check_gradients(step, ActivationStore(policy="raw"), inputs={"x": x})
    assert (result.first.site, result.first.module) == ("gradient x", None)
    assert result.loss is None
    assert check_gradients(lambda: x.exp().sum(), ActivationStore(policy="raw", min_bytes=0), inputs=[x]).equal
    assert x.grad is None


@pytest.mark.parametrize(
    ("tolerance", "verdict"), [(0.0, "different"), (1e-6, "different"), (0.05, "within tolerance")]
)
def test_a_lossy_store_is_judged_by_the_tolerance(tolerance, verdict):
    model, step = loss_step("transformer")
    result = check_gradients(step, ActivationStore(model, "int8", min_bytes=0), tolerance=tolerance)
    assert result.verdict == verdict
    assert result.passed == (verdict == "within tolerance")
    assert not result.equal
    assert result.first.kind == "gradient"
    assert 0 < max(row.relative_error for row in result.parameters) < 0.05


def test_a_gradient_that_cancels_is_judged_by_the_size_of_all():
    """The bias in front of a normalization has a gradient of rounding errors, none of which a lossy store keeps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))
    x, y = torch.randn(256, 8), torch.randint(3, (256,))

    def step():
        return F.cross_entropy(model(x), y)

    result = check_gradients(step, ActivationStore(model, "int8", min_bytes=0), tolerance=0.05)
    bias = next(row for row in result.parameters if row.name == "0.bias")
    assert bias.relative_error > 1
    assert result.verdict == "within tolerance", str(result)
    assert "1 above 0.05: zero but for rounding" in str(result)


def test_a_tolerance_does_not_excuse_a_wrong_gradient():
    model, step = in_a_row(nn.Linear(4, 4), Odd(forward=True), nn.Linear(4, 4))
    result = check_gradients(step, ActivationStore(model, "int8", min_bytes=0), tolerance=0.05)
    assert result.verdict == "different"


def test_a_step_that_is_never_the_same_has_no_verdict():
    model, _ = loss_step()
    generator = torch.Generator()
    result = check_gradients(
        lambda: model(torch.randn(2, 16, generator=generator)).sum(), ActivationStore(model, "raw")
    )
    assert result.verdict == "no verdict"
    assert not result.passed
    assert not result.equal
    assert (result.first.kind, result.first.module) == ("forward output", "blocks.0.0")
    assert str(result).startswith("No verdict: the plain step differs from itself")
    assert "stateful=" in str(result)


def test_a_step_that_is_the_same_only_for_a_while_has_no_verdict():
    model, batch = build("mlp")
    count = 0

    def step():
        nonlocal count
        count += 1
        return model(*batch).sum() * (1 + (count > 3))

    assert check_gradients(step, ActivationStore(model, "raw")).verdict == "no verdict"


def test_a_fault_that_comes_and_goes_is_told_without_its_size():
    model, batch = build("mlp")
    stored = 0

    def step(store):
        nonlocal stored
        stored += isinstance(store, ActivationStore)
        with store:
            loss = model(*batch).sum()
        return loss * 2 if stored == 2 and isinstance(store, ActivationStore) else loss

    result = check_gradients(step, ActivationStore(model, "raw"))
    assert (result.verdict, result.runs) == ("different", 2)
    assert result.first.incoming
    assert result.first.relative_error is None
    assert check_gradients(step, ActivationStore(model, "raw")).equal


def test_an_equal_run_does_not_hide_one_that_was_within_the_tolerance():
    model, batch = build("mlp")
    stored = 0

    def step(store):
        nonlocal stored
        stored += isinstance(store, ActivationStore)
        loss = model(*batch).sum()
        return loss * 1.001 if stored == 1 and isinstance(store, ActivationStore) else loss

    result = check_gradients(step, ActivationStore(model, "raw"), tolerance=0.01)
    assert (result.verdict, result.runs) == ("within tolerance", 2)


def test_a_step_may_take_the_store():
    model, batch = build("mlp")
    given = []

    def step(store):
        given.append(store)
        with store:
            loss = model(*batch).sum()
        loss.backward()

    store = ActivationStore(model, "raw", min_bytes=0)
    assert check_gradients(step, store).equal
    assert [x is store for x in given] == [False, False, False, True, True]


def test_gradients_are_seen_though_the_step_drops_them():
    model, batch = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(*batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    policy = Rules([("head", Encode(Flip()))], default=Keep())
    result = check_gradients(step, ActivationStore(model, policy, min_bytes=0))
    assert [row.name for row in result.parameters if not row.equal] == ["head.weight"]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    assert len(check_gradients(step, ActivationStore(model)).parameters) == len(list(model.parameters()))


def test_gradients_that_the_step_computes_itself_are_compared():
    model, batch = build("mlp")
    parameters = list(model.parameters())

    def step():
        grads = torch.autograd.grad(model(*batch).square().mean(), parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad

    policy = Rules([("head", Encode(Flip()))], default=Keep())
    result = check_gradients(step, ActivationStore(model, policy, min_bytes=0))
    assert [row.name for row in result.parameters if not row.equal] == ["head.weight"]


def test_nan_is_equal_to_nan():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.full((3, 4), torch.nan)
    result = check_gradients(lambda: model(x).sum(), ActivationStore(model, "raw", min_bytes=0))
    assert result.equal


@pytest.mark.gpu
def test_on_a_gpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.GELU(), Odd(forward=True), nn.Linear(64, 8)).cuda()
    model[3].in_forward = False
    x, state = torch.randn(16, 64, device="cuda"), torch.cuda.get_rng_state()
    store = ActivationStore(model, "raw @ host", min_bytes=0)
    assert check_gradients(lambda: model(x).square().mean(), store).equal
    assert torch.equal(torch.cuda.get_rng_state(), state)
    model[3].in_forward = True
    first = check_gradients(lambda: model(x).square().mean(), store).first
    assert (first.kind, first.module) == ("forward output", "3")
    assert first.relative_error == pytest.approx(0.5)


def test_calls_that_recompute_are_not_counted():
    model, (x,) = build("mlp")

    def step():
        for part in (x, x * 2):
            model(part).square().mean().backward()

    assert check_gradients(step, ActivationStore(model, "blocks.* : recompute")).equal


def test_what_a_module_computes_itself_is_not_put_down_to_what_it_calls():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(OffByOne.apply(self.first(x)))

    model, x = Parent(), torch.randn(2, 4)
    first = check_gradients(lambda: model(x).sum().backward(), ActivationStore(model, "raw")).first
    assert (first.module, first.operation) == ("", "OffByOneBackward")
    assert "the model itself" in str(first)


def test_the_first_of_two_backwards_is_not_hidden_by_the_second():
    model, _ = in_a_row(nn.Linear(4, 4), Odd())
    x = torch.randn(2, 4)

    def step(store):
        with store:
            loss = model(x).sum()
            loss.backward(retain_graph=True)
        loss.backward()

    first = check_gradients(step, ActivationStore(model, "raw")).first
    assert (first.module, first.operation) == ("1", "OffByOneBackward")


def test_an_idle_store_is_told():
    model, step = loss_step()
    result = check_gradients(step, ActivationStore(model, "raw"))
    assert result.idle
    assert "min_bytes=0" in str(result)
    assert "min_bytes=0" not in str(check_gradients(step, ActivationStore(model, "raw", min_bytes=0)))


def test_a_sparse_gradient_is_compared():
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4))
    x = torch.tensor([1, 3, 3])
    assert check_gradients(lambda: model(x).sum(), ActivationStore(model, "raw", min_bytes=0)).equal


def test_two_backwards_of_a_graph_are_told_apart():
    model, batch = build("mlp")

    def step():
        loss = model(*batch).square().mean()
        loss.backward(retain_graph=True)
        (loss * 3).backward()

    result = check_gradients(step, ActivationStore(model, "raw", min_bytes=0))
    assert result.equal


def test_a_table_of_many_rows_ends():
    model, step = in_a_row(*(nn.Linear(4, 4) for _ in range(30)))
    text = str(check_gradients(step, ActivationStore(model, "int4", min_bytes=0)))
    assert "more with smaller errors" in text
    assert len(text.splitlines()) < 40


def test_what_cannot_be_checked_is_refused_in_words():
    model, step = loss_step()
    store = ActivationStore(model, "raw")
    for wrong, words in (
        ({"step": 3}, "must be a function"),
        ({"step": lambda a, b: a}, "takes a, b"),
        ({"step": lambda: None}, "computed no gradient"),
        ({"step": lambda: model(torch.randn(2, 16))}, "a single number"),
        ({"store": "raw"}, "must be an ActivationStore"),
        ({"tolerance": -1}, "tolerance=-1"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"steps": 0}, "steps=0"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_gradients(**{"step": step, "store": store} | wrong)
    with store, pytest.raises(StateError, match="Call it outside"):
        check_gradients(step, store)

    def enters():
        with store:
            return step()

    with pytest.raises(StateError, match="Make the step take the store"):
        check_gradients(enters, store)
    assert actstore.check_gradients(step, store).equal
    with pytest.raises(ConfigError, match="computed no gradient"):  # of this store's model
        check_gradients(step, ActivationStore(loss_step()[0], "raw"))
