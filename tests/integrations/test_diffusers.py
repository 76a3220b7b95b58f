"""Denoisers of diffusers in a loop as in its examples: a UNet, Flux and SD3, tiny and random."""

import pytest
import torch
from torch.nn.functional import mse_loss

from actstore import ActivationStore
from tests.integrations.conftest import quietly

DDPMScheduler, Flux, SD3, UNet = quietly(
    "diffusers", "DDPMScheduler", "FluxTransformer2DModel", "SD3Transformer2DModel", "UNet2DConditionModel"
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of its packages


def unet():
    return UNet(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip


def unet_loss(model):
    x, noise, t = torch.randn(2, 4, 16, 16), torch.randn(2, 4, 16, 16), torch.randint(0, 1000, (2,))
    return mse_loss(model(DDPMScheduler().add_noise(x, noise, t), t, torch.randn(2, 8, 32)).sample, noise)


def flux():
    return Flux(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def flux_loss(model):
    found = model(
        hidden_states=torch.randn(2, 16, 4), encoder_hidden_states=torch.randn(2, 8, 32), timestep=torch.rand(2),
        pooled_projections=torch.randn(2, 32), img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(8, 3),
    )  # fmt: skip
    return found.sample.square().mean()


def sd3():
    return SD3(
        sample_size=8, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip


def sd3_loss(model):
    found = model(
        hidden_states=torch.randn(2, 4, 8, 8), encoder_hidden_states=torch.randn(2, 8, 32),
        pooled_projections=torch.randn(2, 64), timestep=torch.tensor([5, 9]),
    )  # fmt: skip
    return found.sample.square().mean()


@pytest.mark.parametrize("policy", ["@blocks : recompute", "@attention : raw @ disk; * : keep", "derive"])
@pytest.mark.parametrize(("make", "loss_of"), [(unet, unet_loss), (flux, flux_loss), (sd3, sd3_loss)])
def test_training_is_that_without_a_store(make, loss_of, policy):
    def train(policy):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        store = ActivationStore(model, policy, min_bytes=0)
        for _ in range(3):
            with store:
                loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), store.report()

    plain, _ = train("keep")
    found, report = train(policy)
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert policy != "@blocks : recompute" or report.held_bytes < 0.15 * report.saved_bytes
