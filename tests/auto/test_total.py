"""A total: all that the allocator holds at the peak of a step, temporary results among it."""

import gc
import json
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import optimizer as optimizers

from actstore import ActivationStore, Auto, Plan, make_plan
from actstore.auto.machine import AllocatorPeak, memory_of
from actstore.base.ledger import Ledger
from actstore.devices import Cpu, cpu_memory
from actstore.errors import CapacityError
from actstore.plan.profile import Memory

pytestmark = pytest.mark.usefixtures("one_thread")
KIB, MIB = 2**10, 2**20
TOKENS, WIDTH, VOCABULARY = 512, 64, 4096
LOGITS = 4 * TOKENS * VOCABULARY


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.b(functional.gelu(self.a(x)))


class Speaker(nn.Module):
    """A language model with a vocabulary far wider than its width: logits and their gradient set the peak."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x), tokens)


def lasting(model):
    """Weights, their gradients, and two states of Adam."""
    return 4 * sum(parameter.nbytes for parameter in model.parameters())


class Run:
    """Steps of one store, each with the allocator's peak in forward and backward, as a user sees it from outside."""

    def __init__(self, model, policy, **options):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        self.store = ActivationStore(model, policy, min_bytes=0, **options)
        self.peaks, self.planned = [], []
        gc.collect()  # what earlier tests have left must not go while this counts
        self.base = cpu_memory.memory_allocated() - sum(parameter.nbytes for parameter in model.parameters())

    def step(self, steps=1):
        for _ in range(steps):
            tokens = torch.randint(VOCABULARY, (TOKENS,))
            cpu_memory.reset_peak()
            with self.store:
                loss = self.model(tokens)
            loss.backward()
            self.peaks.append(cpu_memory.max_memory_allocated() - self.base)
            self.planned.append(self.store.plan is not None)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def of_plan(self):
        return [peak for peak, planned in zip(self.peaks, self.planned, strict=True) if planned]


def enough_of(refused):
    [note] = [note for note in refused.value.__notes__ if "or Auto(total=" in note]
    return note.partition('"')[2].partition('"')[0]


@pytest.fixture
def plain():
    """The peak of plain steps."""
    torch.manual_seed(0)
    return max(Run(Speaker(), "keep").step(3).peaks)


@pytest.mark.parametrize("share", [0.35, 0.6])
def test_the_allocator_keeps_the_total_where_logits_dominate(plain, share):
    model = Speaker()
    least = max(Run(Speaker(), "@blocks : recompute").step(3).peaks)
    total = int(least + share * (plain - least))
    run = Run(model, Auto(total=total)).step(40)
    assert len(run.of_plan()) > 10
    assert max(run.of_plan()) <= 1.02 * total
    plan = run.store.plan
    assert plan.profile.memory.temporary >= 1.5 * LOGITS
    assert plan.profile.memory.reserved + plan.budget == total
    assert plan.limits["total"] == total
    assert any(row.decision != "keep" for row in plan.rows)
    assert max(run.of_plan()) > 0.9 * total, "the total is used"
    said = " ".join(str(plan).split())
    assert "temporary results" in said
    assert "bounds their sum" in said
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan


def test_a_total_that_is_too_small_is_refused_with_one_that_is_enough():
    torch.manual_seed(0)
    with pytest.raises(CapacityError) as refused:
        Run(Speaker(), Auto(total=lasting(Speaker()) + MIB)).step(40)
    enough = enough_of(refused)
    run = Run(Speaker(), Auto(total=enough)).step(40)
    total = Auto(total=enough).total_nbytes
    assert total > lasting(Speaker()) + 2 * LOGITS
    assert len(run.of_plan()) > 10
    assert max(run.of_plan()) <= 1.02 * total
    assert max(run.of_plan()) >= 0.9 * total, "the number is not far more than enough"


def test_measured_steps_keep_the_total_after_the_first(plain):
    total = int(0.9 * plain)
    run = Run(Speaker(), Auto(total=total)).step(30)
    assert max(run.peaks) <= 1.02 * total


def test_a_run_goes_on_with_its_temporary_results(plain):
    total = int(0.9 * plain)
    first = Run(Speaker(), Auto(total=total)).step(40)
    second = Run(first.model, Auto(total=total))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.store.load_state_dict(first.store.state_dict())
    second.step(6)
    assert len(second.of_plan()) == 6
    assert second.store.plan.profile.memory.temporary == first.store.plan.profile.memory.temporary >= 1.5 * LOGITS
    assert second.store.plan.text == first.store.plan.text


def test_a_step_that_exceeds_the_total_makes_a_plan_with_less(plain):
    """Temporary results that grow without activations: nothing else shows them."""

    class Growing(Speaker):
        extra = 0

        def forward(self, tokens):
            loss = super().forward(tokens)
            torch.empty(LOGITS * 2 + self.extra, dtype=torch.uint8)
            return loss

    model, total = Growing(), int(0.97 * plain)
    run = Run(model, Auto(total=total)).step(40)
    before = run.store.plan
    model.extra = int(total - run.peaks[-1] + MIB)
    run.step(1)
    assert run.peaks[-1] > total
    run.step(6)
    after = run.store.plan
    assert after.budget < before.budget
    assert max(run.peaks[-5:]) <= 1.02 * total
    assert any("the allocator held" in why for why in after.history)
    assert after.profile.memory.reserved + after.budget == total


def test_a_model_without_temporary_results_keeps_its_budget():
    """Gradients of weights arrive while activations go, and make up for those of activations."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(8)])
    model, x = nn.Sequential(*blocks), torch.randn(256, 256)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    total = 4 * sum(parameter.nbytes for parameter in model.parameters()) + 4 * MIB
    store = ActivationStore(model, Auto(total=total), min_bytes=0)
    for _ in range(24):
        with store:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = store.plan.profile.memory
    assert memory.temporary <= 0.01 * total
    assert store.plan.budget == total - memory.lasting - memory.temporary


def test_without_a_count_temporary_results_come_on_top(plain, monkeypatch):
    monkeypatch.setattr(Cpu, "allocated", lambda _device, *, reset=False: None)
    model = Speaker()
    total = lasting(model) + LOGITS + 3 * MIB
    plan = Run(model, Auto(total=total)).step(40).store.plan
    assert plan.profile.memory.temporary is None
    assert plan.budget == total - plan.profile.memory.lasting
    assert "Temporary results come on top of the total" in " ".join(str(plan).split())


def test_a_budget_of_activations_reads_no_count(monkeypatch):
    monkeypatch.setattr(Cpu, "allocated", lambda _device, *, reset=False: pytest.fail("reads the count"))
    model = Speaker()
    plan = Run(model, Auto(LOGITS + 4 * MIB)).step(20).store.plan
    assert plan.profile.memory.temporary is None
    assert "total" not in plan.limits
    assert "on top" not in str(plan)


def test_make_plan_counts_temporary_results(plain):
    model, tokens = Speaker(), torch.randint(VOCABULARY, (TOKENS,))
    plan = make_plan(model, lambda: model(tokens).backward(), Auto(total=int(0.9 * plain)))
    assert plan.profile.memory.temporary >= 1.5 * LOGITS


def test_nothing_holds_a_model_whose_store_is_gone():
    def train():
        run = Run(Speaker(), Auto(total="1GiB")).step(2)
        return weakref.ref(run.model)

    before = len(optimizers._global_optimizer_pre_hooks)
    gone = train()
    gc.collect()
    assert gone() is None
    store = ActivationStore(Speaker(), Auto(total="1GiB"))
    store.close()
    assert len(optimizers._global_optimizer_pre_hooks) == before


class Counter:
    """A device whose allocator counts what the test says."""

    def __init__(self, *, on_host):
        self.on_host, self.now, self.peak = on_host, 0, 0

    def allocated(self, *, reset=False):
        self.peak = self.now if reset else self.peak
        return self.now, self.peak

    def hold(self, now, peak=0):
        self.now, self.peak = now, max(now, peak, self.peak)


@pytest.mark.parametrize("on_host", [True, False])
def test_what_a_step_has_beside_activations(on_host):
    """64 bytes of weights and as many gradients, 100 bytes of others, which count on a device of their own only."""
    model = nn.Linear(4, 4, bias=False)
    optimizer, ledger, device = torch.optim.SGD(model.parameters(), 0.0), Ledger(), Counter(on_host=on_host)
    memory = partial(Memory, 64, 64, 0, 0)
    others = 0 if on_host else 100
    peaks = AllocatorPeak(model, ledger)
    device.hold(164)

    def step(peak, after=0, *, measured=True):
        peaks.begin(device, memory, measured=measured)
        ledger.peak = 1000
        device.hold(164, peak)
        optimizer.step()
        device.hold(164, after)  # what the optimizer takes
        return peaks.finish(memory)

    assert step(164 + 64 + 1000 + 30) == 30 + others
    assert step(164 + 1000, 9000) == max(0, others - 64)
    assert step(9000, measured=False) is None  # no more than before: unknown
    assert step(9001, measured=False) == 9001 - 164 - 64 - 1000 + others
    device.allocated = lambda *, reset=False: None
    assert step(9002) is None
    peaks.close()


def test_the_step_of_an_optimizer_in_backward_does_not_end_the_peak():
    model = nn.Linear(4, 4, bias=False)
    optimizer, device = torch.optim.SGD(model.parameters(), 0.0), Counter(on_host=True)
    ledger = SimpleNamespace(held=0, peak=0)
    peaks = AllocatorPeak(model, ledger)
    peaks.begin(device, partial(Memory, 64, 64, 0, 0), measured=True)
    ledger.held = 8
    optimizer.step()
    device.hold(0, 500)
    ledger.held = 0
    optimizer.step()
    assert peaks.finish(partial(Memory, 64, 64, 0, 0)) == 500 - 64
    peaks.close()


@pytest.mark.parametrize("on_host", [True, False])
def test_states_of_an_earlier_run_are_no_temporary_results(on_host):
    """They are there in the first step, and known after the optimizer has stepped."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    model.weight.grad = None
    known = memory_of(model, [optimizer])
    device, ledger = Counter(on_host=on_host), Ledger()
    peaks = AllocatorPeak(model, ledger)
    for memory in (Memory(64, 64, None, 0), known):
        device.hold(known.lasting - 64)
        peaks.begin(device, lambda memory=memory: memory, measured=True)
        ledger.peak = 1000
        device.hold(known.lasting - 64, known.lasting + 1000 + 30)
        assert peaks.finish(lambda memory=memory: memory) == 30
    peaks.close()
