"""Chosen bits: against all choices there are, certificates, refusals, policies; and a store that runs them."""

from itertools import product
from math import fsum, inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from actstore import ActivationStore, Encode, Keep, SampleErrors, encode, tag
from actstore.accuracy.bits import solve as bits
from actstore.accuracy.bits.payloads import Candidate, Sensitivity, SitePayload
from actstore.accuracy.bits.solve import least_bytes, least_variance
from actstore.accuracy.bits.trials import CANDIDATES, UNBIASED, Trials
from actstore.base.spec import Site, Spec
from actstore.codecs import Int8, Raw
from actstore.errors import CapacityError, ConfigError, StateError
from actstore.policy import Rules, parse_decision

NAMES = ("int8", "int4", "int2", "fp8", "keep")
CHEAP = ("keep", "int8", "int4(group=64, round=dither)", "int2(group=64, round=dither)")
SPEC = Spec((4,), (1,), torch.float32, torch.device("cpu"))


def linear(slope):
    return Sensitivity(((1.0, slope),))


def payload(name, rows, slope=1.0, index=0, readers=()):
    table = tuple(Candidate(decision, *row) for decision, row in zip(NAMES, rows, strict=False))
    return SitePayload(Site(name, index), 8, linear(slope), table, tuple(readers))


@st.composite
def instances(draw, most=4):
    """Payloads in few modules, so that some are decided alike; all figures are whole, so that sums are exact."""
    count = draw(st.integers(1, most))
    width = draw(st.integers(1, 4))
    row = st.tuples(st.integers(0, 40), st.integers(0, 40))
    return [
        payload(
            f"m.{draw(st.integers(0, 3))}",
            draw(st.lists(row, min_size=width, max_size=width)),
            draw(st.integers(0, 5)),
            index,
            [Site(f"m.{draw(st.integers(0, 3))}", 9)] if draw(st.booleans()) else (),
        )
        for index, _ in enumerate(range(count))
    ]


def every_choice(payloads, per):
    """Bytes and variance of each choice that decides alike what must be decided alike: the oracle."""
    names = [candidate.decision for candidate in payloads[0].candidates]
    for decisions in product(names, repeat=len(payloads)):
        said = {}
        alike = True
        for one, decision in zip(payloads, decisions, strict=True):
            for site in (one.site, *one.readers):
                alike &= said.setdefault(site.name if per == "module" else site, decision) == decision
        if alike:
            rows = [
                next(c for c in one.candidates if c.decision == decision)
                for one, decision in zip(payloads, decisions, strict=True)
            ]
            noise = fsum(one.sensitivity.at(row.error) for one, row in zip(payloads, rows, strict=True))
            yield sum(row.nbytes for row in rows), noise


@settings(max_examples=120)
@given(instances(), st.integers(0, 400), st.sampled_from(["module", "site"]), st.sampled_from([0.0, 0.3]))
def test_as_good_as_all_choices_enumerated(payloads, limit, per, gap):
    every = list(every_choice(payloads, per))
    for solve, key, cost, weight in ((least_bytes, "variance", 0, 1), (least_variance, "nbytes", 1, 0)):
        fitting = [choice[cost] for choice in every if choice[weight] <= limit]
        if not fitting:
            with pytest.raises(CapacityError) as refused:
                solve(payloads, **{key: limit}, per=per)
            assert refused.value.least == pytest.approx(min(choice[weight] for choice in every))
            continue
        found = solve(payloads, **{key: limit}, per=per, gap=gap)
        figures = found.nbytes, found.variance
        assert figures[weight] <= limit
        assert found.bound <= min(fitting) * (1 + 1e-9)  # the certificate does not lie,
        assert figures[cost] - found.bound <= max(gap, 2e-6) * figures[cost]  # and says what was asked for
        assert (figures[0], pytest.approx(figures[1])) in every


@settings(max_examples=40)
@given(instances(most=12), st.data())
def test_more_room_is_never_worse(payloads, data):
    limits = sorted(data.draw(st.lists(st.integers(0, 2000), min_size=2, max_size=2)))
    found = []
    for limit in limits:
        try:
            found.append(least_variance(payloads, nbytes=limit, gap=0.0).variance)
        except CapacityError:
            found.append(inf)
    assert found[1] <= found[0] * (1 + 2e-6) or found[0] == inf


def thousand():
    rng = torch.Generator().manual_seed(0)
    sizes, slopes = torch.rand(1000, generator=rng) * 9 + 1, torch.randn(1000, generator=rng).mul(3).exp()
    widths = (torch.rand(20, generator=rng) * 15 + 1).tolist()
    return [
        SitePayload(
            Site(f"blocks.{i // 10}.m.{i % 10}", 0),
            1000,
            linear(float(slopes[i])),
            tuple(Candidate(f"c{j}", round(float(sizes[i]) * w * 100), 4.0**-w) for j, w in enumerate(widths)),
        )
        for i in range(1000)
    ]


def test_a_thousand_payloads_without_the_solver(monkeypatch):
    """What the Lagrangian price alone finds is near enough, and its bound holds for what the solver finds."""
    payloads = thousand()
    monkeypatch.setattr(bits, "find_spec", lambda name: None)
    for solve, limit in ((least_variance, {"nbytes": 3.5e6}), (least_bytes, {"variance": 100.0})):
        found = solve(payloads, **limit)
        assert 0 <= found.gap < 1e-3
        monkeypatch.setattr(bits, "find_spec", lambda name: True)
        better = solve(payloads, **limit, gap=1e-5)
        monkeypatch.setattr(bits, "find_spec", lambda name: None)
        for one, other in ((found, better), (better, found)):
            assert one.bound <= getattr(other, "nbytes" if solve is least_bytes else "variance") * (1 + 1e-9)


def test_equal_payloads_are_not_all_switched_at_once(monkeypatch):
    """At the best price all of them change together; what is left of the room must still be used."""
    monkeypatch.setattr(bits, "find_spec", lambda name: None)
    payloads = [payload(f"m.{i}", [(8, 0), (2, 3)]) for i in range(10)]
    found = least_variance(payloads, nbytes=50)
    assert (found.nbytes, found.variance) == (50, 15)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (payload("a", [(-1, 0)]), r"nbytes=-1 of a\[0\]"),
        (payload("a", [(1, float("nan"))]), r"error=nan of a\[0\]"),
        (payload("a", [(1, 1)], slope=inf), r"variance=inf of a\[0\]"),
        (payload("a", []), "share no candidate codec"),
    ],
)
def test_refuses_figures_that_are_none(broken, said):
    with pytest.raises(ConfigError, match=said):
        least_bytes([broken], variance=1)


def test_refuses_limits_that_are_none():
    with pytest.raises(ConfigError, match="nan"):
        least_variance([payload("a", [(1, 1)])], nbytes=float("nan"))
    with pytest.raises(ConfigError, match="per="):
        least_variance([payload("a", [(1, 1)])], nbytes=1, per="block")


def test_a_sensitivity_follows_its_points():
    assert linear(3.0).at(0.5) == pytest.approx(1.5)
    curve = Sensitivity(((0.01, 1.0), (0.1, 100.0)))  # as the square
    assert [curve.at(e) for e in (0.0, 0.005, 0.01, 0.05, 0.1, 0.2)] == pytest.approx([0, 0.5, 1, 25, 100, 400])
    below = Sensitivity(((0.1, 1.0), (0.01, 1.0)))  # noise of the measurement: errors never do good
    assert below.at(0.1) == pytest.approx(10.0)
    assert Sensitivity(()).at(0.3) == 0


def test_rules_say_the_same_as_the_choice():
    """Inner modules before outer ones, tags before all, `*` only where it says the same."""
    names = ["a.0.1.b", "a.0.2.b", "a.b", "a", "a.0.c", "a.1.c", "a.2.c", "a.x.0.b", "a.0.x.b", "", "a.0", "b.3"]
    wanted = ["fp8", "fp8", "int8", "int4", "int2", "int2", "fp8", "int8", "int4", "int4", "fp8", "int2"]
    sites = [Site(name, 0) for name in names] + [Site("a.0.c", 0, "qkv")]
    payloads = [
        SitePayload(site, 8, linear(1), (Candidate(decision, 1, 0.0),))
        for site, decision in zip(sites, [*wanted, "keep"], strict=True)
    ]
    found = least_bytes(payloads, variance=0)
    rules = found.policy
    assert isinstance(rules, Rules)
    assert Rules.parse(str(rules)) == rules
    for site, decision in zip(sites, [*wanted, "keep"], strict=True):
        assert rules(site, SPEC) == parse_decision(decision), site


def test_many_blocks_make_few_rules():
    blocks = [payload(f"blocks.{i}.mlp", [(4, 4), (8, 0)]) for i in range(30)]
    rules = least_bytes(blocks, variance=8).rules()  # two of them may be "int8" of NAMES, which is the smaller one here
    assert len(rules.rules) == 3
    assert Rules([("blocks.*.mlp", Encode(Int8()))], Keep()).rules[0] in least_bytes(blocks, variance=999).rules().rules


def test_sites_of_one_module_apart():
    payloads = [payload("m", [(1, 9), (8, 0)], slope=s, index=i) for i, s in enumerate((0.1, 9))]
    together = least_bytes(payloads, variance=5)
    apart = least_bytes(payloads, variance=5, per="site")
    assert (together.nbytes, apart.nbytes) == (16, 9)
    with pytest.raises(ConfigError, match="decided differently"):
        apart.rules()
    decided = [apart.policy(Site("m", index), SPEC) for index in (0, 1, 2)]
    assert decided == [parse_decision("int8"), parse_decision("int4"), Keep()]


class Model(nn.Module):
    """Linear layers in two blocks; `also` reads what the first layer of its block reads."""

    def __init__(self, tagged=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(64, 96), "also": nn.Linear(64, 96), "down": nn.Linear(96, 64)})
            for _ in range(2)
        )
        self.tagged = tagged

    def forward(self, x):
        for block in self.blocks:
            if self.tagged:
                x = tag(x, "rest")
            x = x + block["down"](torch.tanh(block["up"](x)) * block["also"](x))
        return x.square().mean()


@pytest.fixture
def measured(one_thread):
    model = Model()
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    trials = Trials(CHEAP)
    store = ActivationStore(model, trials, min_bytes=0, observe=[SampleErrors(every=200)])
    with store, trials.watching():
        loss = model(x)
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))  # nothing was lost
    return model, x, trials


def sites_of(trials):
    return [str(one.site) for one in trials.payloads({})]


def test_trials_measure_what_a_store_makes_of_it(measured):
    """Bytes of a store with each candidate, and its errors by the store's own figures."""
    model, x, trials = measured
    payloads = trials.payloads({name: linear(1.0) for name in sites_of(trials)})
    assert len(payloads) > 6
    for text in ("int4(group=64, round=dither)", "int8"):
        store = ActivationStore(model, text, min_bytes=0, observe=[SampleErrors(every=200)])
        with store:
            model(x)
        report = store.report()
        rows = {str(p.site): next(c for c in p.candidates if c.decision == text) for p in payloads}
        assert {s.site: s.stored_bytes for s in report.sites if s.stored_bytes} == {
            name: row.nbytes for name, row in rows.items()
        }
        for site in report.sites:
            if site.error is not None and site.site in rows:
                assert site.error.relative**2 == pytest.approx(rows[site.site].error, rel=0.15)


def test_readers_of_one_payload_are_decided_alike(measured):
    model, x, trials = measured
    payloads = trials.payloads({name: linear(1.0) for name in sites_of(trials)})
    shared = {p.site.name: {reader.name for reader in p.readers} for p in payloads}
    assert shared["blocks.1.up"] == {"blocks.1.also"}
    nbytes = sum(min(c.nbytes for c in p.candidates) for p in payloads) * 2
    for per in ("module", "site"):
        found = least_variance(payloads, nbytes=nbytes, per=per)
        assert len(set(found.decisions.values())) > 1
        store = ActivationStore(model, found.policy, min_bytes=0, observe=[SampleErrors(every=200)])
        with store:
            model(x)
        kept = sum(
            next(c.nbytes for c in p.candidates if c.decision == "keep")
            for p in payloads
            if found.decisions[p.site] == "keep"
        )
        assert store.report().stored_bytes == found.nbytes - kept


def test_what_was_not_predicted_loses_nothing(measured):
    _, _, trials = measured
    names = sites_of(trials)
    payloads = trials.payloads({name: linear(1.0) for name in names[1:]})
    found = least_bytes(payloads, variance=1e9, per="site")
    assert found.decisions[payloads[0].site] == "keep"
    assert found.decisions[payloads[1].site] != "keep"


def test_bias_counts_only_without_random_rounding():
    """A codec that shrinks is left out by its bias; one that rounds at random never is."""
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 3
    trials = Trials(("topk(fraction=0.25, int8)", "int8", "int4", *UNBIASED))
    trials.measure(Site("a", 0), x)
    (one,) = trials.payloads({"a[0]": linear(1)})
    kept = [candidate.decision for candidate in one.candidates]
    assert kept == ["int8", "int4", *UNBIASED]
    trials = Trials(("topk(fraction=0.25, int8)",), most_bias=1.0)
    trials.measure(Site("a", 0), x)
    (one,) = trials.payloads({"a[0]": linear(1)})
    assert one.candidates[0].bias == pytest.approx(0.7, abs=0.05)  # nearly three quarters of the values are gone
    assert one.candidates[0].error == pytest.approx(0.73, abs=0.05)


def test_chance_is_no_bias():
    """Errors that are independent of the values have a mean all the same, of the size of the error by sqrt(numel)."""
    trials = Trials(("int8",))
    trials.measure(Site("a", 0), torch.randn(4096, generator=torch.Generator().manual_seed(0)))
    (one,) = trials.payloads({"a[0]": linear(1)})
    assert one.candidates[0].bias == 0.0 < one.candidates[0].error


def test_candidates_that_cannot_be_measured():
    for wrong in ("int8 @ host", "recompute"):
        with pytest.raises(ConfigError, match=r"must be .keep. or a codec without a tier"):
            Trials((wrong,))
    with pytest.raises(ConfigError, match=r"candidate='int8': .* given once"):
        Trials(("int8", "int8"))
    with pytest.raises(StateError, match="no store is entered"):
        Trials().watching()
    for value in (float("nan"), float("inf")):
        trials = Trials(("keep", "int4"))
        trials.measure(Site("a", 0), torch.full((256,), value))
        assert [c.decision for c in trials.payloads({"a[0]": linear(1)})[0].candidates] in ([], ["keep"])
    assert len(set(CANDIDATES)) == len(CANDIDATES)


def test_dither_is_left_out_where_zeros_would_come_back_as_something_else():
    """Half of ReLU's zeros come back above 0, and let gradients through."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for values, kept in ((x.relu(), ["int4(round=stochastic)"]), (x, ["int4(round=stochastic)", "int4(round=dither)"])):
        trials = Trials(("int4(round=stochastic)", "int4(round=dither)"))
        trials.measure(Site("a", 0), values)
        (one,) = trials.payloads({"a[0]": linear(1)})
        assert [candidate.decision for candidate in one.candidates] == kept


@pytest.mark.parametrize("shape", [(1000,), (131_072,), (300_000,), (3, 5, 70_001)])
def test_a_sample_of_a_large_payload_tells_its_error(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = encode(x, "int4")
    trials = Trials(("int4", "keep"))
    trials.measure(Site("a", 0), x)
    int4, keep = trials.payloads({"a[0]": linear(1)})[0].candidates
    assert int4.nbytes == whole.nbytes
    assert keep.nbytes == x.nbytes
    assert int4.error == pytest.approx(float((whole.decode() - x).square().sum() / x.square().sum()), rel=0.02)


def test_payloads_wait_in_the_codec_that_is_wanted():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    trials = Trials(("int4",), waits=lambda site: Int8() if site.name == "1" else Raw())
    store = ActivationStore(model, trials, min_bytes=0)
    with store:
        loss = model(torch.randn(32, 64, requires_grad=True).exp()).sum()
    loss.backward()
    found = {site.site: (site.stored_bytes, site.decision) for site in store.report().sites if site.stored_bytes}
    nbytes = encode(torch.ones(32, 64), "int8").nbytes
    assert found == {"1[0]": (nbytes, "trial(int8)"), "2[0]": (32 * 64 * 4, "trial(raw)")}
