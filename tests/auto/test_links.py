"""Links: what is measured of both directions, and what files of profiles know of it."""

import json
import random
from dataclasses import replace
from math import inf

import pytest
import torch

from actstore import Disk
from actstore.auto.links import measure_links, share_kept
from actstore.base.ledger import Ledger
from actstore.devices import open_device
from actstore.errors import PayloadError
from actstore.plan.hardware import Hardware
from actstore.plan.profile import write_json
from actstore.plan.solver.solve import solve
from actstore.results import Profile
from actstore.store.tierset import StoreOptions, TierSet
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import equal, options
from tests.plan.chains import enumerated, random_chain, random_limits
from tests.plan.profiles import profile


def test_both_directions_are_measured_alone_and_together(tmp_path):
    place = TierSet(open_device(torch.device("cpu")), StoreOptions({"disk": Disk(tmp_path)}), Ledger(), None)
    links = measure_links(place, host=True, disk=True)
    place.close()
    assert links.on_host
    assert links.out == links.back == inf
    assert 0 < links.disk_out < inf
    assert 0 < links.disk_back < inf
    assert 0 < links.disk_both_ways <= 1
    assert links.both_ways == 1


@pytest.mark.parametrize(
    ("out", "back", "both", "share"),
    [(10, 4, 10, 1.0), (10, 4, 14, 0.5), (4, 10, 22, 0.25), (10, 10, 20, 0.5), (10, 4, 3, 1.0), (0, 4, 5, 1.0)],
)
def test_what_each_direction_keeps(out, back, both, share):
    assert share_kept(out, back, both) == share


def test_profiles_from_before_both_directions_were_measured_are_read(tmp_path):
    values = json.loads(json.dumps(profile().to_dict()))
    del values["links"]["both_ways"], values["links"]["disk_both_ways"]
    write_json(tmp_path / "profile.json", values)
    assert Profile.read(tmp_path / "profile.json") == profile()
    values["links"]["both_ways"] = "half"
    write_json(tmp_path / "profile.json", values)
    with pytest.raises(PayloadError, match=r"links\.both_ways is 'half', not a number"):
        Profile.read(tmp_path / "profile.json")


def test_a_bound_holds_where_directions_hinder_each_other():
    for seed in range(40):
        rng = random.Random(seed)
        chain = random_chain(rng, rng.randint(2, 4), 3)
        chain = replace(chain, links=replace(chain.links, both_ways=0.2, disk_both_ways=0.3))
        limits = random_limits(rng, chain)
        best = enumerated(chain, limits)
        if best < inf:
            found = solve(chain, limits, gap=0.0)
            assert found.bound <= best * (1 + 1e-6) <= found.evaluation.total * (1 + 2e-6), seed


def test_the_simulator_has_the_measured_links_hinder_each_other():
    links = replace(profile().links, out=6, back=6)
    ways = options(60, 6, 1)
    choice = ([way.decision for way in ways].index("raw @ host"),) * 4
    chain = equal(4, 1, 2, ways, Hardware(links))
    free, slowed = (
        simulate(replace(chain, links=replace(links, both_ways=part)), choice, stages=2, microbatches=4).ms
        for part in (1.0, 0.25)
    )
    assert slowed > free
