"""Weights that `parametrize.cached()` has at hand: a forward that runs again computes those that it computed before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.nn.utils import parametrize

from actstore.model.snapshot import AS_IT_IS, Snapshot

_parametrize: Any = parametrize


class CachedWeights(Snapshot):
    """The cache when this object is made. It holds the memory of the weights, and not their graph."""

    __slots__ = ("_weights",)

    def __init__(self) -> None:
        self._weights: dict[Any, Any] | None = None
        if _parametrize._cache_enabled:
            self._weights = {key: _alias(weight) for key, weight in _parametrize._cache.items()}

    def rewound(self) -> AbstractContextManager[None]:
        return AS_IT_IS if self._weights is None and not _parametrize._cache_enabled else self._placed()

    @contextmanager
    def _placed(self) -> Iterator[None]:
        now = _parametrize._cache_enabled, _parametrize._cache
        _parametrize._cache_enabled = int(self._weights is not None)
        _parametrize._cache = dict(self._weights or {})
        try:
            yield
        finally:
            _parametrize._cache_enabled, _parametrize._cache = now


def _alias(weight: Any) -> Any:
    return weight.detach().requires_grad_(weight.requires_grad) if isinstance(weight, Tensor) else weight
