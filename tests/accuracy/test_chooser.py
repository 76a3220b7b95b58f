""" "bits": codecs chosen while training runs, within the noise or the bytes that are granted."""

import warnings

import pytest
import torch

from actstore import ActivationStore, Bits, measure_gradient_error
from actstore.accuracy.bits import chooser
from actstore.accuracy.influence.pairs import MAX_VAIN_PAIRS
from actstore.bench import workloads
from actstore.bench.workloads.workload import Workload
from actstore.errors import CapacityError, ConfigError, StateError
from actstore.policy import Rules

WORK = Workload(layers=1, width=32, heads=2, context=64, batch=8, threads=1)
CANDIDATES = ("keep", "int8(affine, round=dither)", "int4(group=64, round=dither)", "int2(group=64, round=dither)")
MOST = 40

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    """Kernels of all would have to be compiled."""
    monkeypatch.setattr(chooser, "CANDIDATES", CANDIDATES)


class Training:
    def __init__(self, seed=0, **limit):
        torch.manual_seed(seed)
        self.job = workloads.make(WORK)
        self.model = self.job.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.store = ActivationStore(self.model, Bits(**limit), min_bytes=0)
        self.steps = 0

    def step(self):
        self.optimizer.zero_grad()
        with self.store:
            loss = self.model(*self.job.batch(self.steps))
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def run(self, steps):
        for _ in range(steps):
            self.step()

    def until_chosen(self, before=None):
        for _ in range(MOST):
            self.step()
            if self.store.choice is not before:
                return self.store.choice
        raise AssertionError(f"no choice after {MOST} steps")


@pytest.fixture(scope="module")
def chosen():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the mark of this file comes after the fixtures of a module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chooser, "CANDIDATES", CANDIDATES)
        training = Training(max_noise=0.02)
        training.until_chosen()
    torch.set_num_threads(threads)
    return training


def test_the_fewest_bytes_within_the_noise_that_is_granted(chosen):
    store, choice = chosen.store, chosen.store.choice
    noise = store._controller.noise
    assert 0 < choice.variance <= 0.02 * noise
    assert choice.gap <= chooser.CHOICE_GAP
    assert choice.bits < 12
    assert len(set(choice.decisions.values())) > 1
    store.sample_next()
    batch = chosen.job.batch(chosen.steps)
    with store:
        loss = chosen.model(*batch)
    loss.backward()
    predicted = sum(site.by_weight for site in store.report().gradients.sites)
    result = measure_gradient_error(lambda: chosen.model(*batch), store, draws=6)
    numels = {name: weight.numel() for name, weight in chosen.model.named_parameters()}
    rows = [(numels[row.name], row.variance / row.norm**2) for row in result.weights if row.norm]
    measured = sum(numel * variance for numel, variance in rows) / sum(numel for numel, _ in rows)
    assert 0.5 < predicted / measured < 2.0
    assert 1 / 3 < choice.variance / measured < 3.0  # chosen by other batches


def test_the_store_runs_the_choice(chosen):
    chosen.step()
    report = chosen.store.report()
    decided = {str(site): text for site, text in chosen.store.choice.decisions.items()}
    ran = {site.site: site.decision for site in report.sites if site.stored_bytes}
    assert ran
    assert all(decided[name] == text for name, text in ran.items())
    assert report.stored_bytes == pytest.approx(chosen.store.choice.nbytes, rel=0.01)


def test_more_noise_takes_fewer_bytes_and_none_takes_none(chosen):
    loose, exact = Training(max_noise=1.0).until_chosen(), Training(max_noise=0).until_chosen()
    assert loose.nbytes < chosen.store.choice.nbytes < exact.nbytes
    assert exact.variance == 0
    assert set(exact.decisions.values()) == {"keep"}


def test_the_same_seed_chooses_the_same(chosen):
    again = Training(max_noise=0.02)
    again.until_chosen()
    assert again.store.choice.decisions == chosen.store.choice.decisions
    assert again.store.choice.variance == chosen.store.choice.variance


def test_least_disturbance_within_a_budget(chosen):
    some = Training(held="1GiB")
    some.until_chosen()
    assert set(some.store.choice.decisions.values()) == {"keep"}
    some.step()
    everything = some.store.report().held_bytes
    budget = int(0.4 * everything)
    training = Training(held=budget)
    training.until_chosen()
    training.step()
    assert 0.85 * budget < training.store.report().held_bytes <= budget


def test_a_budget_that_is_too_small_is_refused_first_and_later_warned_of(monkeypatch):
    monkeypatch.setattr(chooser, "RECHOOSE_STEPS", 1)
    training = Training(held=1000)
    with pytest.raises(CapacityError, match=r"Bits\(held=1000 B\) is too small: .* are held beside") as refused:
        training.until_chosen()
    assert training.store.choice is None
    training = Training(held=int(1.01 * refused.value.facts["least"]))
    choice = training.until_chosen()
    training.store._controller._limits = Bits(held=1000)
    with pytest.warns(RuntimeWarning, match="Codecs stay as they are"):
        training.run(MOST)
    assert training.store.choice is choice


def test_chosen_again_after_some_steps(monkeypatch):
    monkeypatch.setattr(chooser, "RECHOOSE_STEPS", 2)
    training = Training(max_noise=0.05)
    first = training.until_chosen()
    begin = training.steps
    second = training.until_chosen(first)
    assert second.variance != first.variance
    between = training.steps - begin
    training.until_chosen(second)
    assert training.steps - begin - between == between + 2


def test_evaluations_and_failures_in_between_change_nothing(chosen):
    training = Training(max_noise=0.02)

    def fail(*_):
        raise ZeroDivisionError

    for _ in range(MOST):
        with torch.no_grad(), training.store:
            training.model(*training.job.batch(0))
        hook = training.model.norm.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError), training.store:
            training.model(*training.job.batch(0))
        hook.remove()
        training.step()
        training.step()
        if training.store.choice is not None:
            break
    assert training.store.choice is not None
    assert training.store.choice.bits == pytest.approx(chosen.store.choice.bits, rel=0.3)


def test_steps_whose_backward_comes_late_are_refused():
    training = Training(max_noise=0.1)
    losses = []

    def forwards():
        for _ in range(MOST):
            with training.store:
                losses.append(training.model(*training.job.batch(0)))

    with pytest.raises(StateError, match=f"{MAX_VAIN_PAIRS} steps with lossy payloads did not show"):
        forwards()
    sum(losses).backward()
    assert training.until_chosen() is not None  # the next steps measure again


def test_an_evaluation_after_each_step_changes_nothing(chosen):
    training = Training(max_noise=0.02)
    for _ in range(MOST):
        training.step()
        with torch.no_grad(), training.store:
            training.model(*training.job.batch(0))
        if training.store.choice is not None:
            break
    assert training.steps < 5
    assert training.store.choice.bits == pytest.approx(chosen.store.choice.bits, rel=0.3)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_gradients_that_overflow_in_the_second_step_count_for_nothing(chosen, bad):
    training = Training(max_noise=0.02)
    training.step()
    with training.store:
        loss = training.model(*training.job.batch(1))
    (loss * bad).backward()
    training.until_chosen()
    assert training.store.choice.bits == pytest.approx(chosen.store.choice.bits, rel=0.3)


def test_a_budget_holds_where_backward_runs_inside_the_context():
    choices = []
    for inside in (False, True):
        training = Training(held="512KiB")
        for step in range(3):
            training.optimizer.zero_grad()
            with training.store:
                loss = training.model(*training.job.batch(step))
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        choices.append(training.store.choice)
    outside, inside = choices
    assert set(outside.decisions.values()) != {"keep"}
    assert inside.nbytes == pytest.approx(outside.nbytes, rel=0.05)


def test_steps_that_show_nothing_later_are_warned_of_only(monkeypatch):
    monkeypatch.setattr(chooser, "RECHOOSE_STEPS", 1)
    training = Training(max_noise=0.1)
    choice = training.until_chosen()
    losses = []

    def forwards():
        for _ in range(MOST):
            with training.store:
                losses.append(training.model(*training.job.batch(0)))

    with pytest.warns(RuntimeWarning, match="did not show .* Codecs stay as they are"):
        forwards()
    assert training.store.choice is choice


def test_a_payload_whose_errors_did_nothing_is_looked_at_again(monkeypatch):
    monkeypatch.setattr(chooser, "WATCH_STEPS", 2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    torch.nn.init.zeros_(model[2].weight)  # so that the layers before have no gradients yet, as with LoRA
    store = ActivationStore(model, Bits(max_noise=0), min_bytes=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    choices = []
    for _ in range(12):
        x = torch.randn(64, 64)
        with store:
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        choices.append(store.choice)
    decided = [{str(site): text for site, text in choice.decisions.items()} for choice in (choices[4], choices[-1])]
    assert decided[0]["1[0]"].startswith("int2")
    assert decided[1]["1[0]"] == "keep"


def test_a_model_without_payloads_is_kept():
    training = Training(max_noise=0.1)
    training.store = ActivationStore(training.model, Bits(max_noise=0.1), min_bytes="1GiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.run(2 * MAX_VAIN_PAIRS)
    assert training.store.report().stored_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one must be given"),
        ({"max_noise": 0.1, "held": "1GiB"}, "exactly one must be given"),
        ({"max_noise": -0.1}, r"Bits\(max_noise\)=-0.1: must be a fraction"),
        ({"max_noise": float("nan")}, r"Bits\(max_noise\)=nan: must be a fraction"),
        ({"max_noise": "much"}, r"Bits\(max_noise\)='much': must be a fraction"),
        ({"held": "much"}, r"Bits\(held\)='much'"),
    ],
)
def test_limits_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        Bits(**options)


def test_a_model_is_needed():
    with pytest.raises(ConfigError, match="needs a model"):
        ActivationStore(policy=Bits(max_noise=0.1))


def test_a_choice_by_site_is_told_as_rules_where_it_can_be(chosen):
    sites = chosen.store.choice.decisions
    by_module = {}
    for site, text in sites.items():
        by_module.setdefault(site.name, set()).add(text)
    if all(len(texts) == 1 for texts in by_module.values()):
        assert isinstance(chosen.store.choice.rules(), Rules)
    else:
        with pytest.raises(ConfigError, match="decided differently"):
            chosen.store.choice.rules()
