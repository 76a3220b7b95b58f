"""Planning while training, where models and steps are not as the first steps were."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import optimizer as optimizers

from actstore import ActivationStore, Auto, Disk, make_plan
from actstore.auto import probes, watch
from actstore.auto.attempt import Attempt
from actstore.devices import cpu_memory
from actstore.errors import CapacityError, ConfigError
from actstore.model.units import shapes_of
from actstore.plan.build import chain_of
from actstore.plan.decisions import recomputes
from actstore.plan.profile import Memory, Profile, Unit, UnitBytes, UnitFigures
from actstore.rerun.optimizers import SteppedOptimizers

pytestmark = pytest.mark.usefixtures("one_thread")
MIB = 2**20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.b(functional.gelu(self.a(x))))


class Net(nn.Module):
    def __init__(self, blocks=None):
        super().__init__()
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(4)]) if blocks is None else blocks

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class InPlace(nn.Module):
    def forward(self, x):
        return x.relu_()


class Conv(nn.Module):
    """Changes activations in place, as residual networks do."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        parts = (nn.Conv2d, nn.BatchNorm2d, InPlace, nn.Conv2d, nn.BatchNorm2d)
        makers = {nn.Conv2d: lambda: nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d: lambda: nn.BatchNorm2d(8)}
        self.blocks = nn.ModuleList([nn.Sequential(*(makers.get(part, InPlace)() for part in parts)) for _ in range(3)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = functional.relu_(x + block(x))
        return x.square().mean()


def auto(model, budget, **options):
    return ActivationStore(model, Auto(budget), min_bytes=0, **options)


def run(model, store, steps, rows=256):
    """The peaks of some steps."""
    peaks = []
    for _ in range(steps):
        x = torch.randn(rows, 16)
        with store:
            loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        peaks.append(store.report().peak_held_bytes)
    return peaks


def full(rows=256):
    model = Net()
    return max(run(model, ActivationStore(model, "keep", min_bytes=0), 1, rows))


@pytest.mark.parametrize("share", [0.65, 0.8])
def test_modules_that_write_to_their_inputs_are_not_recomputed(share):
    def train(policy):
        torch.manual_seed(0)
        model = Conv()
        store = ActivationStore(model, policy, min_bytes=0)
        for _ in range(30):
            with store:
                loss = model(torch.randn(8, 3, 16, 16))
            loss.backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()], store, store.report().peak_held_bytes

    wanted, _, peak = train("keep")
    found, store, _ = train(Auto(int(share * peak)))
    assert store.plan is not None
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_steps_of_different_sizes_are_planned_for_the_largest():
    model, budget = Net(), int(0.5 * full(1024))
    store = auto(model, budget)
    sizes = [1024, 128, 64, 512, 768, 256, 1024, 96] * 6
    peaks = [run(model, store, 1, rows)[0] for rows in sizes]
    assert store.plan is not None
    assert max(peaks) <= budget
    assert any(recomputes(row.decision) for row in store.plan.rows)


def test_a_batch_that_grows_is_planned_for():
    model, budget = Net(), int(0.5 * full(1024))
    store = auto(model, budget)
    run(model, store, 20, 64)
    assert all(row.decision == "keep" for row in store.plan.rows)
    peaks = run(model, store, 8, 1024)
    assert budget >= max(peaks)  # the first of which recomputes all
    assert any("more than planned for" in why for why in store.plan.history)


def test_a_batch_that_shrinks_is_planned_for(monkeypatch):
    monkeypatch.setattr(watch, "SHRUNK_STEPS", 8)
    model, budget = Net(), int(0.5 * full(1024))
    store = auto(model, budget)
    run(model, store, 20, 1024)
    assert any(row.decision != "keep" for row in store.plan.rows)
    assert max(run(model, store, 20, 64)) <= budget
    assert all(row.decision == "keep" for row in store.plan.rows)
    assert max(run(model, store, 20, 1024)) <= budget


def test_training_more_of_the_model_is_measured_again():
    model, budget = Net(), int(0.5 * full(1024))
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    store = auto(model, budget)
    run(model, store, 20, 1024)
    model.requires_grad_(True)
    peaks = run(model, store, 50, 1024)
    assert peaks[0] > budget >= max(peaks[3:])
    assert store.plan is not None


def test_a_step_that_no_plan_can_hold_is_told_and_training_goes_on():
    model = Net()
    store = auto(model, int(1.2 * full(256)))
    run(model, store, 45, 256)
    with pytest.warns(RuntimeWarning, match="no plan keeps the budget") as warned:
        peaks = run(model, store, 60, 2048)
    assert len(warned) <= 2
    assert max(peaks) <= 0.6 * full(2048)  # all is recomputed
    plan = store.plan
    run(model, store, 20, 2048)
    assert store.plan.rows == plan.rows  # and that is that


def test_a_budget_that_is_too_small_is_refused_again_and_again():
    """In three lines: the argument, the bytes that do, the nearest policy."""
    model = Net()
    store = auto(model, "1KiB")
    [least] = run(model, store, 1)
    for _ in range(4):  # from the second step on
        with pytest.raises(CapacityError) as refused:
            run(model, store, 1)
        assert str(refused.value) == (
            "Auto(budget)=1.0 KiB: the measured decisions need at least 432.0 KiB on the device, in backward of "
            'blocks.3.\nGive Auto("433KiB") or more, or use a smaller batch.\n'
            "The nearest policy in one line is '@blocks : recompute', with 432.0 KiB."
        )
        assert least < refused.value.facts["least"] <= 1.1 * least
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all("forward" not in vars(module) for module in model.modules())
    store.close()
    assert min(run(model, ActivationStore(model, "recompute", min_bytes=0), 1)) > 0


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.c, self.d = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.d(self.b(self.act(self.c(self.a(x))))) + x)


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_the_budget_that_a_refusal_names_is_enough(share):
    """Units share what in-place operators save, so that predicted peaks are too low: the measured one counts."""
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    model, x = nn.Sequential(*stem, Residual(), Residual(), *ends), torch.randn(2, 3, 32, 32)
    store = ActivationStore(model, "keep", min_bytes=0)
    with store:
        model(x).sum().backward()
    budget = int(share * store.report().saved_bytes)
    try:
        plan = make_plan(model, lambda: model(x).square().mean(), budget, min_bytes=0)
    except CapacityError as refused:
        budget = int(refused.facts["least"])
        plan = make_plan(model, lambda: model(x).square().mean(), budget, min_bytes=0)
    assert plan.measured.peak <= plan.predicted.peak <= budget


class Changing(Net):
    """Its first forward replaces a module, as that of Transformers' BigBird does."""

    def forward(self, x):
        if isinstance(self.blocks[0].drop, nn.Dropout):
            self.blocks[0].drop = nn.Identity()
        return super().forward(x)


def test_a_plan_is_for_the_model_as_it_was_before_its_first_forward_too():
    model, x = Changing(), torch.randn(256, 16)
    plan = make_plan(model, lambda: model(x), "1MiB", min_bytes=0)
    for each in (Changing(), model):
        assert str(ActivationStore(each, plan).policy) == plan.text
    with pytest.raises(ConfigError, match="another model"):
        ActivationStore(Net(), plan)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_total_bounds_the_tensors_of_the_process(foreach):
    """Weights, gradients, optimizer states and activations, by the allocator's count; operators need some beside."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(8)])
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    total, x = 4 * weights + 20 * MIB, torch.randn(1024, 256)
    store = ActivationStore(model, Auto(total=total), min_bytes=0)
    gc.collect()  # what earlier tests have left must not go while this counts
    base = cpu_memory.memory_allocated() - weights
    for _ in range(24):
        with store:
            loss = model(x).square().mean()
        cpu_memory.reset_peak()
        loss.backward()
        backward = cpu_memory.max_memory_allocated() - base
        cpu_memory.reset_peak()
        optimizer.step()
        update = cpu_memory.max_memory_allocated() - base
        optimizer.zero_grad()
    plan = store.plan
    assert plan is not None
    assert plan.profile.memory.lasting == pytest.approx(4 * weights, rel=1e-3)
    assert plan.budget == total - plan.profile.memory.reserved
    assert plan.history[0].startswith("optimizer states take 8.0 MiB of the total, ")
    assert backward < 1.02 * total
    assert plan.profile.memory.updating <= update - 4 * weights < plan.profile.memory.updating + MIB + weights * foreach
    store.close()


def test_a_total_that_is_too_small_is_refused_with_one_that_is_enough():
    def train(total):
        model = Net()
        optimizer, store = torch.optim.AdamW(model.parameters()), ActivationStore(model, Auto(total=total), min_bytes=0)
        for _ in range(16):
            with store:
                loss = model(torch.randn(256, 16))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return store.plan

    with pytest.raises(CapacityError) as refused:
        train("600KiB")
    [enough] = [note for note in refused.value.__notes__ if "total=" in note and "or Auto" in note]
    assert train(enough.partition('"')[2].partition('"')[0]) is not None


def test_the_first_step_runs_the_decisions_with_the_least_memory(tmp_path):
    model = Net()
    recomputed = run(model, ActivationStore(model, "recompute", min_bytes=0), 1)
    store = auto(model, "1MiB")
    assert run(model, store, 1) <= recomputed
    assert store._controller.board.planner.probes.least() == {
        "stem": "derive", **{f"blocks.{i}": "recompute" for i in range(4)}, "head": "derive"
    }  # fmt: skip
    store = auto(model, "1MiB", tiers=[Disk(tmp_path, "1GiB")])
    run(model, store, 1)
    least = store._controller.board.planner.probes.least()
    assert {least["stem"], least["blocks.0"]} == {"derive(raw @ disk)", "recompute(raw @ disk)"}


def test_a_refused_budget_names_bytes_that_are_enough():
    model = Net()
    least = max(run(model, ActivationStore(model, "recompute", min_bytes=0), 1))
    store = auto(model, int(0.7 * least))
    run(model, store, 1)
    with pytest.raises(CapacityError, match="at least") as refused:
        run(model, store, 1)
    budget = int(1.001 * refused.value.facts["least"])
    assert 0 < max(run(model, auto(model, budget), 45)) <= budget


class Chain(nn.Module):
    """One cell, called again and again."""

    def __init__(self, calls):
        super().__init__()
        self.calls, self.cell = calls, nn.LSTMCell(16, 16)

    def forward(self, x):
        h = c = torch.zeros(len(x), 16)
        for _ in range(self.calls):
            h, c = self.cell(x, (h, c))
        return h.square().mean()


def test_a_budget_that_only_replays_keep_is_exceeded_in_the_first_step_alone():
    model = Chain(60)
    recomputed = max(run(model, ActivationStore(model, "recompute", min_bytes=0), 1))
    store = auto(model, int(0.7 * recomputed))
    peaks = run(model, store, 45)
    assert peaks[0] > 0.7 * recomputed >= max(peaks[1:])
    assert any(schedule in store.plan.text for schedule in ("segment", "revolve"))


class Wide(nn.Module):
    """Blocks whose matrix products have results as large as all that they save."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([
            nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 16))
            for _ in range(3)
        ])  # fmt: skip

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Around(nn.Module):
    """Saves tensors of its own between its blocks, which backward frees after the blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(5)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x.sin()) + x
        return x.square().mean()


class Halves(nn.Module):
    """Few blocks with much inside: halves that are recomputed one by one need less than all of a block at once."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16))

        def forward(self, x):
            return self.parts(x)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Halves.Half(), Halves.Half()

        def forward(self, x):
            return self.two(self.one(x))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Halves.Pair() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("make", [Net, Wide, Around, Halves, lambda: Chain(30)])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_no_step_after_the_first_exceeds_the_budget(make, share):
    """Each is forecast before it runs; a budget that nothing keeps is refused at the second step."""
    torch.manual_seed(0)
    model = make()
    budget = int(share * max(run(model, ActivationStore(model, "keep", min_bytes=0), 1)))
    store, peaks = auto(model, budget), []
    try:
        for _ in range(45):
            peaks += run(model, store, 1)
    except CapacityError:
        assert len(peaks) == 1
        assert peaks[0] > budget
    else:
        assert max(peaks[1:]) <= budget


def test_parts_are_recomputed_where_a_whole_block_exceeds_the_budget():
    model = Halves()
    recomputed = max(run(model, ActivationStore(model, "recompute", min_bytes=0), 1))
    store = auto(model, int(0.7 * recomputed))
    peaks = run(model, store, 45)
    assert peaks[0] > 0.7 * recomputed >= max(peaks[1:])
    assert "one : recompute" in store.plan.text


@pytest.mark.parametrize("steps", [3, 45])
@pytest.mark.parametrize("change", ["replaced", "removed", "added"])
def test_modules_may_change_between_steps(steps, change):
    model, budget = Net(), int(0.6 * full())
    store = auto(model, budget)
    run(model, store, steps)
    if change == "removed":
        del model.blocks[1]
    elif change == "added":
        model.blocks.append(Block())
    else:
        model.blocks[1] = Block()
    peaks = run(model, store, 45)
    assert max(peaks) <= budget
    assert len(store.plan.rows) == len(model.blocks) + 3


class Bare(nn.Module):
    """Never calls what it holds."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = functional.linear(x, block.weight).tanh()
        return x


@pytest.mark.parametrize("make", [lambda: nn.Linear(16, 16), Bare])
def test_a_model_without_units_has_a_plan(monkeypatch, make):
    links = []
    measure = probes.measure_links
    monkeypatch.setattr(probes, "measure_links", lambda *args, **options: links.append(1) or measure(*args, **options))
    model = make()
    store = auto(model, "1MiB")
    with torch.no_grad(), store:  # an evaluation
        model(torch.ones(2, 16))
    run(model, store, 4)
    assert store.plan is not None
    assert len(links) == 1


def test_units_have_a_forward():
    """Lists of lists and dicts are looked through, and names that no rule can write get no decision."""
    lists = Net(nn.ModuleList([nn.ModuleList([Block(), nn.GELU()]) for _ in range(2)]))
    names = {shape.name: shape.recomputable for shape in shapes_of(lists)}
    assert names["blocks.0.0"]
    assert not names["blocks.0.1"]
    assert "blocks.0" not in names
    blocks = nn.ModuleDict({name: Block() for name in ("plain", "a:b", "c*", "e/f", "h;i")})
    model = Net(blocks)
    peak = max(run(model, ActivationStore(model, "keep", min_bytes=0), 1))
    store = auto(model, int(0.9 * peak))
    assert max(run(model, store, 30)) <= peak
    decisions = {row.unit: row.decision for row in store.plan.rows}
    assert decisions["blocks.plain"] == "recompute"
    assert all(decisions[f"blocks.{name}"] == "keep" for name in ("a:b", "c*", "e/f", "h;i"))


def test_nothing_holds_a_model_whose_store_is_gone():
    def train(close):
        model = Net()
        store, optimizer = auto(model, "1KiB" if close else "1GiB"), torch.optim.SGD(model.parameters())
        run(model, store, 1)
        optimizer.step()
        if close:
            store.close()
        return weakref.ref(model), weakref.ref(optimizer)

    def hooks():
        """Their number, without those of stores that are gone: the next store removes them."""
        SteppedOptimizers(nn.Linear(1, 1), weakref.WeakSet()).close()
        return len(optimizers._global_optimizer_post_hooks)

    before = hooks()
    refs = [*train(close=True), *train(close=False)]
    gc.collect()
    assert all(ref() is None for ref in refs)
    assert hooks() <= before + 1  # of the store that nobody has closed


def test_a_payload_that_is_not_a_number_is_no_option():
    keep, lossy = (UnitFigures(name, 1.0, 1.0, {"": UnitBytes(8, held)}, error=e) for name, held, e in
                   [("keep", 8, 0.0), ("int8", 2, float("nan"))])  # fmt: skip
    profile = Profile((Unit("a", "A", 1, (), False),), {"A": {"keep": keep, "int8": lossy}}, probes.Links(), 0.0,
                      Memory(0, 0, 0, 0), "", {})  # fmt: skip
    [layer] = chain_of(profile, 0.1).layers
    assert [option.decision for option in layer.options] == ["keep"]


def out_of_memory(store, calls):
    def check(model, *_):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")

    return check


def test_a_training_step_that_drops_its_gradients_is_run_once_more():
    def train(fail):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        store, calls = auto(model, "1GiB"), []
        if fail:
            model.head.register_forward_hook(out_of_memory(store, calls))

        @store
        def step():
            optimizer.zero_grad()
            loss = model(torch.randn(64, 16))
            loss.backward()
            optimizer.step()

        for _ in range(6):
            step()
        return list(model.parameters())

    wanted = train(fail=False)
    with pytest.warns(RuntimeWarning, match="memory ran out"):
        found = train(fail=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_an_attempt_sees():
    model = nn.BatchNorm1d(4)
    model.register_buffer("other", torch.zeros(2))
    x = torch.ones(3, 4)
    attempt = Attempt(model, (x,))
    model(x)
    assert attempt.undo() == ""
    assert model.num_batches_tracked == 0
    x.add_(1)
    assert "arguments" in attempt.undo()
    attempt = Attempt(model, {"x": [x]})
    model.other = model.other + 1
    assert "other buffers" in attempt.undo()
    model.weight.grad = torch.ones(4)
    attempt, weak = Attempt(model), weakref.ref(model.weight.grad)
    held = model.weight.grad
    model.weight.grad = None
    assert "changed gradients" in attempt.undo()
    del held
    assert weak() is None  # an attempt holds no gradient
    assert attempt.undo() == ""


def test_running_out_before_there_are_activations_changes_nothing():
    model, budget = Net(), int(0.6 * full())
    store = auto(model, budget)
    run(model, store, 3)
    with pytest.raises(torch.OutOfMemoryError) as failed, store:
        raise torch.OutOfMemoryError("no memory")
    assert "no plan needs less memory" in str(failed.value.__notes__)
    run(model, store, 45)
    assert store.plan.budget == budget
