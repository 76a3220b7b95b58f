"""Advice on models that run: what it says is true there, and what it suggests is accepted, and helps."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from itertools import pairwise
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Disk, Encode, Offload, SampleErrors, Window
from actstore.base.ticket import Ticket
from actstore.codecs import Expack, Raw
from actstore.policy import Keep, Rules, may_be_lossy, parse_decision
from actstore.session.report import Report
from tests.tiers.wrappers import Wrapper

pytestmark = [pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning")]

CPU = torch.device("cpu")
CODE = re.compile(r"`([^`]+)`")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(64), nn.GELU()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def make_model(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp() for _ in range(depth)))


def step(store: ActivationStore, model: nn.Module, rows: int = 256) -> Report:
    with store:
        loss = model(torch.randn(rows, 64)).square().mean()
    loss.backward()
    return store.report()


def steps(policy: Any, rows: int = 256, count: int = 3, **options: Any) -> tuple[ActivationStore, Report]:
    model = make_model()
    store = ActivationStore(model, policy, **({"min_bytes": 0} | options))
    for _ in range(count):
        report = step(store, model, rows)
    return store, report


# -- the policy language accepts what is suggested, and it helps ------------------------------------------------------

POLICIES = [
    "keep", "* : keep", "0 : keep; * : int8", "0 : int8", "0 : raw", "derive", "0 : derive; * : raw", "0 : recompute",
    "*.up : int8; 1 : keep; * : derive", "*/mine : int8; * : keep", "int8", "e5m6", "unprotected int8", "raw @ host",
    "int8 @ host", "0 : raw @ host > disk; * : keep", "raw @ disk",
]  # fmt: skip


def suggested(rules: Rules, rule: str) -> Rules:
    """The rules with another in the place of that for the same pattern."""
    given = Rules.parse(rule)
    if not given.rules:
        return Rules(rules.rules, default=given.default)
    ((pattern, decision),) = given.rules
    assert pattern in dict(rules.rules)
    return Rules([(p, decision if p == pattern else d) for p, d in rules.rules], default=rules.default)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_suggested_is_accepted_and_holds_less(policy: str) -> None:
    store, report = steps(policy)
    exact = not may_be_lossy(store.policy)
    tried = 0
    for text in report.advice:
        for rule in CODE.findall(text):
            if f"`{rule}` in its place" not in text and f"or `{rule}`, with a loss" not in text:
                continue
            assert isinstance(store.policy, Rules)
            other = suggested(store.policy, rule)
            assert f"`{rule}`, with a loss" in text or may_be_lossy(other) == (not exact)
            options: dict[str, Any] = {"tiers": [Window("64KiB")], "observe": [SampleErrors(every=0)]}
            _, after = steps(Rules.parse(str(other)), rows=8192, count=1, **options)
            _, before = steps(policy, rows=8192, count=1, **options)
            assert after.held_bytes < before.held_bytes
            assert after.peak_held_bytes <= before.peak_held_bytes
            tried += 1
    if "keep" in policy or "derive" in policy or policy in ("0 : int8", "0 : raw", "0 : recompute"):
        assert tried


@pytest.mark.parametrize("policy", POLICIES)
def test_host_memory_is_not_suggested_where_it_is_the_compute_devices_own(policy: str) -> None:
    _, report = steps(policy)
    for text in report.advice:
        assert "@ host" not in re.sub(r"in place of `[^`]+`", "", text)


class Headed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks, self.head = make_model(), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.head(self.blocks(x)))


def test_what_lies_outside_of_recomputed_blocks() -> None:
    model = Headed(1024)
    store = ActivationStore(model, "recompute", min_bytes=0)
    (text,) = [text for text in step(store, model).advice if "are not in them" in text]
    (rules,) = [rule for rule in CODE.findall(text) if "@blocks" in rule]
    assert f"write `{rules}` in its place" in text
    after = ActivationStore(model, rules, min_bytes=0, tiers=[Window("64KiB")])
    assert not may_be_lossy(after.policy)
    before = step(store, model, 8192)
    with after:
        loss = model(torch.randn(8192, 64)).square().mean()
        while after.held_bytes > before.held_bytes / 4:  # what is held and lower depends on the disk, which may be slow
            after._store.poll()
    loss.backward()
    held = after.report()
    assert held.held_bytes < before.held_bytes
    assert held.peak_held_bytes < before.peak_held_bytes
    assert not any("are not in them" in text for text in after.report().advice)


def test_the_peak_of_a_block_is_not_lowered_outside_of_blocks() -> None:
    """Backward has freed what the head saved when the last block runs again: to move it lowers no peak."""
    model = Headed(64)
    report = step(ActivationStore(model, "recompute", min_bytes=0), model, 8192)
    (text,) = report.advice
    assert "more than at the end of forward were held at the peak of the step" in text
    assert re.search(r"of it to run blocks\.2\[0\] again; recompute smaller modules than that", text)
    assert (
        ", put a rule recompute(tiles=auto) before for those that treat each token by itself, such as an MLP, or"
        in text
    )
    moved = step(ActivationStore(model, "@blocks : recompute; * : raw @ disk", min_bytes=0), model, 8192)
    assert moved.held_bytes < report.held_bytes
    assert moved.peak_held_bytes >= report.peak_held_bytes
    smaller = step(ActivationStore(model, "recompute", min_bytes=0), model, 4096)
    assert smaller.peak_held_bytes < 0.6 * report.peak_held_bytes
    tiled = step(ActivationStore(model, "@blocks : recompute(tiles=8)", min_bytes=0), model, 8192)
    assert tiled.peak_held_bytes < 0.6 * report.peak_held_bytes
    assert not any("tiles" in text for text in tiled.advice)


def test_host_memory_of_a_cpu() -> None:
    for policy, other in (("int8 @ host", "int8 @ disk"), ("raw @ host > disk", "raw @ disk")):
        (text,) = [text for text in steps(policy)[1].advice if "here is the compute device's own" in text]
        assert f"write `{other}` in place of `{policy}`" in text
        assert not any("compute device's own" in text for text in steps(other)[1].advice)


def test_a_tier_without_a_budget_is_not_suggested() -> None:
    (text,) = steps("keep", tiers=[Disk(budget=0)])[1].advice
    assert "write `* : expack` in its place" in text
    assert steps("expack")[1].held_bytes < steps("keep")[1].held_bytes


def test_choosers_are_not_told_rules() -> None:
    for policy in ("auto(16MiB)", "bits(0.1)"):
        for count in (1, 2, 8):
            for text in steps(policy, rows=2048, count=count)[1].advice:
                assert "int8" not in text
                assert "rule" not in text


def test_a_roomy_plan_is_told_of_its_budget() -> None:
    store, report = steps("auto(1GiB)", rows=2048, count=8)
    assert store.plan is not None
    assert any("because the plan for a budget of 1.0 GiB has room for them" in text for text in report.advice)
    _, report = steps(store.plan, rows=2048)
    assert any("because the plan for a budget of 1.0 GiB has room for them" in text for text in report.advice)


def test_a_function_is_told_what_to_return() -> None:
    (text,) = steps(lambda site, spec: Keep())[1].advice
    assert "return Offload(Raw(), 'disk')" in text
    assert not any("Keep()" in text for text in steps(lambda site, spec: Offload(Raw(), "disk"))[1].advice)
    (text,) = steps(lambda site, spec: Keep(), tiers=[Disk(budget=0)])[1].advice
    assert "return Encode(Expack())" in text
    assert steps(lambda site, spec: Encode(Expack()))[1].advice == ()


def test_what_derive_makes_again_is_not_called_kept() -> None:
    _, report = steps("derive")
    (text,) = report.advice
    assert float(text.split("(")[1].split()[0]) == pytest.approx(100 * report.held_bytes / report.saved_bytes, abs=1)
    assert "write `* : derive(raw @ disk)` in its place" in text


def test_values_that_must_stay_exact_name_their_site_and_reason() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1))
    for policy, remedy in ("int8", "int8 @ disk"), ("derive(int8)", "derive(int8 @ disk)"):
        store = ActivationStore(model, policy, min_bytes=0)
        (text,) = [text for text in step(store, model).advice if "must stay exact" in text]
        assert re.search(r"most of them at \d\S* \(.+\); write `" + re.escape(remedy) + "` for them", text)
        assert str(parse_decision(remedy)) == remedy
        store = ActivationStore(model, remedy, min_bytes=0)
    assert not any("must stay exact" in text for text in step(store, model).advice)


def test_of_a_recomputed_block_only_the_inputs_count_as_kept() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
    report = step(ActivationStore(model, "recompute(int8)", min_bytes=0), model)  # the batch requires no gradient
    assert report.sites[0].saved_bytes > 4 * report.sites[0].held_bytes
    assert not any("must stay exact" in text for text in report.advice)


# -- the link, the window and the order -------------------------------------------------------------------------------


class Gate(Ticket):
    """A promise that is kept when the test says so."""

    def __init__(self) -> None:
        self.event = Event()

    def ready(self) -> bool:
        return self.event.is_set()

    def wait_on(self, stream: Any) -> None:
        self.event.wait()

    def result(self) -> None:
        self.event.wait()


class Gated(Wrapper):
    """A tier whose writes begin when a gate opens."""

    gate: Gate

    def write(self, slot: Any, src: torch.Tensor, after: Any = ()) -> Ticket:
        return self.tier.write(slot, src, (*after, self.gate))


def test_the_link_is_blamed_only_where_copies_went_on_after_forward() -> None:
    for policy in ("raw @ disk", "int8 @ disk"):  # all travels in one parcel, which leaves when forward has ended
        for text in steps(policy)[1].advice:
            assert "link" not in text
            assert "went on" not in text


def test_copies_that_wait_until_forward_is_over() -> None:
    model = make_model()
    store = ActivationStore(model, "raw @ disk", min_bytes=0, tiers=[Window("1GiB")])
    place = store._store.place(CPU)
    place._open["disk"] = tier = Gated(place.tier("disk"))
    tier.gate = Gate()
    x = torch.randn(4096, 64)
    try:
        with store:
            loss = model(x).square().mean()
        model(x)  # as long as forward
        (text,) = [text for text in store.report().advice if "had not left the device" in text]
    finally:
        tier.gate.event.set()
    loss.backward()
    numbers = re.search(r"forward took ([\d.]+) ms, and copies out went on for ([\d.]+) ms more", text)
    assert numbers is not None
    assert float(numbers[2]) >= 0.1 * float(numbers[1]) > 0
    assert "`expack @ disk` without a loss, `int8 @ disk` with one" in text


class Branches(nn.Module):
    """Two branches, of which one can grow."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.more = nn.Linear(64, 64), nn.Linear(64, 64), False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.left(x).sin(), self.right(x).sin()
        if self.more:
            b = b.sin()
        return a, b


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", "although their order was that of the step before"),
        ("more", "because this forward saved other payloads than the one before"),
        ("backward", "because backward's order changed from the step before"),
    ],
)
def test_misses_blame_a_changed_order_only_where_it_changed(change: str, words: str) -> None:
    """The misses are made up, and the order is real."""
    model = Branches()
    store = ActivationStore(model, "raw @ disk", min_bytes=0)
    for number in range(4):
        model.more = change == "more" and number == 3
        with store:
            left, right = model(torch.randn(64, 64))
        parts = [left.sum(), right.sum()]
        for part in reversed(parts) if change == "backward" and number == 3 else parts:
            part.backward()
        del left, right, part, parts
    store._store.poll()
    account = store._store.ledger.accounts()[0]
    account.misses, account.stall_ns = 100, 10**10
    circumstances = replace(store._store.circumstances(0), step_ms=20_000.0)
    (text,) = [text for text in Report._of(store._store.ledger, circumstances).advice if "Compute waited" in text]
    assert words in text
    assert text.startswith("Compute waited 100")


def test_a_sampled_step_names_what_its_peak_comes_from() -> None:
    sampled = [text for text in steps("int8", rows=2048, count=1)[1].advice if "at the peak of the step" in text]
    assert all("to measure errors" in text for text in sampled)
    for count, options in ((2, {}), (1, {"observe": [SampleErrors(every=0)]})):
        _, report = steps("int8", rows=2048, count=count, **options)
        assert not any("at the peak of the step" in text for text in report.advice)


def test_the_peak_of_a_recomputation_names_its_module() -> None:
    model = nn.Sequential(make_model(4))
    store = ActivationStore(model, "0 : recompute", min_bytes=0)
    (text,) = [text for text in step(store, model, 2048).advice if "at the peak of the step" in text]
    assert re.search(r"[\d.]+ MiB of it to run 0\[0\] again", text)


# -- checkpoints of the model's own -----------------------------------------------------------------------------------


class Checkpoints(Mlp):
    on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.on:
            return super().forward(x)
        found: torch.Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return found


@pytest.mark.parametrize("policy", ["int8", "recompute", "0 : int8; * : keep"])
def test_a_copy_of_the_model_is_another_model(policy: str) -> None:
    model = make_model()
    (advice,) = step(ActivationStore(model, policy, min_bytes=0), copy.deepcopy(model)).advice
    assert "saved outside of the store's model, which did not run; make the store with the model that" in advice
    unpickled = pickle.loads(pickle.dumps(ActivationStore(model, policy, min_bytes=0)))
    assert step(unpickled, model).advice == (advice,)
    assert advice not in step(unpickled, unpickled.model).advice


class Flat(nn.Module):
    """Saves all that it saves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def layers(*widths: int) -> nn.Sequential:
    pairs = ((nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths))
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


class Lists(nn.Module):
    """Lists of single layers, as in AlexNet and VGG."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.classifier = layers(64, 64, 64, 64), layers(64, 64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.classifier(self.features(x).tanh())
        return found


def test_blocks_of_one_layer_save_nothing() -> None:
    model = Lists()
    report = step(ActivationStore(model, "recompute", min_bytes=0), model)
    text = next(text for text in report.advice if "single layers" in text)
    policy = CODE.findall(text)[-1]
    assert policy == "features : recompute; classifier : recompute"
    better = step(ActivationStore(model, policy, min_bytes=0), model)
    assert better.held_bytes < 0.6 * report.held_bytes
    assert not any("single layers" in text for text in better.advice)


def test_a_model_without_modules_has_run() -> None:
    model = Flat()
    assert not any("outside" in text for text in step(ActivationStore(model, "keep"), model).advice)


def test_rules_for_a_frozen_part_saw_nothing() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    store = ActivationStore(model, "0.up : int8; 0.down : raw; 1 : int8; 2.norm : keep; 2 : recompute", min_bytes=0)
    assert step(store, model).advice[-1] == (
        "The rules `0.up : int8` and `0.down : raw` saw nothing: the modules did not run, or nothing in them or before "
        "them requires a gradient; leave these rules out."
    )
    model[0].requires_grad_(True)
    assert not any("saw nothing" in text for text in step(store, model).advice)


@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
def test_rules_for_modules_in_checkpoints_of_the_models_own_saw_nothing() -> None:
    model = nn.Sequential(*(Checkpoints() for _ in range(3)))
    store = ActivationStore(model, "*.up : recompute; *.down : int8", min_bytes=0)
    report = step(store, model)
    assert report.stored_bytes == 0
    assert report.advice[0].startswith("The rules `*.up : recompute` and `*.down : int8` saw nothing: 6 modules ran ")
    for block in model:
        block.on = False
    assert not any("saw nothing" in text for text in step(store, model).advice)
    for block in model:
        block.on = True
    for policy in ("int8", "raw @ disk", "0 : int8"):  # which see the inputs of the blocks
        store = ActivationStore(model, policy, min_bytes=0)
        assert not any("saw nothing" in text for text in step(store, model).advice)
