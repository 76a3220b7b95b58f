"""The tensors among the arguments of a call: PyTorch's pytrees, and a fast path for the arguments of most calls."""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Form = TreeSpec | tuple[int, ...]  # the second: of each argument, how many leaves its tuple has, or 0 for a leaf

_LEAVES = frozenset({Tensor, Parameter, type(None), bool, int, float, str})


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Form]:
    """Flatten arguments into leaves, and a form with which `unflatten` puts them together again.

    Leaves and tuples of leaves take the fast path. Recurrent cells are called a thousand times, and a pytree takes ten
    times as long.
    """
    leaves: list[Any] = []
    sizes = []
    for arg in args:
        if arg.__class__ in _LEAVES:
            leaves.append(arg)
            sizes.append(0)
        elif arg.__class__ is tuple and arg and all(leaf.__class__ in _LEAVES for leaf in arg):
            leaves += arg
            sizes.append(len(arg))
        else:
            return tree_flatten((args, kwargs))
    return tree_flatten((args, kwargs)) if kwargs else (leaves, tuple(sizes))


def unflatten(leaves: list[Any], form: Form) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Build the arguments from their leaves."""
    if isinstance(form, TreeSpec):
        args, kwargs = tree_unflatten(leaves, form)
        return args, kwargs
    if not any(form):
        return tuple(leaves), {}
    rest = iter(leaves)
    return tuple(tuple(islice(rest, size)) if size else next(rest) for size in form), {}
