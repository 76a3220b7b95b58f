"""The callback for Lightning: exact, switched on in one line, nothing left behind."""

import logging
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import actstore
from actstore import Window
from tests.integrations.conftest import quietly, same_weights

(pl,) = quietly("lightning", "pytorch")
(ActivationStoreCallback,) = quietly("actstore.integrations.lightning", "ActivationStoreCallback")

pytestmark = [
    pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),  # of workers, loggers and devices of this machine
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),  # in its loaders
]

STEPS = 20


class Small(pl.LightningModule):
    def __init__(self, manual=False, fails_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
        self.automatic_optimization = not manual
        self.fails_at = fails_at
        self.losses = []

    def training_step(self, batch, index):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        if index == self.fails_at:
            raise RuntimeError("planted")
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch, index):
        self.log("valid", self.net(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder, model, callbacks=(), ckpt_path=None, **options):
    rows = torch.randn(160, 2, 32, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(rows[:, 0], rows[:, 1]), batch_size=8)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=list(callbacks),
        **{
            "max_steps": STEPS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
    )
    trainer.fit(model, data, data, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    model = Small()
    fit(tmp_path_factory.mktemp("plain"), model)
    assert len(model.losses) == STEPS
    return model


@pytest.mark.parametrize("policy", ["recompute", "net.? : recompute(raw @ disk)", "@blocks : recompute"])
def test_twenty_steps_are_those_of_plain_training(policy, plain, tmp_path):
    callback = ActivationStoreCallback(policy, min_bytes=0, tiers=[Window("4KiB")])
    model = Small()
    trainer = fit(tmp_path, model, [callback])
    assert model.losses == plain.losses
    assert same_weights(model, plain)
    report = callback.store.report()
    assert 0 < report.held_bytes < 0.8 * report.saved_bytes
    assert report.live_bytes == 0
    assert "training_step" not in vars(trainer.strategy)


def test_manual_optimization_and_accumulation(plain, tmp_path):
    model = Small(manual=True)
    fit(tmp_path, model, [ActivationStoreCallback("recompute")])
    assert same_weights(model, plain)
    models = []
    for callbacks in ([], [ActivationStoreCallback("raw @ disk", min_bytes=0)]):
        models.append(Small())
        fit(tmp_path, models[-1], callbacks, max_steps=5, accumulate_grad_batches=2, precision="bf16-mixed")
    assert same_weights(*models)


def test_figures_and_report_go_to_the_loggers(tmp_path, caplog):
    CSVLogger, TensorBoardLogger = quietly("lightning.pytorch.loggers", "CSVLogger", "TensorBoardLogger")
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
    with caplog.at_level(logging.INFO, "actstore.integrations"):
        fit(tmp_path, Small(), [ActivationStoreCallback("recompute")], logger=loggers, log_every_n_steps=5)
    events = EventAccumulator(loggers[1].log_dir).Reload()
    assert [event.step for event in events.Scalars("actstore/held_MiB")] == [5, 10, 15, 20]
    header, *rows = (tmp_path / loggers[0].log_dir / "metrics.csv").read_text().splitlines()
    assert "actstore/saved_MiB" in header
    assert len(rows) >= 4
    assert "of what plain autograd holds" in caplog.records[-1].getMessage()


class Checking(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *others):
        assert not {"forward", "training_step"} & set(vars(pl_module))
        pickle.dumps(pl_module.net)

    def on_validation_batch_end(self, trainer, pl_module, *others):
        assert not actstore.session.entries.is_active()


def test_the_model_is_never_touched(tmp_path):
    fit(tmp_path, Small(), [ActivationStoreCallback("recompute"), Checking()], max_steps=2)


def test_a_failed_training_leaves_nothing_behind(plain, tmp_path):
    callback = ActivationStoreCallback("raw @ disk", min_bytes=0)
    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, Small(fails_at=2), [callback])
    assert not actstore.session.entries.is_active()
    assert callback.store.report().live_bytes == 0
    model = Small()
    fit(tmp_path, model, [callback])
    assert same_weights(model, plain)


class Second(ActivationStoreCallback):
    """Lightning itself refuses two callbacks of one class, unless they have keys of their own."""

    state_key = "second"


def test_refusals(tmp_path):
    with pytest.raises(actstore.errors.PolicyError, match="net"):
        fit(tmp_path, Small(), [ActivationStoreCallback("nett.* : recompute")])
    with pytest.raises(actstore.errors.UnknownCodecError):
        ActivationStoreCallback("int9")
    with pytest.raises(actstore.errors.StateError, match="another ActivationStoreCallback already"):
        fit(tmp_path, Small(), [ActivationStoreCallback("recompute"), Second("int8")])
    with torch.autograd.graph.save_on_cpu(), pytest.raises(actstore.errors.StateError, match="save_on_cpu"):
        fit(tmp_path, Small(), [ActivationStoreCallback("recompute")])
    with actstore.ActivationStore(), pytest.raises(actstore.errors.StateError, match="Leave out"):
        fit(tmp_path, Small(), [ActivationStoreCallback("recompute")])


# -- checkpoints of the Trainer have the store's state ----------------------------------------------------------------


def test_a_resumed_training_has_the_weights_of_one_that_did_not_stop(tmp_path):
    models, callbacks = [Small() for _ in range(4)], []

    def train(model, epochs, policy="int8(round=stochastic)", **options):
        callbacks.append(ActivationStoreCallback(policy, min_bytes=0))
        options |= {"max_epochs": epochs, "max_steps": -1, "limit_train_batches": 4, "limit_val_batches": 0}
        return fit(tmp_path, model, callbacks[-1:], **options)

    whole, half, resumed, other = models
    train(whole, 2)
    train(half, 1).save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    train(resumed, 2, ckpt_path=tmp_path / "half.ckpt")
    assert [callback.store.state_dict()["steps"] for callback in callbacks] == [8, 4, 8]
    assert same_weights(resumed, whole)
    assert not same_weights(half, whole)
    with pytest.raises(actstore.errors.StateError, match=r"and the store policy='. : int8'"):
        train(other, 2, "int8", ckpt_path=tmp_path / "half.ckpt")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_fabric(order, precision):
    (Fabric,) = quietly("lightning.fabric", "Fabric")

    def train(policy):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
        fabric = Fabric(accelerator="cpu", precision=precision)
        store = actstore.ActivationStore(model, policy, min_bytes=0)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        if order == "after":
            store = actstore.ActivationStore(model, policy, min_bytes=0)
        for _ in range(4):
            with store:
                loss = model(torch.randn(8, 32)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return model, store.report()

    plain, _ = train("keep")
    model, report = train("@blocks : recompute")
    assert same_weights(model, plain)
    assert report.held_bytes < 0.6 * report.saved_bytes
    assert any(site.site.startswith("3") for site in report.sites), "names are those of the model inside"
