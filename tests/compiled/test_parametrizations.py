"""Weights that are computed from parameters: they are weights, which lossy policies keep, and not activations."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from actstore import ActivationStore
from tests.compiled.models import WIDTH, gradients
from tests.compiled.test_recomputed import PowerNet

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself
NORMS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "cayley": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),  # it has a check: a token
    "hooks": nn.utils.weight_norm,
}


@pytest.mark.parametrize("name", NORMS)
def test_weights_are_kept_and_activations_are_encoded(name: str) -> None:
    torch.manual_seed(0)
    x, model, plain = torch.randn(8, WIDTH), PowerNet(NORMS[name]), PowerNet(NORMS[name])
    plain.load_state_dict(model.state_dict())
    wanted = gradients(plain, x)
    store = ActivationStore(model, "int8", min_bytes=0)
    store.compile(backend="aot_eager")
    found = gradients(model, x, store)
    sites = {site.site: site for site in store.report().sites}
    stored = {site for site in sites if sites[site].stored_bytes}
    assert stored == {"blocks.0.1[0]", "blocks.1.0[0]", "blocks.1.1[0]"}
    assert max((found[key] - wanted[key]).norm() / wanted[key].norm() for key in wanted) < 0.02


class Scaled(nn.Module):
    """Its weight is computed from a parameter and a length of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.sin(), (self.weight / x.shape[0]).tanh())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_weight_that_depends_on_a_size(dynamic: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled()), torch.randn(8, WIDTH)
    store = ActivationStore(model, "int8", min_bytes=0)
    store.compile(backend="aot_eager", dynamic=dynamic)
    gradients(model, x, store)
    notes = [site.note for site in store.report().sites]
    assert notes.count("kept: a weight that is computed from parameters") == 1
