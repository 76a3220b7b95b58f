"""Synthetic activations are what their names say."""

from __future__ import annotations

import pytest
import torch

from actstore.bench import data
from actstore.errors import ConfigError

SHAPE = (512, 400)


@pytest.mark.parametrize("name", data.NAMES)
def test_the_seed_makes_the_values(name: str) -> None:
    one = data.make(name, SHAPE)
    assert one.shape == SHAPE
    assert torch.equal(one, data.make(name, SHAPE))
    assert not torch.equal(one, data.make(name, SHAPE, seed=1))
    assert one.dtype == {"indices": torch.int64, "mask": torch.bool}.get(name, torch.float32)
    assert torch.equal(data.make(name, SHAPE, torch.float16), one.to(torch.float16))


@pytest.mark.parametrize("name", data.NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 5, 7)])
def test_any_shape(name: str, shape: tuple[int, ...]) -> None:
    assert data.make(name, shape).shape == shape


def test_values() -> None:
    made = {name: data.make(name, SHAPE) for name in data.NAMES}
    assert made["gaussian"].std() == pytest.approx(1, abs=0.01)
    assert made["student_t3"].abs().max() > 4 * made["gaussian"].abs().max()
    assert made["student_t3"].median() == pytest.approx(0, abs=0.01)
    assert made["student_t3"].abs().median() == pytest.approx(0.765, abs=0.01)  # the third quartile of the distribution
    scales = made["hidden"].std(0)
    assert ((scales > 20).sum(), (scales < 2).sum()) == (4, 396)
    assert made["gelu"].min() == pytest.approx(-0.17, abs=0.001)
    assert (made["relu"] == 0).float().mean() == pytest.approx(0.5, abs=0.01)
    assert torch.allclose(made["softmax"].sum(-1), torch.ones(SHAPE[0]))
    assert made["constant"].unique().numel() == 1
    assert (made["sparse"] == 0).float().mean() == pytest.approx(0.9, abs=0.01)
    assert 0 <= made["indices"].min() < made["indices"].max() < 50_000
    assert made["mask"].float().mean() == pytest.approx(0.5, abs=0.01)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data='gausian': unknown name\. Near names: gaussian"):
        data.make("gausian", (3,))
