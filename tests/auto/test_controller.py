"""Planning while training: exact all the way, within the budget, refused where it cannot be."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Auto, Disk, Plan
from actstore.auto.probes import LOSSY
from actstore.bench import workloads
from actstore.bench.workloads.workload import Workload
from actstore.devices import cpu_memory
from actstore.errors import CapacityError, ConfigError

WORK = Workload(layers=3, width=64, context=64, batch=8, threads=1)
MIB = 2**20
AFTER = 8  # steps with a plan
MOST = 60


pytestmark = pytest.mark.usefixtures("one_thread")


def train(make_store=None, steps=MOST, work=WORK, look=lambda store: None):
    """The weights after `steps`, or as soon as a plan has run for a while; the store, and how many steps it was."""
    torch.manual_seed(0)
    job = workloads.make(work)
    model, batches = job.model, job.batch
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    store = None if make_store is None else make_store(model)
    planned = 0
    for step in range(steps):
        optimizer.zero_grad()
        if store is None:
            loss = model(*batches(step))
        else:
            with store:
                loss = model(*batches(step))
        loss.backward()
        optimizer.step()
        del loss
        look(store)
        planned += store is not None and store._controller is not None and store.plan is not None
        if planned == AFTER:
            break
    return [parameter.detach().clone() for parameter in model.parameters()], store, step + 1


def test_a_plan_begins_with_the_memory_of_measured_steps_returned(monkeypatch):
    returned = []
    monkeypatch.setattr(cpu_memory, "trim", lambda: returned.append(1))
    counts = []

    def look(store):
        if store is not None:
            counts.append((store.plan is not None, len(returned)))

    train(auto(4 * MIB), look=look)
    assert (False, 0) in counts
    assert all(count for planned, count in counts if planned)


SLOWER = ((0.35, 0.0), (0.6, 0.0), (0.6, 0.2), (2.0, 0.2))  # shares of a budget, with and without dropout


def auto(budget, max_noise=0.0, tiers=()):
    return lambda model: ActivationStore(model, Auto(budget, max_noise), min_bytes=0, tiers=tiers)


def saved_bytes(work=WORK):
    _, store, _ = train(lambda model: ActivationStore(model, "keep", min_bytes=0), 1, work)
    return store.report().saved_bytes


@pytest.mark.parametrize(
    ("share", "dropout"),
    [(0.35, 0.2), (2.0, 0.0), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOWER)],
)
def test_every_step_is_exact_and_within_the_budget(share, dropout):
    """The steps that measure, and those that run the plan."""
    work = replace(WORK, dropout=dropout)
    budget = int(share * saved_bytes(work))
    peaks = []
    found, store, steps = train(
        auto(budget), work=work, look=lambda store: peaks.append(store.report().peak_held_bytes)
    )
    wanted, _, _ = train(steps=steps, work=work)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert store.plan is not None
    assert max(peaks) <= budget
    assert store.plan.measured.peak <= budget
    assert store.plan.predicted.peak <= budget
    assert all(row.decision == "keep" for row in store.plan.rows) == (share > 1)
    gc.collect()
    assert store.report().live_bytes == 0


def test_a_budget_that_is_too_small_is_refused_with_the_least_that_is_possible():
    with pytest.raises(CapacityError, match="least") as refused:
        train(auto("300KiB"))
    least = refused.value.facts["least"]
    assert 300 * 1024 < least < saved_bytes()
    peaks = []
    train(auto(int(1.02 * least)), look=lambda store: peaks.append(store.report().peak_held_bytes))
    assert max(peaks[-5:]) <= 1.02 * least


def test_a_disk_is_used_where_it_is_granted(tmp_path):
    budget, peaks = int(0.35 * saved_bytes()), []
    found, store, steps = train(
        auto(budget, tiers=[Disk(tmp_path, "1GiB")]),
        look=lambda store: peaks.append(store.report().peak_held_bytes),
    )
    wanted, _, _ = train(steps=steps)
    assert max(peaks) <= budget
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    decisions = {name for figures in store.plan.profile.figures.values() for name in figures}
    assert "raw @ disk" in decisions
    assert store.plan.profile.links.disk_out < float("inf")


def test_lossy_codecs_need_a_grant():
    _, exact, _ = train(auto(int(0.4 * saved_bytes())))
    _, lossy, _ = train(auto(int(0.7 * saved_bytes()), max_noise=0.05))
    names = [{name for figures in store.plan.profile.figures.values() for name in figures} for store in (exact, lossy)]
    assert not names[0] & {"int8", LOSSY, "derive(int8)"}
    assert {"int8", LOSSY, "derive(int8)"} <= names[1]
    figures = [f for of_kind in lossy.plan.profile.figures.values() for f in of_kind.values() if f.decision == "int8"]
    assert all(0 < f.error**0.5 < 0.02 for f in figures)
    blocks = [unit.noise for unit in lossy.plan.profile.units if unit.name.startswith("blocks")]
    assert len(blocks) == WORK.layers
    assert all(sum(noise.values()) > 0 for noise in blocks)
    assert lossy.plan.predicted.noise <= 0.05
    assert not any(unit.noise for unit in exact.plan.profile.units)


def test_evaluation_and_failures_in_between():
    """Steps without gradients, and steps that fail, are not measured; the model can be copied at any time."""
    wanted, _, _ = train(steps=MOST)
    job = workloads.make(WORK)
    model, batches = job.model, job.batch
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    store = ActivationStore(model, Auto(int(0.6 * saved_bytes())), min_bytes=0)
    for step in range(MOST):
        optimizer.zero_grad()
        with torch.no_grad(), store:
            model(*batches(step))
        handle = model.norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), store:
            model(*batches(step))
        handle.remove()
        with store:
            loss = model(*batches(step))
        loss.backward()
        optimizer.step()
        copy.deepcopy(model)
    assert store.plan is not None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted, strict=True))


def test_a_recurrent_cell_is_recomputed_in_part():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(32, 32)
            self.head = nn.Linear(32, 8)

        def forward(self, x):
            h = c = torch.zeros(x.shape[1], 32)
            for step in x:
                h, c = self.cell(step, (h, c))
            return self.head(h).square().mean()

    def run(make):
        torch.manual_seed(3)
        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        store, peaks = make(model), []
        for _ in range(16):
            optimizer.zero_grad()
            x = torch.randn(60, 16, 32)
            with store:
                loss = model(x)
            loss.backward()
            optimizer.step()
            peaks.append(store.report().peak_held_bytes)
        return list(model.parameters()), store, peaks

    wanted, _, peaks = run(lambda model: ActivationStore(model, "keep", min_bytes=0))
    budget = int(0.7 * max(peaks))
    found, store, peaks = run(lambda model: ActivationStore(model, Auto(budget), min_bytes=0))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    [cell] = [row for row in store.plan.rows if row.unit == "cell"]
    assert "recompute" in cell.decision
    assert max(peaks[-4:]) <= budget


def test_a_plan_is_kept_and_run_again(tmp_path):
    budget = int(0.5 * saved_bytes())
    _, store, steps = train(auto(budget))
    wanted, _, _ = train(steps=steps)
    path = tmp_path / "plan.json"
    store.plan.write(path)
    plan = Plan.read(path)
    assert plan == store.plan
    peaks = []
    found, again, _ = train(
        lambda model: ActivationStore(model, plan, min_bytes=0),
        steps,
        look=lambda store: peaks.append(store.report().peak_held_bytes),
    )
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert max(peaks) <= budget
    assert again.plan == plan
    with pytest.raises(ConfigError, match="model: planned for"):
        ActivationStore(nn.Linear(2, 2), plan)
    with pytest.raises(ConfigError, match="a plan is for a model"):
        ActivationStore(policy=plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "auto"}, "a budget must be given"),
        ({"policy": "auto(1GiB, max_noise=-0.5)"}, r"Auto\(max_noise\)=-0.5"),
        ({"policy": "auto(much)"}, r"Auto\(budget\)='much'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ActivationStore(nn.Linear(2, 2), **arguments)


def test_auto_needs_a_model():
    with pytest.raises(ConfigError, match="needs a model"):
        ActivationStore(policy=Auto("1GiB"))


class Fails(nn.Module):
    """Runs out of memory in chosen calls, as an allocator does; a normalisation and a dropout come before it."""

    def __init__(self, calls, error):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()) for _ in range(3)])
        self.calls, self.error, self.count = calls, error, 0

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.count += 1
        if self.count in self.calls:
            raise self.error("no memory")
        return x.square().mean()


def run_failing(calls, error, make):
    torch.manual_seed(0)
    model = Fails(calls, error)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    store = make(model)

    @store
    def forward(x):
        return model(x)

    for _ in range(20):
        optimizer.zero_grad()
        forward(torch.randn(512, 8)).backward()
        optimizer.step()
    return [*model.parameters(), *model.buffers()], store


def make_auto(model):
    return ActivationStore(model, Auto("1MiB"), min_bytes=0)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("call", [2, 19])
def test_a_call_that_runs_out_of_memory_is_run_once_more(call, error):
    """With the same random numbers, statistics updated once, and less memory from then on."""
    wanted, _ = run_failing((), error, lambda model: ActivationStore(model, "keep"))
    with pytest.warns(RuntimeWarning, match="memory ran out while activations held"):
        found, store = run_failing((call,), error, make_auto)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert store.plan.budget < MIB
    assert any("memory ran out" in line for line in store.plan.history)


def test_a_call_that_runs_out_of_memory_twice_fails():
    with (
        pytest.warns(RuntimeWarning, match="memory ran out"),
        pytest.raises(torch.OutOfMemoryError) as failed,
    ):
        run_failing((3, 4), torch.OutOfMemoryError, make_auto)
    assert "memory ran out while activations held" in str(failed.value.__notes__)


def test_other_errors_are_not_about_memory():
    with pytest.raises(RuntimeError, match="no memory"):
        run_failing((3,), RuntimeError, make_auto)


def test_a_step_that_has_changed_the_model_is_not_run_again():
    torch.manual_seed(0)
    model = Fails((3,), torch.OutOfMemoryError)
    store = make_auto(model)

    @store
    def step(x):
        with torch.no_grad():
            model.blocks[0][0].weight.mul_(0.9)
        return model(x)

    for _ in range(2):
        step(torch.randn(4, 8)).backward()
    x = torch.randn(4, 8)
    with pytest.warns(RuntimeWarning, match="memory ran out"), pytest.raises(torch.OutOfMemoryError) as failed:
        step(x)
    assert "has changed parameters" in str(failed.value.__notes__)


def test_a_failed_step_in_a_context_says_that_the_next_one_needs_less():
    model = Fails((2,), torch.OutOfMemoryError)
    store = make_auto(model)
    x = torch.randn(512, 8)
    with store:
        loss = model(x)
    loss.backward()
    with (
        pytest.warns(RuntimeWarning, match="memory ran out"),
        pytest.raises(torch.OutOfMemoryError) as failed,
        store,
    ):
        model(x)
    assert "the next step runs with less memory" in str(failed.value.__notes__)
