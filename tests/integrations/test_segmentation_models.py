"""A network of segmentation-models in a loop of its user."""

import pytest
import torch

from actstore import ActivationStore
from tests.integrations.conftest import quietly

Unet, losses = quietly("segmentation_models_pytorch", "Unet", "losses")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of its packages


def state_after_a_step(policy):
    torch.manual_seed(0)
    model = Unet("resnet18", encoder_weights=None, classes=2)
    images, masks = torch.randn(2, 3, 64, 64), torch.randint(0, 2, (2, 64, 64))
    store = ActivationStore(model, policy, min_bytes=0)
    with store:
        loss = losses.DiceLoss("multiclass")(model(images), masks)
    loss.backward()
    report = store.report()
    return [*model.buffers(), *(p.grad for p in model.parameters())], report.held_bytes / report.saved_bytes


@pytest.mark.parametrize(("policy", "held"), [("raw @ disk", 0.6), ("@blocks : recompute", 0.4)])
def test_gradients_and_statistics_are_those_without_a_store(policy, held):
    (plain, _), (stored, share) = state_after_a_step("keep"), state_after_a_step(policy)
    assert all(map(torch.equal, plain, stored))
    assert share < held
