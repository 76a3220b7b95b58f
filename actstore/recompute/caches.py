"""Transformers' caches of keys and values, which recomputed modules run without."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.errors import StateError
from actstore.recompute.checkpoints import RegionWarnings

_INDICES = frozenset({"layer_idx", "layer_id"})  # attributes of Transformers' modules, by which they find their values


def has_cache(leaves: Iterable[Any]) -> bool:
    """Return whether a cache is among the arguments of a call."""
    return any(_is_cache(leaf.__class__) for leaf in leaves)


def without_caches(
    module: Module, name: str, region: str, args: tuple[Any, ...], kwargs: dict[str, Any], warned: RegionWarnings
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a recomputed module without empty caches, as Transformers' own checkpoints do.

    Raises
    ------
    StateError : a cache has values for the module already, or lies inside of another argument
    """
    if getattr(module, "_can_checkpoint_with_cache", False):  # Transformers' mark of modules that only read it
        return args, kwargs
    given = [value for value in (*args, *kwargs.values()) if _is_cache(value.__class__)]
    for cache in given:
        if _has_values(cache, module):
            raise StateError(
                f"{region} is given a {type(cache).__name__} that has values already: its second run would append to "
                f"that once more. Write '{name} : keep', or call the model without a cache.",
                module=name,
            )
    rest = {key: None if _is_cache(value.__class__) else value for key, value in kwargs.items()}
    if given and rest.get("use_cache"):
        rest["use_cache"] = False
    found = tuple(None if _is_cache(value.__class__) else value for value in args), rest
    if has_cache(tree_leaves(found)):
        raise StateError(
            f"{region} is given a cache inside of another argument: its second run would append to that once more. "
            "Call the model with use_cache=False.",
            module=name,
        )
    warned.tell_cache(region, type(given[0]).__name__)
    return found


def _has_values(cache: Any, module: Module) -> bool:
    """Return whether a cache has values for a module: other modules may have written to it in this forward."""
    indices = {vars(part)[name] for part in module.modules() for name in _INDICES & vars(part).keys()}
    parts = [each for each in vars(cache).values() if _is_cache(each.__class__)] or [cache]
    layers = [layer for part in parts for i, layer in enumerate(part.layers) if not indices or i in indices]
    values = [each for each in tree_leaves([vars(layer) for layer in layers]) if isinstance(each, Tensor)]
    return any(each.ndim > 1 and each.numel() for each in values)  # all but numbers, such as the size of a window


@functools.cache
def _is_cache(kind: type) -> bool:
    """Return whether it is Transformers' cache of keys and values."""
    return any((base.__module__, base.__name__) == ("transformers.cache_utils", "Cache") for base in kind.__mro__)
