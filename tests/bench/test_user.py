"""The user's own model and step as a workload."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
import torch

from actstore.bench import workloads
from actstore.bench.peers.rows import PLAIN, Row
from actstore.bench.trainer import Trainer
from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError

SCRIPT = """
import random
import numpy
import torch
from torch import nn


def make_step():
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)))
    data = iter(torch.randn(100, 2048, 64))

    def step():
        x = next(data)
        noise = random.random() + numpy.random.rand()
        return (model(x) - x[:, :8] - 0.01 * noise).square().mean()

    return model, step


def trains():
    model, step = make_step()
    optimizer = torch.optim.Adam(model.parameters())

    def whole():
        loss = step()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.item()}

    return model, whole


def takes_the_store():
    model, step = make_step()

    def inside(store):
        with store:
            loss = step()
        loss.backward()

    return model, inside


def fails():
    raise KeyError("no data")


def fails_later():
    return make_step()[0], lambda: 1 / 0


def no_loss():
    model, _ = make_step()
    return model, lambda: model(torch.ones(3, 64)).detach()


def no_weights():
    return nn.Sequential(nn.GELU()), lambda: None
"""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "mine", None)
    monkeypatch.delitem(sys.modules, "mine")
    return tmp_path


def work(function: str) -> Workload:
    return workloads.sized(f"mine.py:{function}", steps=3, warmup=1, threads=1)


def losses(function: str, row: Row = PLAIN, steps: int = 4) -> list[float]:
    trainer = Trainer(work(function), row, None)
    trainer.start()
    found = [trainer.step()[1] for _ in range(steps)]
    trainer.close()
    return found


@pytest.mark.parametrize("function", ["make_step", "trains"])
def test_every_lossless_row_makes_the_steps_of_plain(function: str) -> None:
    plain = losses(function)
    assert plain[-1] < plain[0]
    for policy in ("raw @ disk", "recompute"):
        assert losses(function, Row(policy, "ours", policy)) == plain, policy


@pytest.mark.parametrize(
    ("function", "policy"),
    [
        pytest.param("make_step", "raw @ disk", marks=pytest.mark.slow),
        ("trains", "recompute"),
        ("takes_the_store", "raw @ disk"),
    ],
)
def test_gradients_are_those_of_plain_though_the_step_forgets_them(function: str, policy: str) -> None:
    found = Trainer(work(function), Row(policy, "ours", policy), None).check()
    assert found["bit_equal"]
    lossy = Trainer(work(function), Row("int4", "ours", "int4"), None).check()
    assert 0 < lossy["grad_error"] < 0.2


def test_what_is_saved_is_counted_until_backward_begins() -> None:
    saved = {name: Trainer(work(name), PLAIN, None).check()["saved_bytes"] for name in ("make_step", "trains")}
    assert saved["make_step"] == saved["trains"]
    assert saved["trains"] > 3 * 2048 * 64 * 4


def test_a_step_that_trains_is_left_alone() -> None:
    job = workloads.make(work("trains"))
    before = [parameter.clone() for parameter in job.model.parameters()]
    loss = job.loss()
    assert job.trains
    assert not loss.requires_grad
    after = [parameter.clone() for parameter in job.model.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    job.backward(loss)
    assert all(torch.equal(a, b) for a, b in zip(after, job.model.parameters(), strict=True))


def test_a_step_may_return_nothing_when_it_trains() -> None:
    assert math.isnan(losses("takes_the_store", steps=1)[0])


def test_blocks_are_what_the_store_takes_for_them() -> None:
    job = workloads.make(work("make_step"))
    assert job.blocks == list(job.model)
    assert not job.chain


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fails", r"mine.py:fails raised KeyError: 'no data' \(.*mine.py:\d+ in fails\)"),
        ("fails_later", r"mine.py:fails_later raised ZeroDivisionError: division by zero \(.*mine.py:\d+ in <lambda>"),
        ("no_loss", "the step computed no gradient"),
        ("no_weights", "the model is on no device: it has no parameters"),
        ("nothing", "mine.py has no function 'nothing'"),
    ],
)
def test_mistakes_are_told(function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        losses(function, steps=1)


def test_options_that_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="--width does nothing to --model mine:trains, which sets its own sizes"):
        workloads.sized("mine:trains", width=3)
    with pytest.raises(ConfigError, match=r"--dtype bfloat16 does nothing to mine:trains. Autocast in its step"):
        workloads.check(workloads.sized("mine:trains", dtype="bfloat16"))


@pytest.mark.promise
def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A user's step by its name alone; a mistake in it is one line and exit code 2."""
    pytest.importorskip("typer")
    from actstore.cli import app as cli

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["actstore", "bench", *arguments])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    assert run("mine:trains", "--steps", "1", "--warmup", "1", "--threads", "1", "--rows", "recompute") == 0
    said = capsys.readouterr().out
    assert "mine:trains" in said
    assert re.search(r"recompute .* 0 \(exact\)", said)
    assert run("mine:fails_later", "--rows", "recompute") == 2
    said = capsys.readouterr().err
    assert said.startswith("actstore: mine:fails_later raised ZeroDivisionError: division by zero (")
    assert "Traceback" not in said
