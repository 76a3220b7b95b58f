"""The saved-tensor hooks of a region's runs. They drop what the first run saves, and run it again in backward.

As under PyTorch's checkpoint (`use_reentrant=False`), each backward runs the region once, and no further than to the
last tensor that it has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import ref

import torch
import torch.utils.checkpoint as torch_checkpoints
from torch import Tensor
from torch._C import _current_graph_task_id
from torch._C._autograd import (
    _get_sequence_nr,
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
)
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils.checkpoint import _StopRecomputationError

from actstore.autograd.composite import is_parameter
from actstore.autograd.storages import part_of
from actstore.base.spec import Site, describe
from actstore.base.storage import storages_of
from actstore.errors import MutationError, StateError
from actstore.recompute.checkpoints import end_left
from actstore.recompute.decision_modes import modes_paused
from actstore.recompute.divergence import RunDifference, SavedForm
from actstore.recompute.replay import RegionCall
from actstore.recompute.running import Booked, FirstRun

if TYPE_CHECKING:
    from actstore.autograd.hooks import Scope
    from actstore.recompute.decision_modes import Repeating

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _counted(tensor: Tensor) -> Sequence[torch.UntypedStorage]:
    """Return the storages of a saved tensor that count: none of a parameter, of its views, or of a fake tensor."""
    base = tensor._base
    if tensor.__class__ is Tensor and (base is None or base.__class__ is Tensor):  # the common case
        return storages_of(tensor)
    if base.__class__ is Parameter:  # as in a linear layer
        return ()
    return () if is_parameter(tensor) or isinstance(tensor, FakeTensor) else storages_of(tensor)


def eager(run: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that keeps compilers away from all that it calls. PyTorch's takes long, and imports one."""
    disabled: Callable[_P, _T] = _disable_dynamo(run)

    @wraps(run)
    def eager(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return run(*args, **kwargs) if get_eval_frame_callback() is None else disabled(*args, **kwargs)

    return eager


class SavedSlot:
    """The place of one tensor that a region has saved: each backward finds it there after a later run, and takes it.

    Attributes
    ----------
    form : its shape, dtype and device
    tensors : by backward, each with its version then; -1 where that does not matter
    """

    __slots__ = ("__weakref__", "form", "tensors")

    def __init__(self, form: SavedForm) -> None:
        self.form = form
        self.tensors: dict[object, tuple[Tensor, int]] = {}


class FirstHooks:
    """Hooks of the first run. They book what plain autograd would have saved inside the region, and run it again.

    The graph holds them with each saved tensor. So they are methods: Python's collector visits what each call leaves.
    """

    __slots__ = (
        "_buffers", "_call", "_counted", "_diverged", "_early", "_form", "_fresh", "_number", "_scope", "_sizes",
        "_slots", "inputs", "nbytes", "rerun_nbytes",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, call: RegionCall, diverged: Callable[[RegionCall, RunDifference], StateError]
    ) -> None:
        self._scope = scope
        self._call = call
        self._diverged = diverged
        self._buffers = call.state.weights.buffers
        self._counted = scope.storages.counted
        self._early = torch_checkpoints._enable_checkpoint_early_stop is not False  # PyTorch's setting for its own
        self._slots: list[ref[SavedSlot]] = []
        self._sizes: dict[int, int] = {}  # bytes by storage
        self._fresh = 0  # of these, bytes of storages that count for the first time
        self._number = 0  # of the operator that saved the last tensor,
        self._form: SavedForm | None = None  # and the form of that: slots share it
        self.inputs: Container[int] = ()  # storages of the call's inputs
        self.nbytes = 0  # bytes of all other storages
        self.rerun_nbytes = 0  # that the last later run has saved

    @property
    def packs(self) -> int:
        """Number of tensors that the run has saved."""
        return len(self._slots)

    @eager
    def run(self, begun: FirstRun | None) -> Any:
        """Run the region for the first time."""
        save = self._save
        _push_saved_tensors_default_hooks(save, self._read)
        try:
            return self._call.first_run(begun)
        except BaseException as error:
            end_left(error, save)
            raise
        finally:
            _pop_saved_tensors_default_hooks()
            if self._fresh:
                self._scope.ledger.add(self._call.account, self._fresh, 0, 0)
            if self._call.chain is not None:
                self.nbytes = sum(nbytes for key, nbytes in self._sizes.items() if key not in self.inputs)
            self._sizes, self._buffers = {}, {}

    def _save(self, tensor: Tensor) -> SavedSlot:
        call, scope = self._call, self._scope
        for storage in _counted(tensor):
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in scope.parameters:
                measured = scope.storages.savers is not None
                if measured or key not in self._counted:
                    part = part_of(tensor, nbytes) if type(tensor) is Tensor else None
                    self._fresh += scope.storages.count(key, storage, part)
                    if measured and part is None:
                        scope.storages.note_saver(key, nbytes, call.account.site.name)
                self._sizes[key] = nbytes
            if key in self._buffers:
                call.state.weights.saved(key)
        number = _get_sequence_nr()
        if number != self._number:
            self._number, call.unsettled = number, False
        if not (tensor.requires_grad or tensor._base is not None or is_parameter(tensor)):
            call.unsettled = True
        form = tensor.shape, tensor.dtype, tensor.device
        if form == self._form:
            form = self._form
        self._form = form
        slot = SavedSlot(form)
        self._slots.append(ref(slot))
        return slot

    def _read(self, slot: SavedSlot) -> Tensor:
        call, backward = self._call, _backward()
        found = slot.tensors.pop(backward, None)
        tensor, version = self._run_again(slot, backward) if found is None else found
        if version not in (-1, tensor._version):
            check_unchanged(tensor, version, call.region, call.account.site)
        return tensor

    def _run_again(self, slot: SavedSlot, backward: object) -> tuple[Tensor, int]:
        """Run the region again for a backward, which finds tensors in the slots then. Returns that of one slot."""
        call = self._call
        later = LaterHooks(self._scope, call, self._slots, backward, early=self._early)
        try:
            difference = later.run()
        except BaseException as error:
            self._drop(backward)
            _add_name(error, call.region)
            raise
        self.rerun_nbytes = later.nbytes
        if difference is not None:
            self._drop(backward)
            raise self._diverged(call, difference)
        found = slot.tensors.pop(backward)
        if type(backward) is object:  # nothing else can ask for the rest
            self._drop(backward)
        return found

    def _drop(self, backward: object) -> None:
        """Free what is left of a later run."""
        for slot in filter(None, [each() for each in self._slots]):
            slot.tensors.pop(backward, None)


class LaterHooks:
    """Hooks of one later run. They put what it saves into the slots of the first run, and end it when all are full.

    They book its peak: all that the region saved exists when it ends, beside what a region around it saved. During it,
    modules have the weights and buffers of the first run, and random generators their states before it.

    Attributes
    ----------
    nbytes : that exist when it has ended
    """

    __slots__ = (
        "_backward", "_booked", "_call", "_count", "_difference", "_early", "_has_all", "_repeating", "_scope",
        "_sizes", "_slots", "nbytes",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, call: RegionCall, slots: Sequence[ref[SavedSlot]], backward: object, *, early: bool
    ) -> None:
        self._scope = scope
        self._call = call
        self._slots = slots
        self._backward = backward
        self._early = early
        self._count = 0  # tensors that it has saved
        self._difference: RunDifference | None = None
        self._sizes: dict[int, int] = {}  # bytes by storage
        self._booked: Booked = {}  # storages that the ledger books elsewhere
        self._has_all = False  # backward needs nothing that the run has not saved yet
        self._repeating: Repeating | None = None
        self.nbytes = 0

    @eager
    def run(self) -> RunDifference | None:
        """Run the region again. Returns how it has differed from the first run."""
        call, gauge = self._call, self._scope.gauge
        measured = None if gauge is None else gauge.recomputing(call.account)
        traced = self._scope.recomputing(call.account)
        try:
            with call.state.rewound(modes_paused()):
                _push_saved_tensors_default_hooks(self._save, self._read)
                try:
                    rerun, self._booked, self._repeating = call.prepare_rerun()
                    rerun()
                finally:
                    _pop_saved_tensors_default_hooks()
        except _StopRecomputationError:  # all contexts are left
            pass
        finally:
            self._has_all = False  # what is left of its graph can be read
            del self._call, self._repeating  # otherwise that graph holds the region's inputs, and they may hold it
            if measured is not None:
                measured()
            if traced is not None:
                traced()
        around = getattr(call.unpack, "__self__", None)
        self.nbytes = sum(self._sizes.values()) + (around.rerun_nbytes if isinstance(around, FirstHooks) else 0)
        self._scope.ledger.touch_peak(call.account, self.nbytes, "recomputation")
        first = len(self._slots)
        if self._count < first or (self._count > first and call.is_over):
            return RunDifference(None, first, self._count)
        return self._difference

    def _save(self, tensor: Tensor) -> Tensor:
        """Put a saved tensor into its slot. Where backward needs nothing more, the run ends.

        Where the operator may still write to its saved tensors, as RReLU fills its noise, the run goes on to its end. A
        mode ends the run before its next operator, which may first have to move the saved tensor.
        """
        parameters, slots, repeating = self._scope.parameters, self._slots, self._repeating
        slot = slots[self._count]() if self._count < len(slots) else None
        result = None
        for storage in _counted(tensor):
            key = storage._cdata
            if key in self._booked:
                result = self._booked[key]
            elif slot is not None and key not in parameters:  # otherwise it is freed, and another has its key
                self._sizes[key] = storage.nbytes()
        if self._has_all or (repeating is not None and repeating.has_all):
            raise _StopRecomputationError
        if repeating is None or type(tensor) is not Tensor:
            alias = _alias(tensor)
        else:
            with torch._C._DisableTorchDispatch():  # the mode must not see the alias
                alias = _alias(tensor)
        if result is not None:
            result.watch(alias)
        if repeating is not None:
            repeating.saved.append(tensor)
        index, self._count = self._count, self._count + 1
        if slot is not None:
            form = tensor.shape, tensor.dtype, tensor.device
            if form != slot.form and self._difference is None:
                self._difference = RunDifference(index, slot.form, form)
            slot.tensors[self._backward] = alias, -1 if alias is tensor else alias._version
        if self._count == len(slots) and self._early:
            if self._call.unsettled:
                self._has_all = True
            elif repeating is not None:
                repeating.has_all = True
            else:
                raise _StopRecomputationError
        return alias

    def _read(self, tensor: Tensor) -> Tensor:
        """Read what the run has saved, for a backward inside of the region: that may write to it."""
        if self._has_all:
            raise _StopRecomputationError
        return tensor


def _backward() -> object:
    """Return what stands for the backward that runs on this thread: a number; another object for each read outside."""
    group = None if _group is None else _group()
    task = _current_graph_task_id()
    return group if group is not None else object() if task == -1 else task


def _add_name(error: BaseException, region: str) -> None:
    error.add_note(f"while recomputing {region}")


def _alias(tensor: Tensor) -> Tensor:
    """Return an alias, which sees later writes. A frozen parameter may get new data: itself."""
    if tensor.__class__ is not Tensor and isinstance(tensor, Parameter) and not tensor.requires_grad:
        return tensor
    return tensor.detach()


def check_unchanged(tensor: Tensor, expected: int, region: str, site: Site) -> None:
    """Check that the second run of a region has not written to a tensor after it saved that, at version `expected`.

    Raises
    ------
    MutationError : it has. Plain autograd raises an error, too
    """
    if tensor._version != expected:
        raise MutationError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{describe(tensor)}], saved inside {region}, is at version {tensor._version}; expected version "
            f"{expected} instead. Replace the in-place operation that follows in the module.",
            site=site,
            expected=expected,
            found=tensor._version,
        )


_group = getattr(torch._C, "_get_graph_exec_group", None)  # of backwards that share their later runs
