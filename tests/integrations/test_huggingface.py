"""The callback for the Trainers of Transformers and TRL: exact, one line, refused where it cannot work."""

import copy
import json
import logging
import pickle
import warnings
from dataclasses import replace

import pytest
import torch

import actstore
from actstore import Window
from tests.integrations.conftest import llama, quietly, same_weights, tokens

LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments = quietly(
    "transformers", "LlamaForCausalLM", "Trainer", "TrainerCallback", "TrainingArguments"
)
ActivationStoreCallback, _load = quietly("actstore.integrations.huggingface", "ActivationStoreCallback", "_load")

pytestmark = [
    pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning"),
]

STEPS = 20


def make_trainer(folder, callbacks=(), model=None, kind=Trainer, **options):
    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 5,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    return kind(
        model or llama(),
        TrainingArguments(str(folder), **options),
        train_dataset=tokens(),
        eval_dataset=tokens(4),
        callbacks=list(callbacks),
    )


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("plain"))
    trainer.train()
    assert len(losses(trainer)) == 4
    return trainer


LOSSLESS = {
    "recompute": "recompute",
    "recompute_disk": "recompute(raw @ disk)",
    "parts": "@mlp : recompute; @attention : raw @ disk; * : expack",
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_twenty_steps_are_those_of_plain_training(name, plain, tmp_path):
    callback = ActivationStoreCallback(LOSSLESS[name], min_bytes=0, tiers=[Window("64KiB")])
    trainer = make_trainer(tmp_path, [callback])
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert same_weights(trainer.model, plain.model)
    report = callback.store.report()
    assert 0 < report.held_bytes < 0.8 * report.saved_bytes
    assert report.live_bytes == 0


def test_int8_holds_a_quarter_and_trains(plain, tmp_path):
    callback = ActivationStoreCallback("int8", min_bytes=0)
    trainer = make_trainer(tmp_path, [callback])
    trainer.train()
    assert losses(trainer) != losses(plain)
    assert losses(trainer) == pytest.approx(losses(plain), rel=0.01)
    report = callback.store.report()
    assert report.held_bytes < 0.4 * report.saved_bytes


def test_auto_plans_under_a_budget(plain, tmp_path):
    callback = ActivationStoreCallback("auto(1MiB)")
    trainer = make_trainer(tmp_path, [callback])
    trainer.train()
    assert same_weights(trainer.model, plain.model)
    assert callback.store.plan is not None
    assert callback.store.report().peak_held_bytes <= 2**20


def test_figures_join_the_rows_of_the_trainer(tmp_path):
    callback = ActivationStoreCallback("raw @ disk", min_bytes=0)
    trainer = make_trainer(tmp_path, [callback], max_steps=4, logging_steps=2)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["actstore/saved_MiB"] == callback.store.report().saved_bytes / 2**20
        assert row["actstore/disk_MiB"] > 0
        assert "actstore/stall_ms" in row
    others = [row for row in trainer.state.log_history if "loss" not in row]
    assert others
    assert not any(key.startswith("actstore/") for row in others for key in row)


def test_tensorboard_shows_the_figures(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(
        tmp_path, [ActivationStoreCallback("recompute")], max_steps=2, logging_steps=1, report_to=["tensorboard"]
    )
    trainer.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.*")}
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train/actstore/held_MiB")] == [1, 2]


def test_the_policy_and_the_report_are_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "actstore.integrations"):
        make_trainer(tmp_path, [ActivationStoreCallback("recompute")], max_steps=1).train()
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "activations of LlamaForCausalLM go by this policy: recompute"
    assert "of what plain autograd holds" in last


# -- the model and the Trainer stay what they are ---------------------------------------------------------------------


class Look(TrainerCallback):
    """Looks at the model in the middle of training, as a callback that saves it would."""

    def on_step_end(self, args, state, control, model=None, **others):
        assert "forward" not in vars(model)
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        self.copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))


def test_a_checkpoint_of_the_middle_goes_on_without_a_store(plain, tmp_path):
    look = Look()
    trainer = make_trainer(
        tmp_path, [ActivationStoreCallback("recompute"), look], max_steps=STEPS, save_strategy="steps", save_steps=10
    )
    trainer.train()
    middle = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-10")
    assert not same_weights(middle, trainer.model)
    assert same_weights(look.copied, trainer.model)
    resumed = make_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert same_weights(resumed.model, plain.model)


def test_evaluation_is_not_stored(tmp_path):
    entered = []

    class Counting(Trainer):
        def prediction_step(self, *args, **kwargs):
            before = replace(callback.store.report(), process=None)
            result = super().prediction_step(*args, **kwargs)
            entered.append(replace(callback.store.report(), process=None) == before)
            return result

    callback = ActivationStoreCallback("recompute", min_bytes=0)  # copies to a disk would end in between
    make_trainer(tmp_path, [callback], kind=Counting, max_steps=2, eval_strategy="steps", eval_steps=1).train()
    assert entered
    assert all(entered)


def test_after_training_nothing_is_left_on_the_trainer(tmp_path):
    trainer = make_trainer(tmp_path, [ActivationStoreCallback("recompute")], max_steps=1)
    before = set(vars(trainer))
    trainer.train()
    assert not {"compute_loss_context_manager", "log"} & (set(vars(trainer)) - before)


class Failing(Trainer):
    """Fails in the backward of its third step, once."""

    fails = True

    def training_step(self, *args, **kwargs):
        if self.state.global_step == 2 and self.fails:
            self.fails = False
            self.model.lm_head.weight.register_hook(fail_once())
        return super().training_step(*args, **kwargs)


def fail_once():
    failed = []

    def hook(gradient):
        if not failed:
            failed.append(True)
            raise RuntimeError("planted")

    return hook


def fail_and_start_again(folder, callbacks):
    trainer = make_trainer(folder, callbacks, kind=Failing, max_steps=3)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    trainer.model.zero_grad()
    trainer.train()
    return trainer.model


def test_a_failed_training_leaves_the_model_as_it_was_and_may_start_again(plain, tmp_path):
    callback = ActivationStoreCallback("raw @ disk", min_bytes=0)
    trainer = make_trainer(tmp_path, [callback], kind=Failing)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert not actstore.session.entries.is_active()
    assert set(vars(trainer.model)) == set(vars(plain.model))
    assert same_weights(fail_and_start_again(tmp_path, [callback]), fail_and_start_again(tmp_path, []))


# -- mixed precision, checkpointing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"bf16": True}, {"activation_checkpointing": True}], ids=["bf16", "checkpointing"])
def test_options_of_the_trainer_stay_exact(options, tmp_path):
    plain = make_trainer(tmp_path, max_steps=5, **options)
    plain.train()
    callback = ActivationStoreCallback("expack", min_bytes=0)
    stored = make_trainer(tmp_path, [callback], max_steps=5, **options)
    stored.train()
    assert same_weights(stored.model, plain.model)
    report = callback.store.report()
    assert report.held_bytes < report.saved_bytes


# -- refusals: each names the next step -------------------------------------------------------------------------------


def test_reentrant_checkpointing_is_refused(tmp_path):
    trainer = make_trainer(
        tmp_path,
        [ActivationStoreCallback("raw @ disk")],
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": True},
    )
    with pytest.raises(actstore.errors.ConfigError, match="reentrant") as info:
        trainer.train()
    for word in ('gradient_checkpointing_kwargs={"use_reentrant": False}', "activation_checkpointing_kwargs", "model"):
        assert word in str(info.value)


def test_checkpointing_that_offloads_by_itself_is_refused(tmp_path):
    trainer = make_trainer(
        tmp_path,
        [ActivationStoreCallback("raw @ disk")],
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"offload": True},
    )
    with pytest.raises(actstore.errors.ConfigError, match="Leave `offload` out"):
        trainer.train()


def test_a_second_callback_is_refused(tmp_path):
    callbacks = [ActivationStoreCallback("recompute"), ActivationStoreCallback("int8")]
    trainer = make_trainer(tmp_path, callbacks)
    with pytest.raises(
        actstore.errors.StateError, match=r"another ActivationStoreCallback already \(policy 'recompute'\)"
    ):
        trainer.train()
    trainer.remove_callback(callbacks[1])
    trainer.args.max_steps = 1
    trainer.train()  # the one that is left


def test_a_store_around_training_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, [ActivationStoreCallback("recompute")])
    with (
        actstore.ActivationStore(policy="keep"),
        pytest.raises(actstore.errors.StateError, match="Leave out that `with store:`"),
    ):
        trainer.train()


def test_other_hooks_around_the_loss_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, [ActivationStoreCallback("recompute")])
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(actstore.errors.StateError, match=r"torch\.autograd\.graph\.save_on_cpu.*Disable them"),
    ):
        trainer.train()


def test_a_wrong_policy_is_refused_before_training(tmp_path):
    with pytest.raises(actstore.errors.UnknownCodecError, match="int9"):
        ActivationStoreCallback("int9")
    trainer = make_trainer(tmp_path, [ActivationStoreCallback("model.layers.*.mpl : int8")])
    with pytest.raises(actstore.errors.PolicyError, match=r"model\.layers\.\*\.mlp"):
        trainer.train()


def test_data_parallel_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, [ActivationStoreCallback("recompute")])
    trainer.args._n_gpu = 2
    with pytest.raises(actstore.errors.ConfigError, match="torchrun --nproc-per-node 2"):
        trainer.train()


def test_a_callback_without_a_trainer_is_refused():
    with pytest.raises(actstore.errors.StateError, match="with ActivationStore"):
        ActivationStoreCallback("recompute").on_train_begin(None, None, None, model=llama())


def test_the_decoder_of_t5_has_a_cache_in_the_trainer(tmp_path):
    """The Trainer switches the model's cache off, and its decoder has a config of its own."""
    config_of, model_of = quietly("transformers", "T5Config", "T5ForConditionalGeneration")

    def train(folder, callbacks):
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
        model = model_of(config_of(**sizes, decoder_start_token_id=0))
        model.decoder.config.use_cache = bool(callbacks)
        trainer = make_trainer(tmp_path / folder, callbacks, model, max_steps=3, logging_steps=1)
        trainer.train()
        return trainer

    plain = train("plain", [])
    with pytest.warns(RuntimeWarning, match=r"decoder\.block\.0 .*EncoderDecoderCache"):
        stored = train("stored", [ActivationStoreCallback("@blocks : recompute", min_bytes=0)])
    assert losses(stored) == losses(plain)
    assert same_weights(stored.model, plain.model)


# -- checkpoints of the model's own -----------------------------------------------------------------------------------


def checkpointed_llama():
    model = llama().train()
    model.config.use_cache = False
    with warnings.catch_warnings():  # the name of both releases is deprecated in Transformers 5
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def step_of(model, store):
    rows = torch.stack([row["input_ids"] for row in tokens(4)])
    with store:
        loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    return store.report()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("@blocks : recompute", r"^model\.layers\.0 \(recompute\): the model checkpoints this module"),
        ("@mlp : recompute; @attention : int8", r"^model\.layers\.0\.mlp \(recompute\): the model runs this module in"),
    ],
)
def test_recomputation_beside_gradient_checkpointing_is_told_of_once(policy, words):
    model = checkpointed_llama()
    store = actstore.ActivationStore(model, policy, min_bytes=0)
    with pytest.warns(RuntimeWarning, match=words) as told:
        report = step_of(model, store)
    assert len(told) == 1
    assert "model.gradient_checkpointing_disable()" in str(told[0].message)
    blind = [text for text in report.advice if "saw nothing" in text]
    assert (len(blind) == 1) == policy.startswith("@mlp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_disable()
    report = step_of(model, actstore.ActivationStore(model, policy, min_bytes=0))  # and nothing is said
    assert not any("saw nothing" in text for text in report.advice)


def test_lossy_rules_inside_gradient_checkpointing_saw_nothing():
    model = checkpointed_llama()
    report = step_of(model, actstore.ActivationStore(model, "@mlp : int8; @attention : int4", min_bytes=0))
    assert report.stored_bytes == 0
    assert "saw nothing" in report.advice[0]
    assert "`model.layers.*.mlp : int8`" in report.advice[0]
    assert "`model.gradient_checkpointing_disable()`" in report.advice[0]
    report = step_of(model, actstore.ActivationStore(model, "@blocks : int8", min_bytes=0))  # sees their inputs
    assert report.stored_bytes == 0
    assert any("a checkpoint of the model's own needs all of its bits" in site.note for site in report.sites)
    report = step_of(model, actstore.ActivationStore(model, "@blocks : unprotected int8", min_bytes=0))
    assert report.stored_bytes > 0
    assert not any("saw nothing" in text for text in report.advice)


# -- checkpoints of the Trainer have the store's state ----------------------------------------------------------------

STOCHASTIC = "int8(round=stochastic)"


def test_a_resumed_training_has_the_weights_of_one_that_did_not_stop(tmp_path):
    def train(folder, steps, policy=STOCHASTIC, resume=None, **options):
        callback = ActivationStoreCallback(policy, min_bytes=0)
        trainer = make_trainer(folder, [callback], max_steps=steps, save_strategy="steps", save_steps=3, **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, callback

    whole, callback = train(tmp_path / "whole", 6)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert callback.store.state_dict()["steps"] == 12  # two micro-steps each
    assert json.loads((checkpoint / "actstore_state_0.json").read_text())["steps"] == 6
    resumed, callback = train(tmp_path / "resumed", 6, resume=str(checkpoint))
    assert callback.store.state_dict()["steps"] == 12
    assert same_weights(resumed.model, whole.model)
    with pytest.raises(
        actstore.errors.StateError, match=r"has policy='. : int8.round=stochastic.', and the store policy='. : int8'"
    ):
        train(tmp_path / "other", 6, "int8", str(checkpoint))
    (checkpoint / "actstore_state_0.json").unlink()
    fresh, callback = train(tmp_path / "fresh", 6, resume=str(checkpoint))
    assert callback.store.state_dict()["steps"] == 6
    assert not same_weights(fresh.model, whole.model)


def test_a_process_without_a_file_takes_that_of_process_0(tmp_path):
    saved, other = (actstore.ActivationStore(llama(), STOCHASTIC) for _ in range(2))
    saved._store.resume(8)
    (tmp_path / "actstore_state_0.json").write_text(json.dumps(saved.state_dict()))
    _load(other, tmp_path, 3)
    assert other.state_dict() == saved.state_dict()
