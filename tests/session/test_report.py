"""The report: figures by site and in all, as a table and as JSON."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Disk, Report
from actstore.errors import ConfigError
from actstore.results import SiteReport


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8), nn.Softmax(-1))


def reported(policy, **options):
    model = small_model()
    store = ActivationStore(model, policy, min_bytes=0, **options)
    with store:
        loss = model(torch.randn(32, 64)).square().mean()
    return store, loss


def test_before_the_first_step_there_is_nothing():
    report = ActivationStore(policy="raw").report()
    figures = dataclasses.asdict(report)
    (advice,) = figures.pop("advice")
    process = figures.pop("process")  # there without a step, on a CPU
    assert process is None or process["resident_bytes"] > 0
    assert not any(figures.values())
    assert advice.startswith("Autograd saved 0 bytes inside the store's context")
    assert "nothing" in str(report)


def test_figures_of_a_known_model():
    store, loss = reported("0 : raw; 1 : raw @ disk; * : keep", tiers=[Disk(None)])
    report = store.report()
    sites = {site.site: site for site in report.sites}
    wide, narrow = 32 * 64 * 4, 32 * 8 * 4
    assert report.saved_bytes == 2 * wide + narrow  # the input, tanh's output, softmax's output
    assert report.stored_bytes == 2 * wide
    assert report.live_bytes == 3 * wide + narrow  # tanh's output is on disk for tanh, and kept for the layer after it
    assert sites["2"].held_bytes == wide
    assert (sites["0[0]"].decision, sites["0[0]"].tensors, sites["0[0]"].held_bytes) == ("raw", 1, wide)
    assert (sites["1[0]"].decision, sites["1[0]"].stored_bytes, sites["1[0]"].live_bytes) == ("raw @ disk", wide, wide)
    loss.backward()
    assert store.report().live_bytes == 0
    assert store.report().saved_bytes == report.saved_bytes  # of the last forward, also after backward


def test_a_new_step_starts_anew():
    store, loss = reported("raw")
    first = store.report()
    del loss
    with store:
        pass
    report = store.report()
    assert (report.saved_bytes, report.stored_bytes, report.held_bytes, report.live_bytes) == (0, 0, 0, 0)
    assert first.saved_bytes > 0


@pytest.mark.parametrize("policy", ["int8", "recompute(raw)", "auto(1GiB)"])
def test_an_evaluation_keeps_it(policy):
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    model.append(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    store = ActivationStore(model, policy, min_bytes=0)
    for mode in (torch.no_grad, torch.inference_mode):
        with store:
            loss = model(torch.randn(32, 64)).square().mean()
        before = dataclasses.replace(store.report(), process=None)
        with mode(), store:
            model(torch.randn(64, 64))
        assert dataclasses.replace(store.report(), process=None) == before
        assert before.held_bytes > 0
        loss.backward()
        model.zero_grad()


def test_training_that_turns_gradients_on_inside_counts_its_steps():
    """As a closure does in an optimizer's step, which PyTorch runs without gradients."""
    store, x = ActivationStore(policy="raw", min_bytes=0), torch.randn(100, requires_grad=True)
    saved = []
    for _ in range(4):
        with torch.no_grad(), store, torch.enable_grad():
            y = x.exp().sum()
        saved.append(store.report().saved_bytes)
        y.backward()
    assert saved[-1] == saved[0]


def test_inside_the_context_it_tells_what_there_is_by_now():
    store, x = ActivationStore(policy="raw", min_bytes=0), torch.randn(100, requires_grad=True)
    with store:
        assert store.report().saved_bytes == 0
        y = x.exp()
        assert store.report().saved_bytes == store.report().live_bytes == 400
        z = y.sin().exp()
        assert store.report().saved_bytes == 800
    del y, z


def test_what_int8_holds():
    store, loss = reported("int8")
    report = store.report()
    (tanh,) = (site for site in report.sites if site.site == "1[0]")
    assert tanh.held_bytes == tanh.stored_bytes == tanh.saved_bytes // 4 + 2 * tanh.saved_bytes // 4 // 64  # rows of 64
    exact = [site for site in report.sites if site.note]
    assert report.held_bytes == tanh.held_bytes + sum(site.saved_bytes for site in exact)
    del loss


def test_json_has_the_names_of_the_attributes():
    store, loss = reported("int8")
    report = store.report()
    found = json.loads(report.to_json())
    assert list(found) == [f.name for f in dataclasses.fields(Report)]
    assert list(found["sites"][0]) == [f.name for f in dataclasses.fields(SiteReport)]
    assert found["saved_bytes"] == report.saved_bytes
    assert [site["site"] for site in found["sites"]] == [site.site for site in report.sites]
    del loss


def test_notes_say_why_a_decision_was_not_followed():
    store, loss = reported("int8")
    notes = " ".join(site.note for site in store.report().sites)
    assert "requires no gradient" in notes  # the input
    assert "Softmax" in notes
    del loss


def test_the_table_has_a_line_for_each_module_and_the_totals():
    store, loss = reported("0 : int8; 1 : raw; * : keep")
    lines = str(store.report()).splitlines()
    assert lines[0].split() == ["layers", "tensors", "saved", "stored", "held", "live", "decision"]
    total = next(i for i, line in enumerate(lines) if line.startswith("total"))
    names = [line.split()[0] for line in lines[1:total]]
    assert {"0", "1", "3"} <= set(names)
    assert "of what plain autograd holds" in lines[total + 1]
    assert "peak over the step" in lines[total + 1]
    assert "8.0 KiB" in str(store.report())
    del loss


class Block(nn.Module):
    """The modules of a transformer's block, without their meaning."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh())
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.drop(self.out(self.mlp(self.norm(x)).sigmoid()))


def deep(policy, layers=32):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.blocks = nn.Sequential(*(Block() for _ in range(layers)))
    model.head = nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1))
    store = ActivationStore(model, policy, min_bytes=0)
    with store:
        loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    return store.report()


def test_a_report_of_32_layers_fits_a_screen():
    report = deep("blocks.*.mlp.* : int8; * : keep")
    text = str(report)
    assert len(text.splitlines()) <= 40
    assert sum(line.startswith("blocks.0-31.mlp.1 x32 ") for line in text.splitlines()) == 1
    one = next(module for module in report.modules if module.module == "blocks.7.mlp.1")
    group = next(row for row in report.layers if row.module == "blocks.0-31.mlp.1")
    assert (group.saved, group.held, group.tensors) == (32 * one.saved, 32 * one.held, 32 * one.tensors)
    held = [row.held for row in report.layers]
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize("rows", ["layers", "modules"])
def test_rows_add_up_to_the_totals(rows):
    report = deep("blocks.*.mlp.* : int8; blocks.*.out : raw @ disk; * : keep", layers=5)
    found = getattr(report, rows)
    assert sum(row.saved for row in found) == report.saved_bytes
    assert sum(row.stored for row in found) == report.stored_bytes
    assert sum(row.held for row in found) == report.held_bytes
    assert sum(row.tensors for row in found) == sum(site.tensors for site in report.sites)
    assert sum(row.modules for row in report.layers) == len(report.modules)


def test_layers_that_differ_have_rows_of_their_own():
    report = deep("blocks.2.mlp.* : int8; * : keep", layers=4)
    names = [row.label for row in report.layers if ".mlp.1" in row.module]
    assert sorted(names) == ["blocks.0-1,3.mlp.1 x3", "blocks.2.mlp.1"]


def test_a_table_of_few_rows_sums_the_rest():
    report = deep("keep", layers=2)
    _, first, rest, total = report.table(most=1).splitlines()
    assert first.startswith(report.layers[0].label)
    assert rest.split()[:2] == [str(len(report.layers) - 1), "more"]
    assert "table(most=None)" in rest
    assert total.startswith("total")
    assert len(report.table(most=None).splitlines()) == len(report.layers) + 2
    assert len(report.table(most=len(report.layers) - 1).splitlines()) == len(report.layers) + 2  # a row of one more


def test_a_table_by_modules_and_by_sites():
    report = deep("keep", layers=3)
    modules = report.table("modules", most=None)
    assert [line.split()[0] for line in modules.splitlines()[1:-1]] == [row.module for row in report.modules]
    sites = report.table("sites", most=None).splitlines()
    assert sites[0].split()[0] == "sites"
    assert [line.split()[0] for line in sites[1:-1]] == [site.site for site in report.sites]
    with pytest.raises(ConfigError, match=r"by='rows': must be"):
        report.table("rows")


def test_a_report_is_a_value():
    store, loss = reported("raw")
    assert store.report() == store.report()
    with pytest.raises(dataclasses.FrozenInstanceError):
        store.report().saved_bytes = 0
    del loss


def test_traffic_is_told():
    store, loss = reported("raw @ disk")
    loss.backward()
    report = store.report()
    assert report.hits + report.late + report.misses == 5  # three payloads, of which two are asked for twice
    assert [medium.tier for medium in report.media] == ["disk"]
    assert report.media[0].peak_bytes >= report.stored_bytes
    assert report.media[0].used_bytes == 0
    text = str(report)
    assert "disk: 0 B now, peak" in text
    assert f"{report.hits} payloads in time, {report.late} late, {report.misses} not foreseen" in text
    assert sum(site.offload_ms for site in report.sites) == pytest.approx(report.offload_ms)


def test_advice_says_that_something_else_holds_what_was_stored():
    model, kept = small_model(), []
    model[1].register_forward_hook(lambda module, args, out: kept.append(out))
    store = ActivationStore(model, "1 : raw @ disk; * : keep", min_bytes=0)
    with store:
        model(torch.randn(32, 64)).sum()
    (advice,) = [line for line in store.report().advice if "something else keeps these tensors alive" in line]
    assert "8.0 KiB" in advice
    assert "1[0]" in advice
    kept.clear()
    with store:
        model(torch.randn(32, 64)).sum()
    kept.clear()


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("raw @ host", {}, "here is the compute device's own"),
        ("raw @ disk", {"min_bytes": "1MiB"}, "below min_bytes=1.0 MiB"),
        ("raw @ disk", {"tiers": [Disk(budget=0)]}, "found no room in disk"),
        ("0 : raw", {}, "which holds where no other rule matches"),
    ],
)
def test_advice_names_the_cause(policy, options, words):
    model = small_model()
    store = ActivationStore(model, policy, **({"min_bytes": 0} | options))
    with store:
        loss = model(torch.randn(32, 64)).square().mean()
    assert any(words in line for line in store.report().advice), store.report().advice
    del loss


def test_steady_training_needs_no_advice():
    model = small_model()
    store = ActivationStore(model, "raw", min_bytes=0)
    for _ in range(2):
        with store:
            loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
    assert store.report().advice == ()


def test_what_is_recomputed_is_not_called_kept():
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)))
    store = ActivationStore(model, "1 : recompute")
    x = torch.randn(2048, 64)
    with store:
        model(x).sum().backward()
    report = store.report()
    assert {site.site: site.decision for site in report.sites}["1[0]"] == "recompute"
    (advice,) = (text for text in report.advice if "were kept by the rule" in text)
    assert advice.startswith("512.0 KiB (17 % of the saved bytes)")  # what the first layer saves, and nothing else
    kept = ActivationStore(model, "keep")
    with kept:
        model(x).sum().backward()
    assert all(site.decision == "" for site in kept.report().sites)
