"""The user's own model and step: ``my_module:make_step``."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from actstore.bench.workloads.job import Job, Kind
from actstore.bench.workloads.workload import Workload
from actstore.errors import ActstoreError, ConfigError
from actstore.model.blocks import repeated_blocks
from actstore.rerun.step import leaves_of, loss_of, takes_store


class UserJob(Job):
    """Job of the user's own step. Where the step runs no backward, the job adds backward and AdamW."""

    def __init__(self, work: Workload) -> None:
        with told(work.model):
            from actstore.rerun.target import load

            target = load(work.model)
        devices = {parameter.device.type for parameter in target.model.parameters()}
        if devices != {work.device_type}:
            found = " and ".join(sorted(devices)) or "no device: it has no parameters"
            raise ConfigError(f"{work.model}: the model is on {found}. Give --device, and build it there.")
        blocks = [target.model.get_submodule(name) for name in repeated_blocks(target.model)]
        super().__init__(work, target.model, blocks, lambda step: (), chain=False)
        self._step: Callable[[], Any] = target.step
        if takes_store(target.step):
            self._step = lambda: target.step(nullcontext())
        self._known = False

    def loss(self, *batch: Tensor) -> Tensor:
        """Return the loss of the step; NaN where the step ran backward by itself and returned no number.

        Raises
        ------
        ConfigError : the step raised an error, or it ran no backward and returned no loss
        """
        with told(self.work.model), self._look_for_backward():
            self.calls += 1
            returned = self._step()
        outputs = dict(leaves_of(returned))
        if not self.trains:
            return loss_of(outputs)
        numbers = [value for value in outputs.values() if not isinstance(value, Tensor) or value.numel() == 1]
        return torch.as_tensor(numbers[0] if numbers else math.nan).detach()

    def backward(self, loss: Tensor, scale: float | None = None) -> None:
        if not self.trains:
            super().backward(loss, scale)

    @contextmanager
    def _look_for_backward(self) -> Iterator[None]:
        """Find out in the first step whether it runs backward by itself."""
        if self._known:
            yield
            return
        arrived: list[Tensor] = []
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        hooks = [parameter.register_post_accumulate_grad_hook(arrived.append) for parameter in learning]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.trains, self._known = bool(arrived), True


@contextmanager
def told(target: str) -> Iterator[None]:
    """Turn an error of the user's code into a ConfigError with the place; errors of actstore pass through."""
    try:
        yield
    except (ActstoreError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{target} raised {type(error).__name__}: {error} ({place.filename}:{place.lineno} in {place.name})."
        ) from error


def is_users(model: str) -> bool:
    """Return whether the name of a model stands for a function of the user."""
    return ":" in model or model.endswith(".py")


def kind(model: str) -> Kind:
    """Return the user's model as a model of the benchmark."""
    return Kind(
        title=model,
        default=Workload(model, layers=1, width=1, heads=1, context=1, batch=1),
        uses=(),
        make=UserJob,
        check=_check,
    )


def _check(work: Workload) -> None:
    if work.dtype != "float32":
        raise ConfigError(f"--dtype {work.dtype} does nothing to {work.model}. Autocast in its step.")
