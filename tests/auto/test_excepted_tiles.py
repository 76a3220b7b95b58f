"""Plans whose recomputed blocks run their MLP in tiles."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore, Auto, Disk, Plan
from actstore.auto.excepted import Separability
from actstore.devices import cpu_memory
from actstore.errors import CapacityError, ConfigError
from actstore.plan.build import chain_of
from actstore.plan.decisions import has_tiles
from actstore.plan.profile import UnitFigures
from actstore.session.planning import replan

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROUNDING = 32, 2e-6  # of the norm: what a few units in the last place of float32 add up to
DECISION = "mlp : recompute(tiles=8); recompute"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, mlp=Mlp):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.name = getattr(mlp, "name", "mlp")
        setattr(self, self.name, mlp())

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + getattr(self, self.name)(x)


class Net(nn.Module):
    def __init__(self, *mlps):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, mlps or [Mlp] * 4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


X = torch.randn(4, 128, WIDTH, generator=torch.Generator().manual_seed(0))


class Training:
    """A model that trains, and what its steps left."""

    def __init__(self, policy, *mlps, **options):
        torch.manual_seed(0)
        self.model = Net(*mlps)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.store = ActivationStore(self.model, policy, min_bytes=0, **options)
        self.peaks, self.losses = [], []

    def run(self, steps, x=X):
        for _ in range(steps):
            self.optimizer.zero_grad()
            with self.store:
                loss = self.model(x)
            loss.backward()
            self.optimizer.step()
            self.peaks.append(self.store.report().peak_held_bytes)
            self.losses.append(loss.detach())
        return self

    @property
    def values(self):
        return [
            *self.losses,
            *(p.grad for p in self.model.parameters()),
            *(p.detach() for p in self.model.parameters()),
        ]

    @property
    def decisions(self):
        return {row.unit: row.decision for row in self.store.plan.rows}


def check_close(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= ROUNDING * other.norm()


def least(policy, *mlps, **options):
    """The smallest budget, as a refusal names it."""
    with pytest.raises(CapacityError) as refused:
        Training(policy, *mlps, **options).run(20)
    return int(refused.value.facts["least"]), refused


def test_the_least_budget_is_lower():
    exact, _ = least(Auto("1KiB"))
    tiled, refused = least(Auto("1KiB", tiles=True))
    assert tiled < 0.65 * exact
    assert "'@mlp : recompute(tiles=8); @blocks : recompute'" in str(refused.value)
    with pytest.raises(CapacityError):
        Training(Auto(tiled)).run(20)
    wanted = Training("keep").run(20)
    training = Training(Auto(tiled, tiles=True)).run(20)
    assert max(training.peaks[2:]) <= tiled
    assert set(training.decisions.values()) >= {DECISION}
    assert "blocks.3.mlp : recompute(tiles=8)\nblocks.3 : recompute\n" in training.store.plan.text
    check_close(training.values, wanted.values)


@pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")
def test_the_allocator_holds_less():
    peaks = []
    for tiles in (False, True):
        budget, _ = least(Auto("1KiB", tiles=tiles))
        training = Training(Auto(budget, tiles=tiles)).run(20)
        cpu_memory.reset_peak()
        before = cpu_memory.max_memory_allocated()
        training.run(1)
        peaks.append(cpu_memory.max_memory_allocated() - before)
    assert peaks[1] < 0.8 * peaks[0]


def test_a_plan_with_tiles_is_written_read_run_and_resumed(tmp_path):
    budget, _ = least(Auto("1KiB", tiles=True))
    training = Training(Auto(budget, tiles=True)).run(20)
    plan, state = training.store.plan, training.store.state_dict()
    plan.write(tmp_path / "plan.json")
    again = Plan.read(tmp_path / "plan.json")
    assert again.text == plan.text
    assert again.decisions == plan.decisions
    assert str(again)
    wanted = Training("keep").run(2)
    for policy in (again, plan.text):
        other = Training(policy).run(2)
        assert max(other.peaks) <= budget
        check_close(other.values, wanted.values)
    resumed = Training(Auto(budget, tiles=True))
    resumed.store.load_state_dict(state)
    assert resumed.store.plan.decisions == plan.decisions
    assert max(resumed.run(4).peaks) <= budget
    smaller = Training(Auto(2 * budget, tiles=True))
    smaller.store.load_state_dict(state)
    smaller.run(4)
    with pytest.raises(Exception, match=r"policy='auto\(max_noise=0, tiles\)', and the store policy='auto"):
        Training(Auto(budget)).store.load_state_dict(state)


def test_exact_plans_have_no_tiles():
    budget, _ = least(Auto("1KiB"))
    wanted = Training("keep").run(20)
    training = Training(Auto(budget)).run(20)
    assert all(map(torch.equal, training.values, wanted.values))
    assert not any(map(has_tiles, training.decisions.values()))
    assert "tiles" not in json.dumps(training.store.plan.to_dict()["limits"])
    profile = Training(Auto(int(0.9 * budget), tiles=True)).run(20).store.plan.profile
    assert any(has_tiles(decision) for of_kind in profile.figures.values() for decision in of_kind)
    for layer in chain_of(profile).layers:
        assert not any(has_tiles(option.decision) for option in layer.options)
    with pytest.raises(CapacityError):
        replan(profile, Auto(int(0.9 * budget)))
    assert "tiles=8" in replan(profile, Auto(int(0.9 * budget), tiles=True)).text


class Mixing(Mlp):
    def forward(self, x):
        return super().forward(x.flip(-2))


class Dropping(Mlp):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1)


class Leaving(Mlp):
    last = None

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Cutting(Mlp):
    def forward(self, x):
        return super().forward(x.view(4, 128, WIDTH))


@pytest.mark.parametrize("mlp", [Mixing, Dropping, Leaving, Cutting])
def test_what_tiles_refuse_runs_whole_and_the_plan_says_why(mlp):
    budget = int(0.7 * max(Training("keep", mlp, mlp).run(1).peaks))
    wanted = Training("keep", mlp, mlp).run(25)
    training = Training(Auto(budget, tiles=True), mlp, mlp).run(25)
    assert not any(map(has_tiles, training.decisions.values()))
    assert all(map(torch.equal, training.values, wanted.values))
    (why,) = [why for why in training.store.plan.history if "tiles" in why]
    assert why.startswith("blocks.0.mlp is not planned in tiles: ")


def test_one_block_that_tiles_refuse_does_not_stop_the_others():
    mlps = Mlp, Mixing, Mlp, Mixing
    whole = max(Training("blocks.* : recompute", *mlps).run(1).peaks)
    budget, _ = least(Auto("1KiB", tiles=True), *mlps)
    training = Training(Auto(budget, tiles=True), *mlps).run(20)
    assert budget <= whole
    assert not {unit for unit, decision in training.decisions.items() if has_tiles(decision)} & {"blocks.1", "blocks.3"}


def test_tiles_that_save_nothing_are_dropped():
    """The part with the largest products is tried, and again where it lowers the peak of backward."""
    record = Separability()
    record.tiled = {"block.fc": 10, "block.mlp": 20, "block.0.mlp": 15, "other.mlp": 30}
    again = "recompute(raw @ host)", "recompute"
    both = [f"mlp : recompute(tiles=8); {each}" for each in again]
    assert list(record.in_tiles("block", again, {})) == both
    assert list(record.in_tiles("norm", again, {})) == []
    of = {"recompute": 100, both[1]: 40, "recompute(raw @ host)": 100, both[0]: 100}
    figures = {decision: UnitFigures(decision, 1.0, 1.0, {}, above) for decision, above in of.items()}
    assert list(record.in_tiles("block", again, figures)) == both[1:]


def test_what_goes_with_tiles():
    assert str(Auto("1GiB", tiles=True)) == "auto(1GiB, tiles)"
    with pytest.raises(ConfigError, match=r"Auto\(tiles='8'\): must be true or false"):
        Auto("1GiB", tiles="8")
    with pytest.raises(ConfigError, match="tiles are not for compiled models"):
        ActivationStore(Net(), Auto("1GiB", tiles=True)).compile()


def test_a_budget_in_between_keeps_its_promise():
    """Tiles are among the options of all measured steps, and each of these keeps the budget once it can."""
    budget = int(0.4 * max(Training("keep").run(1).peaks))
    wanted = Training("keep").run(40)
    training = Training(Auto(budget, tiles=True)).run(40)
    assert max(training.peaks) <= budget
    check_close(training.values, wanted.values)
    (figures,) = (f for kind, f in training.store.plan.profile.figures.items() if kind.startswith("Block"))
    tiled, whole = figures[DECISION], figures["recompute"]
    assert tiled.samples >= 3
    assert tiled.transient < 0.6 * whole.transient
    assert tiled.total("held") == whole.total("held")
    assert tiled.total("saved") == whole.total("saved")


def test_steps_that_grow_recompute_in_tiles():
    """A larger step than planned needs no more than its plan would, before it is planned for."""
    budget, _ = least(Auto("1KiB", tiles=True))
    training = Training(Auto(3 * budget // 2, tiles=True)).run(30)
    peak = training.run(1, X.repeat(2, 1, 1)).peaks[-1]
    assert peak <= 2 * budget


class Probable(nn.Sequential):
    """Dropout that the modules of a model show, as `Dropping` does not."""

    def __init__(self, p=0.1):
        super().__init__(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(p))


@pytest.mark.parametrize(
    ("mlp", "named"),
    [(Mlp, True), (Probable, False), (lambda: Probable(0.0), True), (lambda: nn.Linear(WIDTH, WIDTH), False)],
)
def test_a_refusal_names_tiles_where_they_may_need_less(mlp, named):
    least_budget, refused = least(Auto("1KiB"), mlp, mlp)
    _, second, _ = str(refused.value).split("\n")
    give = f'Give Auto("{-(-least_budget // 1024)}KiB") or more, or use a smaller batch.'
    may = " Auto(..., tiles=True) may need less: it runs blocks.1.mlp in tiles, exact but for rounding."
    assert second == give + may * named


class Deep(nn.Module):
    """An MLP that is no child of its block."""

    name = "layer"

    def __init__(self):
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        return self.ff(self.norm(x))


def test_an_mlp_deep_inside_of_blocks_whose_inputs_are_on_a_disk(tmp_path):
    options = {"tiers": [Disk(tmp_path, budget="1GiB")]}
    here, _ = least(Auto("1KiB", tiles=True), Deep, Deep)
    budget, _ = least(Auto("1KiB", tiles=True), Deep, Deep, **options)
    training = Training(Auto(budget, tiles=True), Deep, Deep, **options).run(20)
    assert set(training.decisions.values()) >= {"layer.ff : recompute(tiles=8); recompute(raw @ disk)"}
    assert max(training.peaks[2:]) <= budget < here
    check_close(training.values, Training("keep", Deep, Deep).run(20).values)
