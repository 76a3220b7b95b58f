"""Recomputed modules see the weights and buffers of their first run."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call

from actstore import ActivationStore
from actstore.model.tree import ModuleTree
from actstore.model.weights import Weights
from tests.autograd.checks import check_same, train_step
from tests.autograd.models import WIDTH

RECOMPUTE = ["recompute", "recompute(raw)", "recompute(raw @ disk)"]


class Scaled(nn.Module):
    """Saves what depends on its weights and buffers."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return torch.tanh(self.norm(self.inner(x)) * self.scale) * self.scale


KINDS = {
    "leaves": lambda weight: weight,
    "parameters": lambda weight: nn.Parameter(weight.detach()),
    "computed": lambda weight: weight - 0.1 * weight,
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decision", RECOMPUTE)
def test_weights_and_buffers_of_a_functional_call_are_seen_again(decision, kind, training):
    torch.manual_seed(0)
    model, x = nn.Sequential(Scaled(), Scaled()).train(training), torch.randn(5, WIDTH)
    leaves = {name: (1.5 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    own = [*model.parameters(), *model.buffers()]
    values = [tensor.clone() for tensor in own]

    def run(store):
        weights = {name: KINDS[kind](leaf) for name, leaf in leaves.items()}
        buffers = {name: 3 * buffer + 1 for name, buffer in model.named_buffers()}
        inputs = list((weights if kind == "parameters" else leaves).values())
        if store is None:
            loss = functional_call(model, {**weights, **buffers}, (x,)).square().sum()
        else:
            with store:
                loss = functional_call(model, {**weights, **buffers}, (x,)).square().sum()
        return torch.autograd.grad(loss, inputs), buffers

    (found, statistics), (wanted, others) = run(ActivationStore(model, decision, min_bytes=0)), run(None)
    check_same(found, wanted)
    check_same(statistics, others)
    left = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(left, own, strict=True))
    check_same(left, values)


class Replaces(nn.Module):
    """Puts another tensor in the place of its buffer in each run."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.runs: torch.Tensor
        self.register_buffer("runs", torch.ones(()))

    def forward(self, x):
        self.runs = self.runs + 1
        return torch.tanh(self.inner(x) * self.runs)


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_buffer_that_a_module_replaces_is_the_one_of_the_first_run(decision):
    model, x = nn.Sequential(Replaces()), torch.randn(3, WIDTH)
    with ActivationStore(model, decision, min_bytes=0):
        first, second = model(x), model(x)
    leaves = list(model.parameters())
    found = torch.autograd.grad((first + second).sum(), leaves)
    assert model[0].runs == 3
    model[0].runs = torch.ones(())
    check_same(found, torch.autograd.grad((model(x) + model(x)).sum(), leaves))


def test_a_normalisation_that_two_threads_recompute_gets_its_own_buffers_back():
    """One begins first, and the other ends last."""
    first_began, second_began, first_ended = threading.Event(), threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            if torch.is_grad_enabled() and recomputing.is_set():
                if threading.current_thread() is threading.main_thread():
                    first_began.set()
                    assert second_began.wait(120)
                else:
                    second_began.set()
                    assert first_ended.wait(120)
            return torch.tanh(self.norm(x))

    recomputing = threading.Event()
    model, x = nn.Sequential(Waits()), torch.randn(3, WIDTH)
    buffers = list(model.buffers())
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        losses = [model(x).square().sum() for _ in range(2)]
    values = [buffer.clone() for buffer in buffers]
    recomputing.set()

    def other():
        assert first_began.wait(120)
        losses[1].backward()

    thread = threading.Thread(target=other)
    thread.start()
    losses[0].backward()
    first_ended.set()
    thread.join()
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    check_same(list(model.buffers()), values)


class Uncopyable(torch.Tensor):
    """Stands for a buffer that there is memory to copy once."""

    copies = 0

    def clone(self, *args, **kwargs):
        if self.copies:
            raise torch.OutOfMemoryError("no memory")
        type(self).copies += 1
        return super().clone(*args, **kwargs)


def test_without_memory_for_a_copy_nothing_changes():
    own, norms = nn.Linear(2, 2), [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    norms[1].running_var = torch.ones(2).as_subclass(Uncopyable)
    both = nn.ModuleList([own, *norms])
    weights = Weights(ModuleTree(both))
    own.weight = nn.Parameter(torch.zeros(2, 2))
    before = [*own.parameters(), *norms[0].buffers(), *norms[1].buffers()]
    with pytest.raises(torch.OutOfMemoryError), weights.rewound():
        pytest.fail("there is no memory for a copy")
    after = [*own.parameters(), *norms[0].buffers(), *norms[1].buffers()]
    assert all(a is b for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", ["dtensor", "flat"])
@pytest.mark.parametrize("was_sharded", [True, False], ids=["sharded_before", "gathered_before"])
def test_what_was_gathered_or_sharded_meanwhile_is_left_as_it_is(kind, was_sharded):
    """Of a part that FSDP shards by itself inside of a region, which gathers it as it runs."""
    module, sharded = nn.Linear(2, 2), nn.Parameter(torch.ones(2, 2))
    if kind == "dtensor":
        gathered = nn.Parameter(torch.ones(2, 2))
        sharded.device_mesh, sharded.placements = "mesh", ("Shard(0)",)
    else:
        flat = nn.Parameter(torch.ones(4))
        flat._is_flat_param = True
        gathered = flat.view(2, 2)
    before, now = (sharded, gathered) if was_sharded else (gathered, sharded)
    module._parameters["weight"] = before
    weights = Weights(ModuleTree(module))
    module._parameters["weight"] = now
    with weights.rewound():
        assert module._parameters["weight"] is now
    assert module._parameters["weight"] is now


def test_the_limit_of_rows_outlives_two_threads():
    rows = nn.Embedding(4, WIDTH, max_norm=0.5)
    first = Weights(ModuleTree(rows))
    first.ended()
    one, other = first.rewound(), first.rewound()
    one.__enter__()
    with other:
        one.__exit__()
    assert rows.max_norm == 0.5


class OnThread(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.inner(x)))
        thread.start()
        thread.join()
        return found[0]


@pytest.mark.parametrize(
    ("inner", "excepted"),
    [
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), "0.1.inner.parametrizations.weight"),
        (lambda: nn.BatchNorm1d(WIDTH), "0.1.inner"),
        (Scaled, "0.1.inner.norm"),
    ],
)
def test_excepted_parts_that_a_model_runs_on_a_thread_run_again_as_before(inner, excepted):
    """A store's hooks are not on that thread: so the part runs again, from the buffers that it found."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), OnThread(inner()), nn.Softmax(-1)), nn.Tanh())
    plain = copy.deepcopy(model)
    store = ActivationStore(model, f"{excepted} : raw; 0 : recompute", min_bytes=0)
    for step in range(3):
        batch = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)),)
        check_same(train_step(model, batch, store), train_step(plain, batch))
        check_same(dict(model.named_buffers()), dict(plain.named_buffers()))
