"""Architectures of other projects, shrunk to a few thousand weights: how to build each model, and its batch."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import libraries, shrink

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TOKENS, SAMPLES, FRAMES = 32, 4000, 8
Batch = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A model of another project: the first of `models` that takes one of `batches` stands for it."""

    name: str
    library: str
    models: Callable[[], Iterable[nn.Module]]
    batches: Callable[[nn.Module], Iterable[Batch]]

    def make(self) -> tuple[nn.Module, Batch]:
        """Return a model in training mode, with weights from seed 0, and a batch of seed 0.

        Raises
        ------
        ValueError : no size and no batch lets it train
        """
        problems = []
        for model in self.models():
            for batch in self.batches(model):
                trial = copy.deepcopy(model)
                try:
                    loss = loss_of(trial, batch)
                    loss.backward()
                except Exception as error:  # each model has its own kind of error for what it does not take
                    problems.append(
                        f"{', '.join(batch)}: {type(error).__name__}: {str(error)[:100]}".replace("\n", " ")
                    )
                    continue
                grads = [each.grad for each in trial.parameters() if each.grad is not None]
                if grads and loss.isfinite() and all(each.isfinite().all() for each in grads):
                    return model, batch
                problems.append(f"{', '.join(batch)}: loss {float(loss)}, or a gradient is not finite")
        raise ValueError(problems[0] if problems else "no batch is known for the arguments of its forward")


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Run forward; return the model's own loss, or the mean square distance of what it returns to numbers of seed 0.

    The mean square alone would be constant behind a norm: its gradient is a difference of equal numbers, all error.
    """
    found: Any = model(**batch)
    loss = getattr(found, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss
    tensors = [each for each in _tensors(found) if each.is_floating_point() and each.requires_grad]
    generator = torch.Generator().manual_seed(0)
    goals = [torch.randn(each.shape, generator=generator) for each in tensors]
    return torch.stack(
        [functional.mse_loss(each.float(), goal) for each, goal in zip(tensors, goals, strict=True)]
    ).sum()


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict):
        for each in found.values():
            yield from _tensors(each)
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)


def _batches(model: Any) -> Iterator[Batch]:
    """Yield batches for the arguments of a model of Transformers."""
    known = inspect.signature(type(model).forward).parameters
    generator = torch.Generator().manual_seed(0)
    drawn = partial(torch.randn, generator=generator)
    config = model.config
    inner = [config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))]

    def sized(name: str, default: Any) -> Any:
        return next((value for each in inner if (value := getattr(each, name, None))), default)

    side = sized("image_size", shrink.IMAGE)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels, bins = sized("num_channels", 3), sized("num_mel_bins", 80)
    if not all(isinstance(each, int) for each in (height, width, channels, bins)):
        return
    ids = torch.randint(3, shrink.LAST_TOKEN - 1, (2, TOKENS), generator=generator)
    one: Batch = {
        "input_ids": ids,
        "pixel_values": drawn(2, channels, height, width),
        "pixel_values_videos": drawn(2, sized("num_frames", FRAMES), channels, height, width),
        "input_values": drawn(2, SAMPLES) * 0.1,
        "input_features": drawn(2, bins, 256),
        "bbox": torch.randint(0, 60, (2, TOKENS, 4), generator=generator).sort(-1).values,
    }
    wanted = [
        ["input_ids"], ["input_ids", "bbox"], ["pixel_values"], ["pixel_values_videos"], ["input_values"],
        ["input_features"], ["input_ids", "pixel_values"], ["input_ids", "input_features"],
    ]  # fmt: skip
    for names in wanted:
        if set(names) <= set(known):
            batch = {name: one[name] for name in names}
            if "labels" in known and "input_ids" in names:
                yield batch | {"labels": ids}
            yield batch
            if "decoder_input_ids" in known:
                yield batch | {"decoder_input_ids": ids}
    for length, size in ((256, bins), (64, bins), (64, sized("input_dim", 160)), (64, 2 * bins)):
        if "input_features" in known:
            yield {"input_features": drawn(2, length, size)}
    for length in (shrink.POSITIONS, 64, 256):
        if "input_values" in known:
            yield {"input_values": drawn(2, length, bins)}
            yield {"input_values": drawn(2, 1, length * 32)}
    if "past_values" in known:
        past = drawn(2, sized("context_length", 32) + max(sized("lags_sequence", [0])), sized("num_input_channels", 1))
        yield {"past_values": past}


def architectures() -> Iterator[Architecture]:
    """Yield all architectures of the libraries that are installed, always in the same order."""
    if find_spec("torchvision") is not None:
        libraries.import_torchvision()
    for name in shrink.classes():
        yield Architecture(name, "transformers", partial(shrink.models, name), _batches)
    for library in libraries.LIBRARIES:
        if find_spec(library.__name__) is None:
            continue
        for name, build, batch in library():
            yield Architecture(name, library.__name__, partial(_one, build), partial(_same, batch))


def _one(build: Callable[[], nn.Module]) -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield build().train()


def _same(batch: Callable[[], Batch], model: nn.Module) -> Iterator[Batch]:
    torch.manual_seed(0)
    yield batch()
