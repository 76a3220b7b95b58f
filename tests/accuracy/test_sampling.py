"""Errors of payloads, measured in steps from time to time: when, at what cost, with which verdict."""

import gc
import json
import re
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Encode, Host, Keep, SampleErrors, Trace, Verify
from actstore.accuracy import Sampler
from actstore.base.ledger import Ledger
from actstore.base.spec import Site
from actstore.codecs import Int8, Raw, Topk
from actstore.errors import AccuracyError, ConfigError
from actstore.integrations.figures import figures
from tests.autograd.checks import check_same
from tests.contracts.clean import all_freed
from tests.devices.late import LateDevice

__all__ = ["all_freed"]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 8))


def inputs(step=0):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step))


def make_store(policy="int4", model=None, **options):
    return ActivationStore(model or make_model(), policy, min_bytes=0, **options)


def run(store, step=0):
    """One step; the gradients."""
    model = store.model
    with store:
        loss = model(inputs(step)).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return {"loss": loss.detach(), **{str(i): grad for i, grad in enumerate(grads)}}


def errors(store):
    return {site.site: site.error for site in store.report().sites if site.error is not None}


# -- when -----------------------------------------------------------------------------------------------------------


def steps_measured(store, count):
    found = []
    for step in range(count):
        run(store, step)
        found.append(max((error.step for error in errors(store).values()), default=0))
    return found


def test_the_first_step_is_sampled_and_then_every_nth():
    assert steps_measured(make_store(observe=[SampleErrors(every=3)]), 8) == [1, 1, 1, 4, 4, 4, 7, 7]
    assert steps_measured(make_store(observe=[SampleErrors(every=1)]), 3) == [1, 2, 3]
    assert steps_measured(make_store(), 3) == [1, 1, 1]


def test_none_is_sampled_without():
    store = make_store(observe=[SampleErrors(every=0)])
    assert steps_measured(store, 2) == [0, 0]
    assert "error" not in str(store.report())


def test_the_first_step_with_a_lossy_payload_is_the_first():
    lossy = []
    model = make_model()
    store = make_store(
        lambda site, spec: Encode(Int8()) if lossy and site.name == "1" else Keep(),
        model,
        observe=[SampleErrors(every=2)],
    )
    run(store)
    run(store)
    assert errors(store) == {}
    lossy.append(True)
    assert steps_measured(store, 3) == [3, 3, 5]


@pytest.mark.parametrize("policy", ["keep", "raw", "recompute", "zmask(raw)"])
def test_what_is_lossless_has_no_error(policy):
    store = make_store(policy, nn.Sequential(make_model()[:4], make_model()))
    run(store)
    assert errors(store) == {}


@pytest.mark.parametrize(
    ("policy", "sites"),
    [
        ("int4", {"1[0]", "3[0]"}),
        ("int4 @ disk", {"1[0]", "3[0]"}),
        ("topk(fraction=0.5) @ host", {"1[0]", "3[0]"}),  # of variable size
        ("1 : int4; * : keep", {"1[0]"}),
    ],
)
def test_each_lossy_payload_is_measured_once(policy, sites):
    store = make_store(policy, tiers=[Host("1MiB")])
    run(store)
    found = errors(store)
    assert set(found) == sites
    assert {(error.payloads, error.measured, error.nbytes) for error in found.values()} == {(1, 1, 32 * 64 * 4)}
    assert all(0 < error.relative < 0.8 for error in found.values())
    store.close()


def test_the_inputs_of_recomputed_regions_are_measured_once():
    model = nn.Sequential(make_model()[:4], make_model()[:4], make_model()[:4])
    store = make_store("* : recompute(int4)", model)
    run(store)
    assert {error.payloads for error in errors(store).values()} == {1}


def test_a_module_that_runs_twice_adds_up():
    shared = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    store = make_store("int4", nn.Sequential(shared, shared))
    run(store)
    assert {site: error.payloads for site, error in errors(store).items() if site.startswith("0.1")} == {"0.1[0]": 2}


# -- without effect -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        "int4",
        "int4(round=stochastic)",
        "int2(round=dither) @ disk",
        "int8(round=stochastic) @ host",
        "topk(fraction=0.5)",
    ],
)
@pytest.mark.parametrize("observer", [None, Verify, Trace])
def test_gradients_are_those_of_steps_that_are_not_sampled(policy, observer):
    others = [observer] if observer is not None else []
    with_, without = (
        make_store(policy, observe=[SampleErrors(every=every), *(other() for other in others)], seed=3)
        for every in (1, 0)
    )
    state = torch.get_rng_state()
    for step in range(3):
        check_same(run(with_, step), run(without, step))
    assert torch.equal(torch.get_rng_state(), state)
    assert errors(with_)
    with_.close()
    without.close()


def test_nothing_is_left():
    store = make_store(observe=[SampleErrors(every=1)])
    for step in range(3):
        run(store, step)
    report = store.report()
    assert report.live_bytes == 0
    del report
    gc.collect()
    before = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
    for step in range(5):
        run(store, step)
        store.report()
    gc.collect()
    assert sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()) <= before
    store.close()
    assert errors(store)  # figures outlive the memory


def test_the_memory_that_it_takes_is_booked():
    peaks = []
    for every in (0, 1):
        store = make_store("1 : int4; * : keep", observe=[SampleErrors(every=every)])
        with store:
            loss = store.model(inputs()).square().mean()
        (site,) = (site for site in store.report().sites if site.site == "1[0]")
        peaks.append(site.peak_held_bytes)
        assert site.held_bytes == site.stored_bytes
        del loss
    assert peaks[1] >= peaks[0] + 32 * 64 * 4


def test_what_has_no_room_in_the_budget_is_not_measured():
    ledger = Ledger()
    ledger.budget.set(1000)
    sampler = Sampler(ledger, 1)
    account, device = ledger.account(Site("m", 0)), LateDevice()
    sampler.start(1)
    encode(sampler, account, device, torch.randn(8192))
    (error,) = sampler.errors().values()
    assert (error.payloads, error.measured) == (1, 0)
    assert ledger.peak == 0
    ledger.budget.set(10**9)
    sampler.start(2)
    encode(sampler, account, device, torch.randn(8192))
    assert ledger.peak > 3 * 8192  # the payload, and what it is compared with
    assert [error.measured for error in sampler.errors().values()] == [1]
    sampler.close()
    assert not device.segments


def encode(sampler, account, device, x, codec=None):
    bound = (codec or Int8()).bind(x)
    out = torch.empty(bound.nbytes + 64, dtype=torch.uint8)
    out = out[-out.data_ptr() % 64 :][: bound.nbytes]
    sampler.codec(bound, bound, account, device, None).encode(x, out, 0)


def test_nobody_waits_for_the_device_but_who_asks():
    ledger, device = Ledger(), LateDevice()
    sampler = Sampler(ledger, 1, warn=1e-6)
    account = ledger.account(Site("m", 0))
    sampler.start(1)
    encode(sampler, account, device, torch.randn(1000))
    sampler.start(2)
    assert any(stream.queue for stream in device.streams)  # nothing ran, and no warning came
    encode(sampler, account, device, torch.randn(1000))
    device.finish()
    with pytest.warns(RuntimeWarning, match=re.escape("m[0]")):
        sampler.start(3)
    encode(sampler, account, device, torch.randn(1000))
    assert [(error.step, error.measured) for error in sampler.errors().values()] == [(3, 1)]
    assert sampler.relative(account) > 0
    sampler.close()
    assert not device.segments
    assert sampler.relative(account) is None  # a scalar on the device


def test_with_a_limit_to_fail_the_next_step_waits():
    ledger, device = Ledger(), LateDevice()
    sampler = Sampler(ledger, 1, fail=1e-6)
    sampler.start(1)
    encode(sampler, ledger.account(Site("m", 0)), device, torch.randn(1000))
    with pytest.raises(AccuracyError):
        sampler.start(2)
    sampler.close()


# -- verdicts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faulty(Int8):
    """int8, and then some fault."""

    fault: str = "none"

    def bind(self, src):
        bound = super().bind(src)

        def decode(buf, out, key=0):
            bound.decode(buf, out, key)
            if self.fault == "shrinks":
                out.mul_(0.95)
            elif self.fault == "clips":
                out.clamp_(-0.3, 0.3)
            elif self.fault == "nan":
                out.view(-1)[0] = torch.nan

        return bound._replace(decode=decode)


@pytest.mark.parametrize(
    ("fault", "words"), [("shrinks", "gain is farther from 1"), ("clips", "lost"), ("nan", "1 elements lost")]
)
def test_a_faulty_codec_is_warned_of_once(fault, words):
    codec = Faulty(fault=fault)
    store = make_store(
        lambda site, spec: Encode(codec) if site.name == "1" else Keep(), observe=[SampleErrors(every=1)]
    )
    run(store)
    with pytest.warns(RuntimeWarning, match=words) as found:
        run(store, 1)
    assert all("step 1: 1[0]" in str(warning.message) for warning in found)
    assert {warning.filename for warning in found} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(store, 2)
        store.report()


def test_a_site_with_too_large_an_error_is_warned_of_once():
    store = make_store("1 : int4; 3 : int8; * : keep", observe=[SampleErrors(every=1, warn=0.05)])
    run(store)
    with pytest.warns(
        RuntimeWarning, match=r"step 1: 1\[0\] \(int4\) .* more than SampleErrors\(warn=0.05\).*1 : e5m6"
    ) as found:
        store.report()
    assert len(found) == 1
    run(store, 1)
    store.report()


def test_a_site_with_too_large_an_error_fails_once_at_the_next_entry():
    store = make_store("1 : int4; 3 : int8; * : keep", observe=[SampleErrors(every=2, fail=0.05)])
    run(store)
    with pytest.raises(AccuracyError, match=r"step 1: 1\[0\] \(int4\)") as caught:
        run(store, 1)
    assert (caught.value.site, caught.value.limit) == (Site("1", 0), 0.05)
    assert caught.value.figures.relative > 0.05
    run(store, 1)  # step 2, as if nothing had been
    run(store, 2)
    with pytest.raises(AccuracyError):
        store.report()
    assert {error.step for error in errors(store).values()} == {3}


def test_what_nobody_asked_for_is_said_when_the_store_is_closed():
    store = make_store("int4", observe=[SampleErrors(fail=0.01)])
    run(store)
    with pytest.raises(AccuracyError):
        store.close()
    store.close()


@pytest.mark.parametrize(
    "options",
    [
        {"every": -1}, {"every": 0.5}, {"every": True}, {"warn": -0.1}, {"warn": "5%"}, {"fail": float("nan")},
        {"fail": 0.1, "every": 0},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options):
    (name, value), *_ = options.items()
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        SampleErrors(**options)


# -- where it is told -----------------------------------------------------------------------------------------------


def test_the_report_tells():
    store = make_store("1 : int4; 3 : int8; * : keep")
    run(store)
    report = store.report()
    head, *lines = str(report).splitlines()
    assert head.split() == ["layers", "tensors", "saved", "stored", "held", "live", "error", "decision"]
    (row,) = (line for line in lines if line.startswith("1 "))
    error = {site.site: site.error for site in report.sites}["1[0]"]
    percent = f"{100 * error.relative:.1f} %"
    assert row.endswith(f"{percent}  int4")
    assert f"largest error: 1[0] {percent} (int4), gain {error.gain:.3f}, in step 1" in lines
    assert [site.site for site in report.lossy] == ["1[0]", "3[0]"]
    html = report._repr_html_()
    assert html.count("<th ") == html.count('<tr class="total">') * 8
    assert percent in html
    found = json.loads(report.to_json())
    assert next(site for site in found["sites"] if site["site"] == "1[0]")["error"]["relative"] == error.relative
    loss = figures(report)
    assert loss["actstore/error_max"] == error.relative
    assert report.lossy[1].error.relative < loss["actstore/error_mean"] < error.relative
    assert loss["actstore/error_lost"] == 0


def test_json_has_null_for_what_is_no_number():
    store = make_store("1 : int4; * : keep")
    store._store.ledger.budget.set(0)
    run(store)
    report = store.report()
    assert "1 of 1 lossy payloads were not measured" in str(report)
    (error,) = (
        site["error"] for site in json.loads(report.to_json(), parse_constant=pytest.fail)["sites"] if site["error"]
    )
    assert (error["relative"], error["measured"]) == (None, 0)
    assert "actstore/error_max" not in figures(report)


def test_the_trace_tells_of_each_payload(tmp_path):
    store = make_store("1 : int4; 3 : int8; * : keep", observe=[SampleErrors(every=2), Trace()])
    for step in range(3):
        run(store, step)
    found = [event for event in store.trace.events() if event.kind == "measure"]
    assert [(event.site, event.step) for event in found] == [("1[0]", 1), ("3[0]", 1), ("1[0]", 3), ("3[0]", 3)]
    assert all(event.nbytes == 32 * 64 * 4 and event.end_ns > event.begin_ns for event in found)
    assert found[2].note.startswith(f"{100 * errors(store)['1[0]'].relative:.1f} %, gain")
    assert sum(event.kind == "decode" for event in store.trace.events()) == 2 * 3  # as in steps that are not sampled
    store.trace.write(tmp_path / "t.ndjson")
    assert type(store.trace).read(tmp_path / "t.ndjson").events() == store.trace.events()
    store.trace.to_chrome(tmp_path / "t.json")
    records = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(record.get("cat") == "measure" for record in records) == 4


def test_a_biased_codec_that_says_so_is_not_suspect():
    store = make_store(lambda site, spec: Encode(Topk(0.1, Raw())) if site.name == "1" else Keep())
    run(store)
    (error,) = errors(store).values()
    assert error.gain < 0.7
    assert not error.shrunk
