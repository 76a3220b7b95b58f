"""Results of operators inside of a recomputed region that wait in the store: later runs get them from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import _StopRecomputationError

from actstore.autograd.handles import Kept, check_version, is_exact
from actstore.base.storage import storages_of
from actstore.model.generators import Generator
from actstore.recompute.outputs import witness_of
from actstore.recompute.running import LaterRun


class ResultTensor:
    """One tensor of a result.

    Attributes
    ----------
    handle : of the hooks
    written : whether the region writes to it in place, and so needs a copy
    """

    __slots__ = ("__weakref__", "_layout", "_version", "_watched", "_witness", "handle", "written")

    def __init__(self, tensor: Tensor, handle: Any) -> None:
        self.handle = handle
        self._layout = tensor.shape, tensor.stride()
        self._witness: Tensor | None = witness_of(tensor)
        self._version = tensor._version
        self._watched: list[tuple[Tensor, int]] = []
        self.written = False

    def ended(self) -> None:
        """Note that the region has run."""
        self.written = self.written or (self._witness is not None and self._witness._version != self._version)
        self._witness = None

    def read(self, run: LaterRun) -> Tensor:
        """Return the tensor for a later run.

        Raises
        ------
        MutationError : the backward after an earlier run has written to it
        """
        for alias, version in self._watched:
            check_version(alias, version, self.handle.account.site)
        self._watched.clear()
        tensor: Tensor = run.parts.unpack(self.handle)
        if isinstance(self.handle, Kept):
            run.booked.update((storage._cdata, self) for storage in storages_of(tensor))
        shape, stride = self._layout
        if self.written or tensor.stride() != stride:
            tensor = tensor.detach().new_empty_strided(shape, stride).copy_(tensor.detach())
        if is_exact(self.handle):
            run.fixed.update(storage._cdata for storage in storages_of(tensor))
        return tensor

    def watch(self, tensor: Tensor) -> None:
        """Note an alias of its memory that a later run has saved: backward must not write to it."""
        self._watched.append((tensor, tensor._version))


class OperatorCall:
    """One call of an operator that a rule names, or of `tag`, in the first run of a region.

    Attributes
    ----------
    operator : its name
    shape : of its first tensor
    packs : how many tensors the region had saved before it
    form : of what it returned
    decisions : how many decisions of it later runs do not repeat
    states : of the generators that it has drawn from, after it
    """

    __slots__ = ("_leaves", "decisions", "form", "operator", "packs", "runs_again", "shape", "states")

    def __init__(self, operator: str, shape: tuple[int, ...], packs: int) -> None:
        self.operator = operator
        self.shape = shape
        self.packs = packs
        self.states: list[tuple[Generator, Any]] = []
        self.decisions = 0
        self.form: Any = None
        self.runs_again = True  # no rule is for this call, or its result cannot wait
        self._leaves: list[Any] | None = None

    def holds(self, tensor: ResultTensor) -> bool:
        """Return whether a tensor waits for later runs."""
        return any(leaf is tensor for leaf in self._leaves or ())

    @property
    def written(self) -> bool:
        """True if the region writes to the result in place."""
        return any(isinstance(leaf, ResultTensor) and leaf.written for leaf in self._leaves or ())

    def put(self, result: Any, store: Callable[[Tensor], ResultTensor]) -> None:
        """Store a result."""
        leaves, self.form = tree_flatten(result)
        self._leaves = [store(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.runs_again = False

    def drop(self) -> None:
        """Free what waits."""
        self._leaves = None

    def ended(self, packs: int, *, replays: bool) -> None:
        """Note that the region has run, which has saved `packs` tensors."""
        if packs == self.packs and not replays:
            self._leaves = None  # recomputations end before it
        for leaf in self._leaves or ():
            if isinstance(leaf, ResultTensor):
                leaf.ended()

    def replay(self, run: LaterRun) -> list[Any]:
        """Return the leaves of the result for a later run, and leave generators as the operator had left them."""
        if self._leaves is None:
            raise _StopRecomputationError
        for source, state in self.states:
            source.set(state)
        return [leaf.read(run) if isinstance(leaf, ResultTensor) else leaf for leaf in self._leaves]
