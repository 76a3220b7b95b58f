"""Tensors that are made of others: DTensor, jagged nested tensors, and all that have ``__tensor_flatten__``.

Autograd knows the wrapper: its gradient, its producer, its version. The bytes are those of its parts, and each part
waits where a tensor of its own would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from weakref import ref

from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from actstore.autograd.handles import Stored, check_version
from actstore.base.spec import Site

_is_wrapper: Callable[[Any], bool] = is_traceable_wrapper_subclass


class StoredPart(Stored):
    """A part whose bytes wait in the store. Writes to the wrapper change its version, and not that of the part."""

    __slots__ = ("saved_at",)

    def belong_to(self, outer: Tensor) -> None:
        """Be a part of `outer`, as it is now."""
        base = outer._base
        self.root = ref(outer if base is None else base)
        self.saved_at = outer._version

    def covers(self, other: Stored) -> bool:
        return isinstance(other, StoredPart) and self.saved_at == other.saved_at and super().covers(other)


class Composite:
    """A wrapper of which some parts wait in the store.

    The alias holds the parts that do not, and the wrapper's version counter; in place of the others it has empty ones.
    The handles of all parts live as long as this one, for the accounts' sake.
    """

    __slots__ = ("alias", "any_version", "form", "handles", "shape", "site", "stride", "version")

    def __init__(self, alias: Any, handles: dict[str, Any], site: Site, allow_mutation: bool) -> None:
        self.alias = alias
        self.version = alias._version
        self.shape, self.stride = alias.shape, alias.stride()
        self.form: tuple[list[str], Any] = alias.__tensor_flatten__()
        self.handles = handles
        self.site = site
        stored = self._stored()
        self.any_version = allow_mutation and len(stored) == len(handles)
        for name, handle in stored.items():
            setattr(self.alias, name, handle.witness)

    def get(self) -> Tensor:
        if self.alias._version != self.version and not self.any_version:
            check_version(self.alias, self.version, self.site)
        stored = self._stored()
        if not stored:
            return cast("Tensor", self.alias)
        names, form = self.form
        parts = {name: stored[name].get() if name in stored else getattr(self.alias, name) for name in names}
        return cast("Tensor", self.alias.__tensor_unflatten__(parts, form, self.shape, self.stride))

    def _stored(self) -> dict[str, Stored]:
        return {name: handle for name, handle in self.handles.items() if isinstance(handle, Stored)}


def parts_of(alias: Tensor) -> dict[str, Tensor] | None:
    """The parts of a detached wrapper by name; None for what is no wrapper, or one whose parts cannot be taken out of
    it or are not plain tensors.

    A part that a collective still fills is waited for, as the operator that saves the wrapper is about to do.
    """
    if not _is_wrapper(alias):
        return None
    _arrived(alias)
    names = _names(alias)
    if any(_read_only(type(alias), name) for name in names):
        return None
    parts = {name: _arrived(getattr(alias, name)) for name in names}
    return parts if all(type(part) is Tensor and not part.requires_grad for part in parts.values()) else None


def has_values(outer: Tensor, part: Tensor) -> bool:
    """Whether a part holds the values of its wrapper, and not codes or scales of them."""
    return part.dtype is outer.dtype and len(_names(outer)) == 1


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor of any class is a parameter or a view of one."""
    base = tensor._base
    if tensor.__class__ is Tensor and base is None:  # most are, and to ask whether one is a Parameter takes longer
        return False
    return isinstance(tensor, Parameter) or isinstance(base, Parameter)


def _names(wrapper: Any) -> list[str]:
    """The names of the parts that may move: of a jagged tensor the values only, its offsets are known by identity."""
    if wrapper.is_nested:
        return ["_values"]
    return [name for name in wrapper.__tensor_flatten__()[0] if isinstance(getattr(wrapper, name), Tensor)]


def _read_only(kind: type, name: str) -> bool:
    attribute = getattr(kind, name, None)
    return isinstance(attribute, property) and attribute.fset is None


def _arrived(part: Tensor) -> Tensor:
    """The tensor itself, its bytes there, where `part` is what a functional collective returns before it has ended."""
    wait: Any = getattr(part, "trigger_wait", None)
    return part if wait is None else wait()
