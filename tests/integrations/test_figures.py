"""Figures of a report for loggers."""

import json

import pytest
import torch
from torch import nn

import actstore
from actstore.integrations.figures import figures, to_jsonl, to_tensorboard
from tests.integrations.conftest import quietly

pytestmark = pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning")


@pytest.fixture
def report():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    store = actstore.ActivationStore(model, "int8 @ disk", min_bytes=0)
    with store:
        loss = model(torch.randn(512, 64, requires_grad=True)).sum()
    loss.backward()
    return store.report()


def test_figures_have_their_units_in_their_names(report):
    found = figures(report)
    assert found["actstore/saved_MiB"] == report.saved_bytes / 2**20 == 256 * 1024 / 2**20
    assert found["actstore/peak_MiB"] == report.peak_held_bytes / 2**20
    assert found["actstore/disk_MiB"] == report.media[0].peak_bytes / 2**20 > 0
    assert found["actstore/stall_ms"] == report.stall_ms
    assert list(found)[:4] == [f"actstore/{name}_MiB" for name in ("saved", "stored", "held", "peak")]
    store = actstore.ActivationStore()
    assert len(figures(store.report())) == 4


def test_jsonl_appends_a_line(report, tmp_path):
    path = tmp_path / "log.jsonl"
    to_jsonl(path, report, 1)
    to_jsonl(path, report, 2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"step": 1, **figures(report)}, {"step": 2, **figures(report)}]


def test_tensorboard_reads_what_was_written(report, tmp_path):
    (EventAccumulator,) = quietly("tensorboard.backend.event_processing.event_accumulator", "EventAccumulator")
    (SummaryWriter,) = quietly("torch.utils.tensorboard", "SummaryWriter")
    with SummaryWriter(str(tmp_path)) as writer:
        to_tensorboard(writer, report, 7)
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Scalars("actstore/held_MiB")
    assert event.step == 7
    assert event.value == pytest.approx(report.held_bytes / 2**20)
