"""The callbacks of frameworks on two gloo ranks: when training ends, rank 0 has the figures of both."""

import logging
import os
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import pytest
import torch.distributed as dist

from tests.distributed.launch import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
]


@pytest.mark.parametrize("job", ["trainer", "lightning"])
def test_rank_0_reports_on_two_ranks(job, tmp_path):
    for module in {"trainer": ("transformers", "accelerate"), "lightning": ("lightning",)}[job]:
        if not find_spec(module):
            pytest.skip(f"needs {module}")
    name = f"{__name__}:{job}"
    outcome = launch(2, [name], tmp_path, 200)
    assert outcome.failures == {name: []}, "\n".join(*outcome.failures.values())


class Records(logging.Handler):
    """The messages that a callback logs."""

    def __init__(self, name):
        super().__init__(logging.INFO)
        self.texts = []
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def check(callback, texts):
    """Check what is logged, and the report that the callback has."""
    report, own = callback.job_report, callback.store.report()
    tables = [text for text in texts if text.startswith("activations of all ranks")]
    assert sum(text.startswith("activations in the last step:") for text in texts) == 1
    if dist.get_rank():
        assert report is None
        assert tables == []
        return
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert report.ranks[0].held_bytes == own.held_bytes
    assert report.ranks[1].saved_bytes == own.saved_bytes
    assert report.agrees
    assert tables == [f"activations of all ranks in the last step:\n{report}"]


def trainer():
    """The job of a rank that runs Transformers' Trainer."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")
    from tests.integrations.test_huggingface import ActivationStoreCallback, make_trainer

    records = Records("actstore.integrations.huggingface")
    callback = ActivationStoreCallback("recompute", min_bytes=0)
    with TemporaryDirectory() as folder:
        make_trainer(folder, [callback], max_steps=2).train()
    check(callback, records.texts)


def lightning():
    """The job of a rank that runs Lightning's Trainer."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    from tests.integrations.test_lightning import ActivationStoreCallback, Small, fit

    records = Records("actstore.integrations.lightning")
    callback = ActivationStoreCallback("recompute", min_bytes=0)
    with TemporaryDirectory() as folder:
        fit(folder, Small(), [callback], max_steps=2, strategy="ddp", devices=2)
    check(callback, records.texts)
