"""The report: figures by site and in all, as a table and as JSON."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Disk, Report
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
    assert tanh.held_bytes == tanh.stored_bytes == tanh.saved_bytes // 4 + 2 * tanh.saved_bytes // 4 // 128
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
    assert lines[0].split() == ["site", "tensors", "saved", "stored", "held", "live", "decision"]
    total = next(i for i, line in enumerate(lines) if line.startswith("total"))
    names = [line.split()[0] for line in lines[1:total]]
    assert {"0", "1", "3"} <= set(names)
    assert "of what plain autograd holds" in lines[total + 1]
    assert "peak over the step" in lines[total + 1]
    assert "8.0 KiB" in str(store.report())
    del loss


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
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), nn.Linear(64, 4))
    store = ActivationStore(model, "0 : recompute")
    x = torch.randn(2048, 64)
    with store:
        model(x).sum().backward()
    report = store.report()
    assert {site.site: site.decision for site in report.sites}["0[0]"] == "recompute"
    (advice,) = (text for text in report.advice if "were kept by the rule" in text)
    assert advice.startswith("512.0 KiB (17 % of the saved bytes)")  # what the last layer saves, and nothing else
    kept = ActivationStore(model, "keep")
    with kept:
        model(x).sum().backward()
    assert all(site.decision == "" for site in kept.report().sites)
