"""Tensors that hold other tensors: DTensor, jagged nested tensors, and all classes with ``__tensor_flatten__``.

Autograd knows the wrapper: its gradient, its producer, its version. The bytes are those of its parts. Each part waits
where a plain tensor would.
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
    """A part whose bytes wait in the store. A write to the wrapper changes the wrapper's version, not the part's."""

    __slots__ = ("saved_at",)

    def belong_to(self, outer: Tensor) -> None:
        """Join the part to `outer` at its present version."""
        base = outer._base
        self.root = ref(outer if base is None else base)
        self.saved_at = outer._version

    def covers(self, other: Stored) -> bool:
        return isinstance(other, StoredPart) and self.saved_at == other.saved_at and super().covers(other)


class Composite:
    """A wrapper some of whose parts wait in the store.

    The alias holds the remaining parts and the wrapper's version counter, and an empty tensor for each stored part.
    The handles of all parts live as long as this object, because they hold the accounts.
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
    """Return the parts of a detached wrapper by name.

    Returns None for any other tensor, and for a wrapper with parts that are not plain tensors or cannot be replaced.

    Waits for a part that a collective still fills, as the operator that saves the wrapper is about to do.
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
    """Return whether a part holds the values of its wrapper, rather than codes or scales of them."""
    return part.dtype is outer.dtype and len(_names(outer)) == 1


def is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor of any class is a parameter or a view of one."""
    base = tensor._base
    if tensor.__class__ is Tensor and base is None:  # the common case, and faster than a test for Parameter
        return False
    return isinstance(tensor, Parameter) or isinstance(base, Parameter)


def _names(wrapper: Any) -> list[str]:
    """Return the names of the movable parts: of a jagged tensor the values; its offsets are known by identity."""
    if wrapper.is_nested:
        return ["_values"]
    return [name for name in wrapper.__tensor_flatten__()[0] if isinstance(getattr(wrapper, name), Tensor)]


def _read_only(kind: type, name: str) -> bool:
    attribute = getattr(kind, name, None)
    return isinstance(attribute, property) and attribute.fset is None


def _arrived(part: Tensor) -> Tensor:
    """Return the tensor after its bytes have arrived. A functional collective returns `part` before it has ended."""
    wait: Any = getattr(part, "trigger_wait", None)
    return part if wait is None else wait()
