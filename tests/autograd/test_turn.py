"""What is held at the end of forward, wherever backward begins."""

import threading

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Window
from actstore.autograd.unpack import turns

POLICIES = ["keep", "raw", "int8", "derive", "recompute", "raw @ disk", "recompute(raw @ disk)"]


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))


def held(report):
    return report.held_bytes, {site.site: site.held_bytes for site in report.sites}


def run(policy, *, inside, min_bytes=0):
    blocks, x = model(), torch.randn(32, 64)
    store = ActivationStore(
        blocks, policy, min_bytes=min_bytes, tiers=[Window(1)]
    )  # what leaves for disk has left at once
    for _ in range(2):
        with store:
            loss = blocks(x).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    report = store.report()
    store.close()
    assert not turns
    return report


@pytest.mark.parametrize("min_bytes", [0, 2**20], ids=["large", "small"])
@pytest.mark.parametrize("policy", POLICIES)
def test_backward_inside_of_the_context_changes_no_figure(policy, min_bytes):
    inside, outside = (run(policy, inside=inside, min_bytes=min_bytes) for inside in (True, False))
    assert held(inside) == held(outside)
    assert outside.held_bytes
    assert "100.0%" in str(inside) or policy != "keep"


def test_a_backward_in_forward_is_not_its_end():
    blocks, x = model(), torch.randn(32, 64)
    store = ActivationStore(blocks, "keep", min_bytes=0)
    with store:
        inner = blocks[0](x).square().mean()
        torch.autograd.grad(inner, list(blocks[0].parameters()))
        loss = blocks(x).square().mean()
    found = store.report()
    assert found.held_bytes == found.live_bytes > 0
    loss.backward()
    with store:
        pass
    assert store.report().held_bytes == 0  # of a forward that saved nothing
    del inner


@pytest.mark.parametrize("with_model", [True, False])
def test_a_backward_on_another_thread_is_not_the_end_of_this_forward(with_model):
    """Without a model the thread might be one of autograd's, which runs backward on an accelerator."""
    blocks, x = model(), torch.randn(32, 64)
    store = ActivationStore(blocks, "keep", min_bytes=0) if with_model else ActivationStore(policy="keep", min_bytes=0)

    def other():
        own = ActivationStore(others := model(), "keep", min_bytes=0)
        with own:
            others(x).sum().backward()
        assert own.report().held_bytes == own.report().peak_held_bytes > 0

    with store:
        hidden = blocks[0](x)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert bool(turns) is with_model
        loss = blocks[1](hidden).sum()
    assert store.report().held_bytes == store.report().live_bytes > 0
    assert not turns
    del loss, hidden
