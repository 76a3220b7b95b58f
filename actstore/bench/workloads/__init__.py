"""Workloads of the benchmark: models and data, by name."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from actstore.bench.workloads import gpt, llama, lstm, resnet, unet, user, vit
from actstore.bench.workloads.job import Job, Kind, fix_seed
from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError

MODELS: dict[str, Kind] = {
    kind.default.model: kind for kind in (gpt.KIND, llama.KIND, vit.KIND, resnet.KIND, lstm.KIND, llama.LORA, unet.KIND)
}
SIZES = ("layers", "width", "heads", "context", "batch", "dropout")


def kind(model: str) -> Kind:
    """Return the model of this name.

    Raises
    ------
    ConfigError : unknown name; near ones are listed
    """
    if model in MODELS:
        return MODELS[model]
    if user.is_users(model):
        return user.kind(model)
    near = get_close_matches(model, MODELS, n=3, cutoff=0.4) or list(MODELS)
    raise ConfigError(f"no model is called {model!r}. Near ones: {', '.join(near)}. Your own: my_module:make_step.")


def sized(model: str, **given: Any) -> Workload:
    """Build the workload of a model, with its own sizes where none are given (or None).

    Raises
    ------
    ConfigError : the model is unknown, or does not use a size
    """
    found = kind(model)
    given = {name: value for name, value in given.items() if value is not None}
    for name in SIZES:
        if name in given and name not in found.uses:
            uses = f"which has {', '.join(found.uses)}" if found.uses else "which sets its own sizes"
            raise ConfigError(f"--{name} does nothing to --model {model}, {uses}.")
    return replace(found.default, **given)


def check(work: Workload) -> None:
    """Raise ConfigError where the sizes do not fit the model or its data."""
    kind(work.model).check(work)


def make(work: Workload) -> Job:
    """Build the model from the seed, with its data: the same numbers on every device."""
    check(work)
    fix_seed(work.seed)
    return kind(work.model).make(work)
