"""The packages that actstore uses: their versions, and the features that need them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

import torch

DISTRIBUTIONS = {  # by import name, where it differs from the distribution's name
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "kvikio": ("kvikio-cu12", "kvikio-cu13", "kvikio"),
    "sklearn": ("scikit-learn",),
}
NAMES = (
    "torch", "numpy", "numba", "cupy", "scipy", "bitsandbytes", "blosc2", "xxhash", "kvikio", "transformers",
    "accelerate", "lightning", "matplotlib", "sklearn", "rich", "typer",
)  # fmt: skip
IMPORTED = ("numba", "cupy", "scipy", "blosc2", "xxhash", "kvikio")  # importing the remaining packages takes seconds


@dataclass(frozen=True)
class Package:
    """A package, by its import name; `error` is that of its import, where `state` is broken."""

    name: str
    state: Literal["installed", "missing", "broken"]
    version: str | None = None
    error: str = ""


@dataclass(frozen=True)
class Missing:
    """A feature that this machine could have, and the command that installs it."""

    feature: str
    command: str


FEATURES = (  # with the packages and the extra; {cuda} is the major version of CUDA
    ("compiled codecs on the CPU", ("numba",), "cpu"),
    ("codecs on the GPU", ("cupy",), "cuda{cuda}"),
    ("GPU to disk directly", ("kvikio",), "gds{cuda}"),
    ("codecs zstd and lz4", ("blosc2",), "bytes"),
    ("codec bnb8", ("bitsandbytes",), "bnb"),
    ("fast checksums on disk", ("xxhash",), "disk"),
    ("proved bounds of plans", ("scipy",), "plan"),
    ("pictures, benchmark", ("matplotlib", "sklearn"), "bench"),
    ("Hugging Face Trainer", ("transformers", "accelerate"), "hf"),
    ("Lightning", ("lightning",), "lightning"),
)


def packages() -> dict[str, Package]:
    """Look for each package; import those that are quick to import."""
    return {name: _package(name) for name in NAMES}


def missing(found: Mapping[str, Package], cuda: str | None) -> list[Missing]:
    """Return the features that lack a package; those of GPUs where there is one, with the major version `cuda`."""
    return [
        Missing(feature, f"pip install 'actstore[{extra.format(cuda=cuda)}]'")
        for feature, needs, extra in FEATURES
        if any(found[name].state == "missing" for name in needs) and (cuda is not None or "{cuda}" not in extra)
    ]


def cuda_major() -> str | None:
    """Return the major version of CUDA where PyTorch sees a GPU of NVIDIA."""
    return torch.version.cuda.partition(".")[0] if torch.cuda.is_available() and torch.version.cuda else None


def _package(name: str) -> Package:
    try:
        if find_spec(name) is None:
            return Package(name, "missing")
    except (ImportError, ValueError):
        return Package(name, "missing")
    found = _version(name)
    if name in IMPORTED:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(name)
        except Exception as error:
            return Package(name, "broken", found, f"{type(error).__name__}: {error}")
    return Package(name, "installed", found)


def _version(name: str) -> str | None:
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
