"""Parts of recomputed regions that do not run again: what they save waits by rules of their own.

first run    the part runs inside hooks of its own. What it saves goes to the store; but the memory of its arguments
             is the region's, which makes it once more. Its output is stored, exactly.
later runs   the part gives its output back, and leaves random generators as it had left them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr, _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.utils.checkpoint import _StopRecomputationError

from actstore.autograd import unpack as reading
from actstore.autograd.handles import Kept, Stored, is_exact
from actstore.base.checkpoints import CHECKPOINTS, innermost_pack
from actstore.base.trees import flatten
from actstore.errors import StateError
from actstore.model.generators import Generator
from actstore.model.writes import WriteHistory
from actstore.policy import Decision, Keep
from actstore.policy.decision import exactly
from actstore.recompute.attributes import Effects, PartAttributes
from actstore.recompute.checkpoints import RegionWarnings
from actstore.recompute.forwards import ForwardWrapper
from actstore.recompute.outputs import PartOutput, is_plain, own_copy
from actstore.recompute.running import FirstRun, LaterRun, OutputReads, current


class ExceptedPart(ForwardWrapper):
    """A module inside recomputed regions that does not run again with them.

    Parameters
    ----------
    decision : how tensors wait that it saves
    once : all modules of the policy that do not run again
    warned : the warnings of recomputed modules
    """

    def __init__(
        self, name: str, module: Module, decision: Decision, once: frozenset[Module], warned: RegionWarnings
    ) -> None:
        super().__init__(name, module)
        self.modules = list(module.modules())
        self.history = WriteHistory()
        self._text = f"{name} ({decision})"
        self._once = once
        self._warned = warned
        self.output_decision = exactly(decision)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = current()
        if run is None or run.parts.once is not self._once:
            return forward(*args, **kwargs)
        if (pack := innermost_pack()) is not run.hook:
            if getattr(pack, "__module__", "") in CHECKPOINTS:
                self._warned.tell_inside(self._text)
            return forward(*args, **kwargs)
        leaves, _ = flatten(args, kwargs)
        if isinstance(run, FirstRun) and run.reads is not None:
            run.reads.note(leaves)
        if isinstance(run, LaterRun):
            later: ExceptedCall = run.next(self)
            return later.replay(leaves, run)
        assert isinstance(run, FirstRun)
        call = ExceptedCall(self)
        output = call.record(leaves, run, lambda: forward(*args, **kwargs))
        given, _ = flatten(args, kwargs)
        if len(given) != len(leaves) or not all(map(is_, given, leaves)):  # a list or a dict among the arguments
            raise _writes(self)
        run.parts.calls.append(call)
        return output


class ArgumentView(NamedTuple):
    """A view of an argument, which the part has saved.

    Attributes
    ----------
    argument : the number of the argument, with its shape and strides
    view : shape, strides, and offset from the start of the argument
    """

    argument: int
    like: tuple[torch.Size, tuple[int, ...]]
    view: tuple[torch.Size, tuple[int, ...], int]

    def of(self, argument: Tensor) -> Tensor:
        """Return the view of the argument of a later run."""
        shape, stride, offset = self.view
        return argument.detach().as_strided(shape, stride, int(argument.storage_offset()) + offset)


class RegionTensor:
    """A saved tensor that the recomputation of the region makes again."""

    __slots__ = ("__weakref__", "_handle", "_unpack")

    def __init__(self, handle: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._handle = handle
        self._unpack = unpack

    def get(self) -> Tensor:
        """Return the tensor, once in each backward."""
        return self._unpack(self._handle)


class ExceptedCall:
    """One call of an excepted part in the first run of a region, and what later runs need of it.

    Attributes
    ----------
    part : the part
    effects : of the call on attributes of its modules
    """

    __slots__ = ("_output", "_packs", "_states", "_views", "_watched", "effects", "part")

    def __init__(self, part: ExceptedPart) -> None:
        self.part = part
        self.effects = Effects([], [], [])
        self._views: list[ArgumentView] = []
        self._states: list[tuple[Generator, Any]] = []
        self._output: PartOutput | None = None
        self._packs = 0
        self._watched: list[list[int]] = []  # identities of the tensors over each payload of several

    def record(self, leaves: list[Any], run: FirstRun, forward: Callable[[], Any]) -> Any:
        """Run the part.

        Raises
        ------
        StateError : it writes to an argument, or returns what cannot be stored
        """
        generators = run.parts.generators
        versions = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        before = generators.now()
        with run.paused():
            attributes = PartAttributes(self.part.modules, self.part.history)
        kept: dict[int, int] = {}
        unpack: Callable[[Any], Tensor] = run.parts.unpack
        if unpack is not reading.unpack:
            unpack = _reading(unpack)
        unseen = nullcontext() if run.reads is None else run.reads.paused()
        with saved_tensors_hooks(self._packing(leaves, run, kept), unpack), run.paused(), unseen:
            output = forward()
        self._states = generators.drawn(before)
        if any(leaf._version != version for leaf, version in versions):
            raise _writes(self.part)
        with run.paused():  # rules of the region do not see operators of copies, codecs and checksums
            self.effects = attributes.effects()
            self._output = PartOutput(self.part.name, output, leaves, self._storing(run, kept))
        if run.reads is not None:
            tensors = self._output.watched(output)
            run.reads.watch(each for group in tensors for each in group)
            self._watched = [[id(each) for each in group] for group in tensors]
        self._packs = run.count()
        return output

    def _packing(self, leaves: list[Any], run: FirstRun, kept: dict[int, int]) -> Callable[[Tensor], Any]:
        """Return the pack hook of the part, which notes in `kept` the versions of storages that are kept."""
        scope, store_pack = run.scope, run.pack
        region_pack, region_unpack = _top_saved_tensors_default_hooks(False)
        tracker, views = scope.tracker, self._views
        arguments: dict[int, tuple[int, int, torch.dtype, tuple[Any, Any], int]] = {}
        if run.parts.exact:
            for i, leaf in enumerate(leaves):
                if is_plain(leaf) and (key := leaf.untyped_storage()._cdata) not in scope.parameters:
                    like = leaf.shape, leaf.stride()
                    arguments.setdefault(key, (i, leaf._version, leaf.dtype, like, int(leaf.storage_offset())))

        def pack(tensor: Tensor) -> Any:
            if not is_plain(tensor):
                return store_pack(tensor)
            key = tensor.untyped_storage()._cdata
            found = arguments.get(key) if tracker.frame.inputs is None else None
            if found is not None and found[1] == tensor._version and found[2] is tensor.dtype:
                i, _, _, like, start = found
                handle = region_pack(tensor)
                views.append(
                    ArgumentView(i, like, (tensor.shape, tensor.stride(), int(tensor.storage_offset()) - start))
                )
                if scope.readers is not None:
                    scope.readers.wrapped.add(_get_sequence_nr() - 1)
                return RegionTensor(handle, region_unpack)
            handle = store_pack(tensor)
            if type(handle) is Kept:
                kept[key] = tensor._version
            return handle

        return pack

    def _storing(self, run: FirstRun, kept: dict[int, int]) -> Callable[[Tensor], Any]:
        """Return what stores a tensor of the output exactly, whatever is written to it later."""
        decision, tracker = self.part.output_decision, run.scope.tracker

        def pack(tensor: Tensor, decision: Decision) -> Any:
            return tracker.pack_as(run.pack, tensor, decision, note="its output, which recomputations read")

        def store(tensor: Tensor) -> Any:
            if is_plain(tensor) and kept.get(tensor.untyped_storage()._cdata) == tensor._version:
                return pack(tensor, Keep())
            if tensor.requires_grad and not isinstance(decision, Keep):
                handle = pack(tensor, decision)
                if type(handle) is Stored and is_exact(handle):
                    handle.any_version = True  # its bytes are those from before any write
                    return handle
            return pack(own_copy(tensor), decision)

        return store

    def ended(self, packs: int, *, replays: bool) -> None:
        """Note that the region has run, which has saved `packs` tensors."""
        if packs == self._packs and not replays:
            self._output = None  # recomputations end before it

    def drop_unread(self, reads: OutputReads) -> bool:
        """Drop what the region has not read of the output. Return whether the output has several payloads."""
        for number, identities in enumerate(self._watched):
            if self._output is not None and not reads.has_read(identities):
                self._output.drop(number)
        return bool(self._watched)

    def replay(self, leaves: list[Any], run: LaterRun) -> Any:
        """Return the output for a later run of the region."""
        pack = innermost_pack()
        for view in self._views:
            argument: Any = leaves[view.argument] if view.argument < len(leaves) else None
            if not is_plain(argument) or (argument.shape, argument.stride()) != view.like:
                raise run.differs(self.part.name, f"{self.part.name} is given another argument")
            pack(view.of(argument))
        if self._output is None:
            raise _StopRecomputationError
        for source, state in self._states:
            source.set(state)
        with run.paused():
            self.effects.repeat()
            return self._output.rebuild(leaves, run)


def _writes(part: ExceptedPart) -> StateError:
    return StateError(
        f"part={part.name}: a part that is excepted from a recomputation must not write to its arguments in place. "
        "Write a new tensor (inplace=False), name a module inside of it, or leave its rule out.",
        module=part.name,
    )


def _reading(unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Return an unpack hook for tensors of the region, and for all that `unpack` reads."""

    def read(handle: Any) -> Tensor:
        return handle.get() if type(handle) is RegionTensor else unpack(handle)

    return read
