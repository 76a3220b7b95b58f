"""ActivationStore: what it accepts, what it refuses, and what it does when a tier is full."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import actstore
from actstore import (
    ActivationStore,
    Disk,
    Encode,
    Host,
    Keep,
    Offload,
    PluginTier,
    Recompute,
    Rules,
    Trace,
    Window,
)  # fmt: skip
from actstore.codecs import Int8, Raw
from actstore.errors import CapacityError, ChainError, ConfigError, PolicyError, StateError, UnknownCodecError

pytestmark = pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning")


def small_model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def step(store, n=100):
    """Saves two tensors of 4 * n bytes; returns the output and what its gradient must be."""
    x = torch.randn(n, requires_grad=True)
    with store:
        y = x.sin().exp()
    return x, y


# -- bad input: each error with its type, the thing, the numbers and the next step ------------------------------------

CLAIMED = Trace()
CLAIMED._claim()
BAD_OPTIONS = {
    "no_list": ({"tiers": Host()}, ["tiers=Host(budget=None)", "must be a list"]),
    "no_tier": ({"tiers": ["host"]}, ["unknown 'host'", "Host(...)"]),
    "tier_twice": ({"tiers": [Host(), Host("1GiB")]}, ["'host' is given twice"]),
    "window_twice": ({"tiers": [Window(), Window()]}, ["Window is given twice"]),
    "no_list_of_observers": ({"observe": "trace"}, ["observe='trace'", "must be a list"]),
    "no_observer": ({"observe": [Trace]}, ["observe: unknown", "Trace()"]),
    "observer_twice": ({"observe": [Trace(), Trace()]}, ["Trace is given twice"]),
    "seed": ({"seed": 1.5}, ["seed=1.5", "whole number"]),
    "trace_of_another": ({"observe": [CLAIMED]}, ["trace of another store"]),
    "min_bytes": ({"min_bytes": "small"}, ["min_bytes='small'"]),
    "missing_disk_path": (
        {"policy": "raw @ disk", "tiers": [Disk("/no/such/folder")]},
        ["Disk(path='/no/such/folder')", "No such file", "existing folder"],
    ),
    "disk_path_in_a_ladder": (
        {"policy": "int8 @ host > disk", "tiers": [Disk("/no/such/folder")]},
        ["/no/such/folder"],
    ),
    "model_is_no_module": ({"model": "int8"}, ["model='int8'", "torch.nn.Module", "policy="]),
    "policy_is_nothing": ({"policy": 8}, ["policy=8", "must be text"]),
    "policy_is_none": ({"policy": None}, ["policy=None"]),
    "patterns_without_a_model": (
        {"policy": "blocks.* : int8"},
        ["no model was given", "ActivationStore(model, policy)"],
    ),
    "recompute_without_a_model": ({"policy": "recompute"}, ["no model was given"]),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name):
    options, words = BAD_OPTIONS[name]
    with pytest.raises(ConfigError) as info:
        ActivationStore(**options)
    assert isinstance(info.value, ValueError)
    for word in words:
        assert word in str(info.value)


BAD_BUDGETS = {
    "word": (lambda: Host("lots"), ["Host(budget)='lots'", "must be a number of bytes", "'20GiB'"]),
    "unit": (lambda: Disk(budget="3 bananas"), ["Disk(budget)='3 bananas'", "KiB"]),
    "negative": (lambda: Host(-1), ["Host(budget)=-1", "must be 0 or more"]),
    "bool": (lambda: Host(True), ["Host(budget)=True", "must be a number of bytes"]),
    "float": (lambda: Disk(budget=1.5), ["Disk(budget)=1.5", "int or text"]),
    "signed_text": (lambda: PluginTier("shelf", "-5GiB"), ["'-5GiB'", "must be a number of bytes"]),
    "window": (lambda: Window("wide"), ["Window(nbytes)='wide'", "must be a number of bytes"]),
    "no_window": (lambda: Window(0), ["Window(nbytes=0)", "must be above 0"]),
    "when_full": (lambda: Window(when_full="maybe"), ["when_full='maybe'", '"spill"']),
}


@pytest.mark.parametrize("name", BAD_BUDGETS)
def test_bad_values(name):
    make, words = BAD_BUDGETS[name]
    with pytest.raises(ConfigError) as info:
        make()
    for word in words:
        assert word in str(info.value)


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'poliky'"):
        ActivationStore(poliky="int8")


BAD_POLICIES = {
    "unknown_codec": ("int9", UnknownCodecError, ["int9", "int8"]),
    "unknown_tier": ("int8 @ hsot", ConfigError, ["hsot", "Did you mean 'host'"]),
    "upward": ("int8 @ disk > host", ChainError, ["goes up", "host > disk"]),
    "matches_nothing": ("1.proj : int8", PolicyError, ["'1.proj'", "matches no module"]),
    "near": ("0x : int8", PolicyError, ["0x"]),
    "two_at_once": ("a : int8; b : raw", PolicyError, ["'a'", "'b'"]),
    "no_decision": ("0 : ", PolicyError, ["expected a codec", "end of the rule"]),
    "empty": ("  # nothing", PolicyError, ["holds no rule"]),
    "never_applies": ("* : raw; 0 : int8", PolicyError, ["can never apply"]),
    "class": (Keep, PolicyError, ["class", "must be text"]),
}


@pytest.mark.parametrize("name", BAD_POLICIES)
def test_bad_policies_fail_when_they_are_built(name):
    policy, kind, words = BAD_POLICIES[name]
    with pytest.raises(kind) as info:
        ActivationStore(small_model(), policy)
    for word in words:
        assert word in str(info.value)


def test_an_alias_that_finds_nothing_names_what_there_is():
    with pytest.raises(PolicyError, match=r"'@blocks' finds nothing in this model. Write a rule for all of it"):
        ActivationStore(nn.Linear(4, 4), "@blocks : recompute")


@pytest.mark.parametrize("policy", ["keep", "derive", "recompute", "int8", "raw @ disk", "auto(1MiB)"])
def test_a_closed_store_is_refused_where_it_is_entered(policy):
    store = ActivationStore(small_model(), policy)
    store.close()
    with pytest.raises(StateError, match="this store is closed"), store:
        raise AssertionError("it was entered")


def test_a_disk_takes_a_folder():
    with pytest.raises(ConfigError, match=r"Disk\(path\)=5: must be a folder"):
        Disk(5)


def test_a_model_on_several_devices():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, device="meta")})
    with pytest.raises(ConfigError, match=r"a.weight on cpu, b.weight on meta. .*model.to\(device\)") as info:
        ActivationStore(model, "raw")
    assert info.value.devices == (torch.device("cpu"), torch.device("meta"))


@pytest.mark.parametrize("policy", ["raw @ disk", "int8", "recompute"])
def test_a_model_that_gets_its_memory_later(policy):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    store = ActivationStore(model, policy, min_bytes=0)
    model.to_empty(device="cpu").load_state_dict(nn.Sequential(nn.Linear(64, 64), nn.GELU()).state_dict())
    x = torch.randn(8, 64)
    with store:
        loss = model(x).sum()
    loss.backward()
    assert store.report().saved_bytes > 0
    (gradient,) = torch.autograd.grad(model(x).sum(), model[0].weight)
    error = (gradient - model[0].weight.grad).norm() / gradient.norm()
    assert error < 0.02 if policy == "int8" else error == 0


@pytest.mark.parametrize("policy", ["int8", "recompute(int8)"])
def test_a_step_on_the_meta_device_has_a_report(policy):
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 64))), torch.randn(8, 64)
    store = ActivationStore(model, policy.replace("recompute", "1 : recompute"), min_bytes=0)
    for _ in range(2):
        with store:
            loss = model(x).sum()
        loss.backward()
        assert store.report().saved_bytes > 0
        assert store.report().gradients is None


def test_a_disk_path_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"Disk\(path='.*file'\) cannot hold the disk tier"):
        ActivationStore(policy="raw @ disk", tiers=[Disk(path)])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write")
def test_a_disk_path_that_cannot_be_written():
    with pytest.raises(
        ConfigError, match=r"Disk\(path='/proc'\) cannot hold the disk tier.*that you may write"
    ) as info:
        ActivationStore(policy="raw @ disk", tiers=[Disk("/proc")])
    assert info.value.folder == "/proc"


def test_a_disk_path_without_permission(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match="Permission denied"):
        ActivationStore(policy="raw @ disk", tiers=[Disk(tmp_path)])


def test_a_disk_path_is_not_asked_for_where_no_rule_needs_it():
    store = ActivationStore(policy="raw @ host", tiers=[Disk("/no/such/folder")], min_bytes=0)
    x, y = step(store)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.detach().cos() * y.detach())
    assert store.report().stored_bytes == 2 * x.nbytes


def test_nothing_is_left_in_the_folder(tmp_path):
    store = ActivationStore(policy="raw @ disk", tiers=[Disk(tmp_path)], min_bytes=0)
    x, y = step(store)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.detach().cos() * y.detach())
    store.close()
    assert list(tmp_path.iterdir()) == []


# -- what it accepts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        "raw", Encode(Raw()), Rules([], default=Encode(Raw())), Rules([("*", Encode(Raw()))]),
        lambda site, spec: Encode(Raw()),
    ],
    ids=["text", "decision", "rules", "rules_for_all", "function"],
)  # fmt: skip
def test_policies_of_every_form(policy):
    store = ActivationStore(policy=policy, min_bytes=0)
    _, y = step(store)
    assert store.report().stored_bytes == 800
    assert callable(store.policy)
    del y


def test_a_function_sees_site_and_spec():
    seen = []

    def policy(site, spec):
        seen.append((str(site), spec.shape, spec.dtype))
        return Keep() if site.index else Offload(Int8(), "disk")

    model, x = small_model(), torch.randn(4, 8, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=0)
    with store:
        model(x).sum().backward()
    assert seen == [("0[0]", (4, 8), torch.float32), ("1[0]", (4, 8), torch.float32), ("2[0]", (4, 8), torch.float32)]
    assert store.report().stored_bytes > 0


def test_a_function_that_recomputes_is_told_that_it_cannot():
    store = ActivationStore(small_model(), lambda site, spec: Recompute(), min_bytes=0)
    with pytest.raises(ConfigError, match=r"[Rr]ecompute"), store:
        torch.randn(4, requires_grad=True).exp()


def test_a_function_that_decides_nothing_is_an_error():
    store = ActivationStore(policy=lambda site, spec: "int8", min_bytes=0)
    with pytest.raises(ConfigError, match="int8"), store:
        torch.randn(4, requires_grad=True).exp()


def test_an_error_of_the_policy_itself_keeps_its_type():
    def policy(site, spec):
        raise KeyError("mine")

    store = ActivationStore(policy=policy, min_bytes=0)
    with pytest.raises(KeyError, match="mine"), store:
        torch.randn(4, requires_grad=True).exp()
    with ActivationStore(policy="raw", min_bytes=0):
        torch.randn(4, requires_grad=True).exp()


# -- full tiers -------------------------------------------------------------------------------------------------------


def gradient_is_right(x, y):
    return torch.equal(torch.autograd.grad(y.sum(), x)[0], x.detach().cos() * y.detach())


@pytest.mark.parametrize(
    ("tier", "budget", "stored"),
    [
        ("host", Host(500), 400),
        ("disk", Disk(budget=4095), 0),  # not a page
        ("disk", Disk(budget=4096), 800),  # a page, which small payloads share
    ],
)
def test_what_does_not_fit_is_kept(tier, budget, stored):
    store = ActivationStore(policy=f"raw @ {tier}", min_bytes=0, tiers=[budget])
    x, y = step(store)
    report = store.report()
    assert (report.stored_bytes, report.saved_bytes) == (stored, 800)
    notes = [site.note for site in report.sites if site.note]
    assert notes == [f"kept: no room in {tier}"] * ((800 - stored) // 400)
    assert gradient_is_right(x, y)


def test_what_does_not_fit_goes_to_the_next_tier():
    store = ActivationStore(policy="raw @ host > disk", min_bytes=0, tiers=[Host(500)])
    x, y = step(store)
    tiers = {name: tier for place in store._store._places.values() for name, tier in place._open.items()}
    assert tiers["host"]._used_nbytes == 400
    assert store.report().stored_bytes == 800
    assert all(not site.note for site in store.report().sites)
    assert gradient_is_right(x, y)


@pytest.mark.parametrize("grad", [True, False], ids=["at_the_save", "when_it_settles"])
@pytest.mark.parametrize("tiers", ["host", "disk", "host > disk"])
def test_strict_makes_it_an_error(tiers, grad):
    store = ActivationStore(policy=f"raw @ {tiers}", min_bytes=0, tiers=[Host(0), Disk(budget=0)], strict=True)
    x, c, kept = torch.randn(100, requires_grad=True), torch.randn(100), []
    message = r"while saving \(top\)\[0\].*no room for 400 B in .*strict=False"
    with pytest.raises(CapacityError, match=message) as info, store:
        kept.append(x.sin() if grad else x * c)
    assert isinstance(info.value, MemoryError)
    assert info.value.nbytes == 400
    assert info.value.tiers == tuple(tiers.split(" > "))
    del info
    with store:  # and the context is as good as new
        pass
    store.close()


def test_a_budget_is_given_back_by_backward():
    store = ActivationStore(policy="raw @ host", min_bytes=0, tiers=[Host(800)], strict=True)
    for _ in range(3):
        x, y = step(store)
        assert gradient_is_right(x, y)
        del y


# -- tag --------------------------------------------------------------------------------------------------------------


class Tagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = actstore.tag(self.qkv(x), "qkv").chunk(3, -1)
        return (q * k).sin() * v


def test_a_rule_addresses_a_tag():
    model, x = nn.ModuleDict({"a": Tagged(), "b": Tagged()}), torch.randn(4, 8, requires_grad=True)
    store = ActivationStore(model, "a/qkv : raw @ disk; * : keep", min_bytes=0)
    with store:
        y = model["b"](model["a"](x))
    stored = {site.site: site.stored_bytes for site in store.report().sites if site.stored_bytes}
    assert sum(stored.values()) == 4 * 24 * 4
    assert all(name.startswith("a/qkv[") for name in stored)
    assert {site.decision for site in store.report().sites if site.stored_bytes} == {"raw @ disk"}
    found = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(found, torch.autograd.grad(model["b"](model["a"](x)).sum(), x)[0])


def test_a_tag_of_any_module_works_without_a_model():
    store, x = ActivationStore(policy="*/h : raw; * : keep", min_bytes=0), torch.randn(10, requires_grad=True)
    with store:
        h = actstore.tag(x * 1, "h")
        y = h.sin() * (x * 2).cos()
    assert {s.site: s.stored_bytes for s in store.report().sites if s.stored_bytes} == {"(top)/h[0]": 40}
    del y


def test_a_tag_does_nothing_else():
    x = torch.randn(10, requires_grad=True)
    assert actstore.tag(x, "h") is x
    with ActivationStore(policy="raw", min_bytes=0):
        assert actstore.tag(x, "h") is x


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a:b", "x@y", "f(x)", "a\n", "*"])
def test_a_tag_is_a_word(name):
    with pytest.raises(ConfigError, match="must be one word"):
        actstore.tag(torch.zeros(1), name)


# -- names ------------------------------------------------------------------------------------------------------------


def test_sites_have_the_names_of_modules_and_wrappers_do_not_count():
    model = nn.Sequential(small_model())
    model._modules["_orig_mod"] = model._modules.pop("0")
    store, x = ActivationStore(model, "raw", min_bytes=0), torch.randn(4, 8, requires_grad=True)
    with store:
        y = model(x).exp()
    assert [site.site for site in store.report().sites] == ["0[0]", "1[0]", "2[0]", "(top)[0]"]
    del y


def test_a_module_that_is_called_twice_counts_on_in_each_call_from_zero():
    layer = nn.Tanh()
    model, x = nn.ModuleDict({"a": layer}), torch.randn(4, requires_grad=True)
    store = ActivationStore(model, "raw", min_bytes=0)
    with store:
        y = layer(layer(x))
    (site,) = store.report().sites
    assert (site.site, site.tensors, site.saved_bytes) == ("a[0]", 2, 32)
    del y


def test_a_module_that_was_replaced_has_its_name_at_the_next_step():
    model, x = small_model(), torch.randn(4, 8, requires_grad=True)
    store = ActivationStore(model, "1 : raw; * : keep", min_bytes=0)
    for layer in (nn.Tanh(), nn.Sigmoid()):
        model[1] = layer
        with store:
            y = model(x)
        assert store.report().stored_bytes == 4 * 8 * 4
        del y
