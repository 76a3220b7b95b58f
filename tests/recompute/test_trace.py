"""Recomputation in the trace of a store."""

import pytest
import torch

from actstore import ActivationStore, Trace
from tests.autograd.models import WIDTH, Mlp


@pytest.mark.parametrize("policy", ["recompute", "recompute(raw @ host)", "blocks.0 : recompute; * : raw"])
def test_each_recomputation_is_an_event_within_backward(policy):
    model = Mlp()
    store = ActivationStore(model, policy, observe=[Trace()], min_bytes=0)
    for _ in range(2):
        with store:
            loss = model(torch.randn(4, WIDTH)).sum()
        loss.backward()
    events = store.trace.events(store.trace.last_step())
    again = [event for event in events if event.kind == "recompute"]
    (backward,) = [event for event in events if event.kind == "backward"]
    (forward,) = [event for event in events if event.kind == "forward"]
    assert len(again) == (1 if ";" in policy else len(model.blocks))
    assert all("blocks" in event.site for event in again)
    assert forward.end_ns <= min(event.begin_ns for event in again)
    for event in again:
        assert backward.begin_ns <= event.begin_ns < event.end_ns <= backward.end_ns
