"""What a recomputed module draws, changes and refuses."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from actstore import ActivationStore
from actstore.errors import MutationError, StateError
from actstore.model import generators
from tests.autograd.checks import check_drained, check_same, gc_off, train_step
from tests.autograd.models import WIDTH
from tests.recompute.regions import Runs

RECOMPUTE = ["recompute", "recompute(raw)", "recompute(raw @ disk)"]


def make(model, decision, **options):
    return ActivationStore(model, f"* : {decision}", min_bytes=0, **options)


class Draws(nn.Module):
    """Multiplies by a random number from one of many generators."""

    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = nn.Linear(WIDTH, WIDTH), draw
        self.torch_own = torch.Generator().manual_seed(3)
        self.python_own = random.Random(3)
        self.numpy_own = np.random.default_rng(3)
        self.numpy_legacy = np.random.RandomState(3)

    def forward(self, x):
        return torch.tanh(self.inner(x) * (0.5 + self.draw(self)))


DRAWS = {
    "torch": lambda _: torch.rand(()),
    "python": lambda _: random.random(),
    "python_normal": lambda _: random.gauss(),  # every second one changes no word of the state
    "numpy": lambda _: float(np.random.rand()),  # noqa: NPY002
    "numpy_normal": lambda _: float(np.random.randn()),  # noqa: NPY002  # every second one changes no key
    "torch_own": lambda module: torch.rand((), generator=module.torch_own),
    "python_own": lambda module: module.python_own.random(),
    "numpy_own": lambda module: float(module.numpy_own.random()),
    "numpy_legacy": lambda module: float(module.numpy_legacy.rand()),
}


def drawn(name, store_of):
    """Gradients of two blocks, and what each generator gives next."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(Draws(DRAWS[name]), Draws(DRAWS[name])), (torch.randn(3, WIDTH),)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    step = train_step(model, batch, store_of(model))
    return step, [float(draw(model[1])) for draw in DRAWS.values()]


@pytest.mark.parametrize("decision", RECOMPUTE)
@pytest.mark.parametrize("name", DRAWS)
def test_what_was_drawn_is_drawn_again(name, decision):
    (found, after), (wanted, then) = drawn(name, lambda model: make(model, decision)), drawn(name, lambda _: None)
    check_same(found, wanted)
    assert after == then


def test_a_normal_number_that_numpy_has_in_hand_is_drawn_again():
    """Normal numbers come in pairs: the second one is in the state, and the rest of it is the same with and without."""
    np.random.seed(0)  # noqa: NPY002
    np.random.randn()  # noqa: NPY002
    state = np.random.get_state()  # noqa: NPY002
    model, batch = nn.Sequential(Draws(DRAWS["numpy_normal"])), (torch.randn(3, WIDTH),)
    store = make(model, "recompute")
    for _ in range(3):
        np.random.set_state(state)  # noqa: NPY002
        found = train_step(model, batch, store)
        np.random.set_state(state)  # noqa: NPY002
        wanted = train_step(model, batch)
        check_same(found, wanted)


def test_a_generator_without_a_state_is_left_out():
    model, batch = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), (torch.randn(3, WIDTH),)
    model[0].system = random.SystemRandom()
    check_same(train_step(model, batch, make(model, "recompute")), train_step(model, batch))


def test_generators_that_forward_does_not_use_run_on():
    model, x = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), torch.randn(3, WIDTH)
    with make(model, "recompute"):
        y = model(x)
    random.seed(5)
    first = random.random()
    y.sum().backward()
    second = random.random()
    random.seed(5)
    assert [random.random(), random.random()] == [first, second]


DRAWN_IN_PYTHON = {
    "nothing": lambda: None,
    "random": random.random,
    "gauss": random.gauss,
    "bits": lambda: random.getrandbits(3),
    "shuffle": lambda: random.shuffle([*range(700)]),
    "seed": lambda: random.seed(4),
    "the same state": lambda: random.setstate(random.getstate()),
    "an earlier state": lambda: random.setstate(EARLIER),
}
EARLIER = random.Random(4).getstate()


@pytest.mark.parametrize("visible", [True, False])
@given(st.lists(st.sampled_from([*DRAWN_IN_PYTHON]), max_size=12))
def test_a_look_at_python_s_generator_sees_each_change(visible, names):
    before = random.getstate()
    try:
        source = generators._PythonGlobal()
        assert source._words is not None  # CPython has the words where they are looked for
        source._words = source._words if visible else None
        source.read()
        for name in names:
            DRAWN_IN_PYTHON[name]()
            assert source.look() == random.getstate()
        assert source.look() is source.look()
        source.set(before)
        assert source.look() == before
    finally:
        random.setstate(before)


def test_words_that_are_elsewhere_are_not_read(monkeypatch):
    monkeypatch.setattr(generators, "_memory", lambda _: bytes(2500))
    assert generators._PythonGlobal()._words is None
    monkeypatch.undo()
    monkeypatch.setattr(generators, "_MT19937_NBYTES", 10**6)  # beyond the end of the object
    assert generators._PythonGlobal()._words is None


def test_a_look_at_the_other_generators_sees_each_change():
    for source, draw in ((generators._TorchGlobal(), torch.rand), (generators._NumpyGlobal(), np.random.rand)):
        for _ in range(2):
            assert source.look() is source.look() == source.read()
            before = source.look()
            draw(1)
            assert source.look() != before


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_spectral_norm_goes_on_from_the_same_estimate(decision):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

    model, plain, batch = build(), build(), (torch.randn(3, WIDTH),)
    store = ActivationStore(model, f"1 : {decision}", min_bytes=0)
    for _ in range(2):
        check_same(train_step(model, batch, store), train_step(plain, batch))
        check_same(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("decision", ["recompute", "recompute(segment=2)", "recompute(schedule=sqrt)"])
def test_spectral_norm_starts_from_the_same_estimate_each_time(decision):
    """A chain runs a call more than once for one backward; two backwards of one graph do so, too."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3)))

    def grads(model, store=None):
        with store or nullcontext():
            y = model(batch)
        found = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in (y.sum(), y.norm())]
        return [grad for some in found for grad in some]

    model, plain, batch = build(), build(), torch.randn(3, WIDTH)
    store = ActivationStore(model, f"[0-2] : {decision}", min_bytes=0)
    for _ in range(2):
        check_same(grads(model, store), grads(plain))
        check_same(dict(model.named_buffers()), dict(plain.named_buffers()))


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return torch.tanh(self.norm(self.inner(x)))


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_gradient_scaler_skips_and_scales_the_same_steps(decision):
    def run(store_of):
        torch.manual_seed(0)
        model = nn.Sequential(Norms(), Norms())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=2)
        store, scales = store_of(model), []
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                if store is None:
                    loss = model(torch.randn(8, WIDTH)).square().mean()
                else:
                    with store:
                        loss = model(torch.randn(8, WIDTH)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [*model.parameters(), *model.buffers()], scales

    (found, scales), (wanted, others) = run(lambda model: make(model, decision)), run(lambda _: None)
    check_same(found, wanted)
    assert scales == others
    assert len(set(scales)) > 2


# -- refused ----------------------------------------------------------------------------------------------------------


class Writes(nn.Module):
    """Writes to its input."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.inner(x.add_(1)))


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_module_that_writes_to_its_input_is_refused_with_its_name(decision):
    model, x = nn.Sequential(nn.Identity(), Writes()), torch.randn(3, WIDTH)
    with ActivationStore(model, f"1 : {decision}", min_bytes=0):
        y = model(x.clone())
    with pytest.raises(MutationError, match=r"modified by an inplace operation.*float32 3x16.*saved at 1\[0\]"):
        y.sum().backward()
    if decision != "recompute":  # a copy was stored
        with ActivationStore(model, f"1 : {decision}", min_bytes=0, allow_mutation=True):
            y = model(x.clone())
        leaves = list(model.parameters())
        wanted = torch.autograd.grad(model(x.clone()).sum(), leaves)
        check_same(torch.autograd.grad(y.sum(), leaves), wanted)


class Changes(nn.Module):
    """Computes something else in its second run."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.how, self.runs = nn.Parameter(torch.randn(WIDTH, WIDTH)), how, Runs()

    def forward(self, x):
        self.runs.append(1)
        if len(self.runs) == 2:
            x = {"shape": lambda: x[:2], "dtype": x.double, "count": lambda: x, "fails": lambda: 1 / 0}[self.how]()
            if self.how == "count":
                return x @ self.weight
        return torch.tanh(x @ self.weight.to(x.dtype))


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("shape", StateError, "tensor 0 that it saves is float32 2x16, and was float32 3x16"),
        ("dtype", StateError, "tensor 0 that it saves is float64 3x16, and was float32 3x16"),
        ("count", StateError, "it saves 1 tensors, and saved 2"),
        ("fails", ZeroDivisionError, "division"),
    ],
)
def test_a_recomputation_that_goes_another_way_is_an_error_with_the_module_named(how, error, words):
    model = nn.Sequential(nn.Sequential(Changes(how)))
    store = ActivationStore(model, "0.0 : recompute(raw)", min_bytes=0)
    with gc_off():
        with store:
            y = model(torch.randn(3, WIDTH))
        with pytest.raises(error, match=words) as info:
            y.sum().backward()
        if error is StateError:
            assert info.value.module == "0.0"
            assert len(str(info.value).split("\n")) == 3
        else:
            assert info.value.__notes__ == ["while recomputing 0.0 (recompute(raw))"]
    del y, info
    model[0][0].runs.append(1)  # and the next step is a good one
    batch = (torch.randn(3, WIDTH),)
    check_same(train_step(model, batch, store), train_step(model, batch))


def test_an_inference_tensor_is_refused_as_ever():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with torch.inference_mode():
        x = torch.randn(3, WIDTH)
    for decision in ("recompute", "recompute(raw)"):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"), make(model, decision):
            model(x)
        with torch.inference_mode(), make(model, decision) as store:
            assert model(x).is_inference()
            with torch.enable_grad():  # which records nothing in inference mode
                assert model(x).is_inference()
        assert store.report().saved_bytes == 0


# -- unusual inputs ---------------------------------------------------------------------------------------------------


class Constant(nn.Module):
    """Uses no input at all."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, anything, *, more=None):
        return torch.tanh(self.weight.exp())


@pytest.mark.parametrize("decision", RECOMPUTE)
@pytest.mark.parametrize("given", [torch.ones(2), 3, "text", None, [1, {"a": None}]], ids=str)
def test_inputs_that_nothing_depends_on(given, decision):
    model = nn.Sequential(Constant())
    store = make(model, decision)
    with store:
        y = model[0](given, more={"x": given})
    check_same(torch.autograd.grad(y.sum(), model[0].weight), torch.autograd.grad(model(given).sum(), model[0].weight))
    assert store.report().stored_bytes == (2 * 4 if torch.is_tensor(given) and decision != "recompute" else 0)
    del y
    check_drained(store)
