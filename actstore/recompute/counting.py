"""Hooks around those of PyTorch's checkpoint, which count what each run of a region saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr, _top_saved_tensors_default_hooks
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointError, GraphExecGroup, _StopRecomputationError

from actstore.autograd.composite import is_parameter
from actstore.base.spec import Site, describe
from actstore.base.storage import storages_of
from actstore.errors import MutationError, StateError
from actstore.recompute.replay import RegionCall

if TYPE_CHECKING:
    from actstore.autograd.hooks import Scope
    from actstore.base.ledger import Account
    from actstore.recompute.repeating import Repeating


class Delegating:
    """Hooks that count what the checkpoint's own hooks pack, and call these. Each later run enters them again."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._entered: dict[int, tuple[saved_tensors_hooks, _RegionBytes]] = {}  # by thread

    def __enter__(self) -> None:
        pack, unpack = _top_saved_tensors_default_hooks(False)
        seen = self.begin()
        hooks = saved_tensors_hooks(self.packing(pack, seen), self.reading(unpack))
        hooks.__enter__()
        self._entered[get_ident()] = hooks, seen

    def __exit__(self, *exc: object) -> None:
        hooks, seen = self._entered.pop(get_ident())
        hooks.__exit__(*exc)
        self.end(seen)

    def begin(self) -> _RegionBytes:
        """Begin to count a run of the region."""
        return _RegionBytes()

    def packing(self, pack: Callable[[Tensor], Any], seen: _RegionBytes) -> Callable[[Tensor], Any]:
        """Return the pack hook of the region's saved tensors. A closure, because it runs for each of them."""
        raise AssertionError

    def reading(self, unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """Return the unpack hook of the region's saved tensors."""
        return unpack

    def end(self, seen: _RegionBytes) -> None:
        """End the count, after the region has run or stopped early."""


def _is_read_again(error: CheckpointError) -> bool:
    """Return whether a backward reads a tensor for the second time, which it has from a run that the first has used up.

    The saved output of an operator that wrote to a view is such a tensor, where its gradient is differentiated: once
    the view is gone, autograd goes through the operator by itself and through the whole that it wrote to.
    """
    return "already unpacked once" in str(error) and torch._C._get_graph_exec_group() is None


def _read_again(unpack: Callable[[Any], Tensor], packed: Any) -> Tensor:
    """Unpack a tensor from one more run of the region, which is for this tensor alone."""
    with GraphExecGroup():
        return unpack(packed)


def _counted(tensor: Tensor) -> Sequence[torch.UntypedStorage]:
    """Return the storages of a saved tensor that count: none of a parameter, of its views, or of a fake tensor."""
    base = tensor._base
    if tensor.__class__ is Tensor and (base is None or base.__class__ is Tensor):  # the common case
        return storages_of(tensor)
    if base.__class__ is Parameter:  # as in a linear layer
        return ()
    return () if is_parameter(tensor) or isinstance(tensor, FakeTensor) else storages_of(tensor)


class _RegionBytes:
    """Bytes that one run of a region has saved, by storage, and the callbacks of its end."""

    __slots__ = ("booked", "done", "fresh", "has_all", "last", "nbytes", "repeating", "traced")

    def __init__(self) -> None:
        self.nbytes: dict[int, int] = {}
        self.fresh = 0  # of these, bytes of storages that count for the first time
        self.booked = set[int]()  # storages that the ledger books elsewhere
        self.has_all = False  # backward needs nothing that the run has not saved yet
        self.repeating: Repeating | None = None
        self.last: AbstractContextManager[None] | None = None
        self.done: Callable[[], None] | None = None  # ends the gauge's measurement
        self.traced: Callable[[], None] | None = None  # ends the trace's event


class CountSaved(Delegating):
    """Hooks of the first run: they book what plain autograd would have saved inside the region."""

    def __init__(
        self, scope: Scope, call: RegionCall, diverged: Callable[[RegionCall, CheckpointError], StateError]
    ) -> None:
        super().__init__(call.account)
        self._scope = scope
        self._call = call
        self._diverged = diverged
        self._region = call.region
        self._weights = call.weights
        self.inputs = set[int]()  # storages of the call's inputs
        self.nbytes = 0  # bytes of all other storages
        self.packs = 0  # tensors that it saved
        self._number = 0  # of the operator that saved the last one

    def packing(self, pack: Callable[[Tensor], Any], seen: _RegionBytes) -> Callable[[Tensor], Any]:
        scope, weights, call = self._scope, self._weights, self._call
        parameters, counted, count = scope.parameters, scope.storages.counted, scope.storages.count
        buffers, sizes = weights.buffers, seen.nbytes

        def counting(tensor: Tensor) -> Any:
            for storage in _counted(tensor):
                key = storage._cdata
                if key not in counted and key not in parameters:
                    seen.fresh += count(key, storage)
                if key in buffers:
                    weights.saved(key)
                if key not in parameters:
                    sizes[key] = storage.nbytes()
            self.packs += 1
            number = _get_sequence_nr()
            if number != self._number:
                self._number, call.unsettled = number, False
            if not tensor.requires_grad and tensor._base is None and not is_parameter(tensor):
                call.unsettled = True
            return pack(tensor)

        return counting

    def reading(self, unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        region, call, diverged = self._region, self._call, self._diverged

        def naming(packed: Any) -> Tensor:
            try:
                tensor = unpack(packed)
            except CheckpointError as error:
                if not _is_read_again(error):
                    raise diverged(call, error) from None
                tensor = _read_again(unpack, packed)
            except Exception as error:
                error.add_note(f"while recomputing {region}")
                raise
            check_unchanged(tensor, region, call.account.site)
            return tensor

        return naming

    def end(self, seen: _RegionBytes) -> None:
        if seen.fresh:
            self._scope.ledger.add(self.account, seen.fresh, 0, 0)
        self.nbytes = sum(nbytes for key, nbytes in seen.nbytes.items() if key not in self.inputs)


class CountRecomputed(Delegating):
    """Hooks of a recomputation. They book its peak: all that the region saved exists when it ends.

    During it, modules have the weights and buffers of the first run, and random generators their states before it.
    """

    def __init__(self, scope: Scope, call: RegionCall) -> None:
        super().__init__(call.account)
        self._call = call
        self._ledger = scope.ledger
        self._parameters = scope.parameters
        self._gauge = scope.gauge
        self._recomputing = scope.recomputing

    def begin(self) -> _RegionBytes:
        seen = _RegionBytes()
        if self._gauge is not None:
            seen.done = self._gauge.recomputing(self.account)
        seen.traced = self._recomputing(self.account)
        seen.last = self._call.rewound()
        seen.last.__enter__()
        return seen

    def follow(self, booked: set[int], repeating: Repeating | None) -> None:
        """Exclude storages that are booked elsewhere from this thread's recomputation. `repeating` is its mode."""
        seen = self._entered[get_ident()][1]
        seen.booked, seen.repeating = booked, repeating

    def packing(self, pack: Callable[[Tensor], Any], seen: _RegionBytes) -> Callable[[Tensor], Any]:
        parameters, sizes, settle = self._parameters, seen.nbytes, self._settle

        def counting(tensor: Tensor) -> Any:
            for storage in _counted(tensor):
                key = storage._cdata
                if key not in parameters and key not in seen.booked:
                    sizes[key] = storage.nbytes()
            return settle(tensor, pack, seen)

        return counting

    def _settle(self, tensor: Tensor, pack: Callable[[Tensor], Any], seen: _RegionBytes) -> Any:
        """Pack a saved tensor. Where backward needs nothing more, the run ends.

        Where the operator may still write to what it has saved, as RReLU fills its noise, the run goes on to its end. A
        mode ends the run before its next operator, which may first have to move the saved tensor.
        """
        repeating = seen.repeating
        if seen.has_all or (repeating is not None and repeating.has_all):
            raise _StopRecomputationError
        if repeating is not None:
            repeating.saved.append(tensor)
        try:
            if repeating is None or type(tensor) is not Tensor:
                return pack(_dated(tensor))
            with torch._C._DisableTorchDispatch():  # the mode must not see the copy that the checkpoint keeps
                return pack(_dated(tensor))
        except _StopRecomputationError:
            if self._call.unsettled:
                seen.has_all = True
            elif repeating is not None:
                repeating.has_all = True
            else:
                raise
            return tensor.detach()

    def end(self, seen: _RegionBytes) -> None:
        try:
            if seen.last is not None:
                seen.last.__exit__(None, None, None)
        finally:
            if seen.done is not None:
                seen.done()
            if seen.traced is not None:
                seen.traced()
        self._ledger.touch_peak(self.account, sum(seen.nbytes.values()), "recomputation")


def _dated(tensor: Tensor) -> Any:
    """Return an alias that knows its version now, and sees later ones. A frozen parameter may get new data: itself."""
    if isinstance(tensor, Parameter) and not tensor.requires_grad:
        return tensor
    alias: Any = tensor.detach()
    alias.actstore_version = alias._version
    return alias


def check_unchanged(tensor: Tensor, region: str, site: Site) -> None:
    """Check that the second run of a region has not written to a tensor after it saved that.

    Raises
    ------
    MutationError : it has. Plain autograd raises an error, too
    """
    expected = getattr(tensor, "actstore_version", None)
    if expected is not None and tensor._version != expected:
        raise MutationError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{describe(tensor)}], saved inside {region}, is at version {tensor._version}; expected version "
            f"{expected} instead. Replace the in-place operation that follows in the module.",
            site=site,
            expected=expected,
            found=tensor._version,
        )
