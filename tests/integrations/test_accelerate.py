"""A loop of Accelerate with a store: made before `prepare` or after it, in mixed precision, with accumulation."""

import pytest
import torch
from torch.utils.data import DataLoader

import actstore
from tests.integrations.conftest import llama, quietly, same_weights, tokens

(Accelerator,) = quietly("accelerate", "Accelerator")
(AcceleratorState,) = quietly("accelerate.state", "AcceleratorState")

STEPS = 20


def train(policy=None, order="after", precision="no", model=None, checkpointing=None):
    """Train; returns the model, the losses and the last report."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = model or llama()
    if checkpointing is not None:
        model.activation_checkpointing_enable(checkpointing)
    store = actstore.ActivationStore(model, policy, min_bytes=0) if policy and order == "before" else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    prepared, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(tokens(2 * STEPS), batch_size=2))
    if store is None:
        store = actstore.ActivationStore(prepared, policy or "keep", min_bytes=0)
    losses = []
    for batch in batches:
        with accelerator.accumulate(prepared):
            with store:
                loss = prepared(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert len(losses) == STEPS
    return accelerator.unwrap_model(prepared, keep_fp32_wrapper=False), losses, store.report()


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_store_may_be_made_before_prepare_or_after_it(order, precision):
    plain, losses, kept = train(precision=precision)
    stored, those, report = train("@blocks : recompute; * : expack", order, precision)
    assert those == losses
    assert same_weights(stored, plain)
    assert report.saved_bytes == kept.saved_bytes
    assert report.held_bytes < 0.5 * report.saved_bytes
    assert report.live_bytes == 0


def test_casts_of_parameters_are_not_stored():
    """Autocast saves copies of the weights in bfloat16; they are no activations."""
    _, _, report = train("raw @ host", precision="bf16")
    assert {site.note for site in report.sites if "parameter" in site.note} == {"kept: a view or a cast of a parameter"}


def test_gradient_checkpointing_of_the_model_saves_its_inputs_through_the_store():
    options = {"use_reentrant": False}
    plain, losses, _ = train(checkpointing=options)
    stored, those, report = train("model.layers.* : expack", checkpointing=options)
    assert those == losses
    assert same_weights(stored, plain)
    inputs = [site for site in report.sites if site.site.startswith("model.layers.") and site.decision == "expack"]
    assert len(inputs) >= 3
    assert report.held_bytes < report.saved_bytes


def test_a_checkpoint_of_accelerate_has_the_state_of_the_store(tmp_path):
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    model = llama()
    store = actstore.ActivationStore(model, "int8(round=stochastic)", min_bytes=0)
    accelerator.register_for_checkpointing(store)
    batch = next(iter(DataLoader(tokens(2), batch_size=2)))

    def loss():
        with store:
            return model(**batch).loss

    def gradients():
        return torch.autograd.grad(loss(), list(model.parameters()))

    gradients()
    accelerator.save_state(tmp_path)
    second, third = gradients(), gradients()
    assert not all(map(torch.equal, second, third))
    accelerator.load_state(tmp_path)
    assert all(map(torch.equal, gradients(), second))
