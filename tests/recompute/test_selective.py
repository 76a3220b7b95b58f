"""Selective checkpoints of the model's own, inside a store and inside recomputed modules."""

import functools
import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from actstore import ActivationStore
from tests.autograd.checks import check_drained, check_same, gc_off, train_step

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
RESPECT = "respect_saved_tensors_hooks"  # what a checkpoint itself keeps then goes through the store
HAS_RESPECT = RESPECT in inspect.signature(checkpoint).parameters  # newer than PyTorch 2.13
RESPECTS = pytest.param({RESPECT: True}, marks=pytest.mark.skipif(not HAS_RESPECT, reason=f"no {RESPECT}"))


class Selective(nn.Module):
    def __init__(self, kept, **options):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))
        self.kept, self.options = kept, options

    def _policy(self, _context, operator, *_args, **_kwargs):
        return self.kept if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, self._policy)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts, **self.options)


KEPT = [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE]


@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk", "inner : recompute(raw)"])
@pytest.mark.parametrize("options", [{}, RESPECTS], ids=["", "respect"])
@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name)
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context .* is active around a selective:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
def test_gradients_are_those_without_a_store(kept, options, policy):
    model, batch = Selective(kept, **options), (torch.randn(5, 16),)
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        for _ in range(2):
            check_same(train_step(model, batch, store), train_step(model, batch))
            check_drained(store)
    assert store.report().saved_bytes > 0
