"""Files from strangers: truncated, with other bytes or other values, each is read, or refused in our words.

Plans and profiles have further tests of their own in `tests/plan/test_plan_file.py`.
"""

import copy
import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from actstore import ActivationStore, Auto, Trace
from actstore.errors import ActstoreError
from actstore.plan import profile as profiles
from actstore.session import state as states
from actstore.session.planning import replan
from tests.plan.profiles import MIB, profile

pytest.importorskip("typer")
RESULT = Path(__file__).parents[2] / "benchmarks/results/amd-epyc-2-cores/gpt.json"
NUMBERS = [-1, 0, 2**62, 2**63, 10**400, 1e308, float("nan"), float("inf")]
JUNK = [None, True, *NUMBERS, "", "x", "9" * 5000, [], {}, [[]], {"a": 1}]
CASES = 40  # of each kind of file; more seeds find what these do not


def places(value, path=()):
    """Where values stand in JSON."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def changed(values, rng):
    """JSON with one value replaced, removed or added."""
    values = copy.deepcopy(values)
    *path, key = rng.choice(places(values)[1:])
    holder = values
    for step in path:
        holder = holder[step]
    match rng.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.append(rng.choice(JUNK))
        case _:
            holder[key] = copy.deepcopy(rng.choice(JUNK))
    return values


def damaged(data, rng):
    """Bytes that end early, or one of which is another."""
    place = rng.randrange(len(data))
    return data[:place] if rng.random() < 0.5 else data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]


def plan():
    return replan(profile(3), Auto(300 * MIB))._ran(171.5, 299.0 * MIB)


def trace(path):
    traced, model = Trace(), nn.Sequential(nn.Linear(32, 32), nn.GELU())
    store = ActivationStore(model, "raw @ disk", observe=[traced], min_bytes=0)
    with store:
        loss = model(torch.randn(64, 32)).sum()
    loss.backward()
    traced.write(path)


def result(path):
    values = json.loads(RESULT.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | {"rows": values["rows"][:4]}))


MAKERS = {
    "plan": lambda path: plan().write(path),
    "profile": lambda path: profile(3).write(path),
    "trace": trace,
    "result": result,
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning")
def test_a_file_is_shown_or_refused_in_one_line(kind, tmp_path):
    from actstore.cli.commands import app

    rng, path = random.Random(kind), tmp_path / "file.json"
    MAKERS[kind](path)
    data, refused = path.read_bytes(), 0
    for number in range(CASES):
        if number % 3 == 0:
            path.write_bytes(damaged(data, rng))
        elif kind == "trace":
            lines = changed([json.loads(line) for line in data.splitlines()], rng)
            path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        elif kind == "result":
            path.write_text(json.dumps(changed(json.loads(data), rng)))
        else:  # with the right checksum
            values = {name: value for name, value in json.loads(data).items() if name != "checksum"}
            values = changed(values, rng)
            path.write_text(json.dumps(values | {"checksum": profiles._checksum(values)}))
        found = CliRunner().invoke(app, ["show", str(path)]).exception
        assert found is None or isinstance(found, ActstoreError), (path.read_bytes()[:500], found)
        assert "\n" not in str(found or "")
        refused += found is not None
    assert refused > 0


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, "1" * 10**5, "", "null", '{"rows": [3]}'])
def test_what_is_no_such_file_is_refused_in_one_line(text, tmp_path):
    from actstore.cli.commands import app

    path = tmp_path / "file.json"
    path.write_text(text)
    found = CliRunner().invoke(app, ["show", str(path)]).exception
    assert isinstance(found, ActstoreError)
    assert "\n" not in str(found)


def store(policy):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
    return model, ActivationStore(model, policy, min_bytes=0)


@pytest.mark.parametrize("policy", ["int8", "bits(0.1)", "auto(1GiB)"])
def test_a_state_is_loaded_or_refused(policy, one_thread):
    """With the checksum of what it has now, as a program could write it; a state that is loaded can train on."""
    model, here = store(policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(20):
        with here:
            loss = model(torch.randn(64, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    saved, rng, refused = here.state_dict(), random.Random(policy), 0
    assert saved.pop("checksum")
    for number in range(CASES):
        if saved["controller"] and number % 3:
            state = saved | {"controller": json.dumps(changed(json.loads(saved["controller"]), rng))}
        else:
            state = changed(saved, rng)
        model, other = store(policy)
        try:
            other.load_state_dict(state | {"checksum": states._checksum(state)})
        except ActstoreError:
            refused += 1
            continue
        with other:
            loss = model(torch.randn(64, 32)).square().mean()
        loss.backward()
        other.close()
    assert 0 < refused < CASES
