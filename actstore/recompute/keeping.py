"""Dispatch modes that see each operator of a region, so that those that a rule names do not run again.

In the first run a mode stores what they return. In each later run another mode returns it in the same order. A rule for
a tag is one for the operator that made the tagged tensor. Where that must run again, `tag` returns the stored tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError

from actstore.autograd.handles import Kept, Stored, check_version, is_exact
from actstore.autograd.tracker import Frame
from actstore.base.checkpoints import innermost_pack
from actstore.base.compiler import is_traced
from actstore.base.redispatch import OperatorMode, redispatch
from actstore.base.storage import storages_of
from actstore.base.trees import flatten
from actstore.model.generators import Generator
from actstore.policy import Encode, Keep, Offload
from actstore.recompute import collectives
from actstore.recompute.collectives import (
    Arrival,
    Arrivals,
    call_shape,
    comes_later,
    is_in_batch,
    writes_results,
)
from actstore.recompute.decision_modes import Repeating
from actstore.recompute.decisions import shape_text
from actstore.recompute.inner_rules import draws, is_collective, name_of, written_by
from actstore.recompute.outputs import has_own_memory, is_plain, own_copy, witness_of
from actstore.recompute.running import FirstRun, LaterRun, RegionRun, current


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


Forward = Callable[..., Any]
_MAX_RECENT = 8  # operators, among which `tag` finds the one that made a tensor


class ResultMode(OperatorMode):
    """Mode that sees each operator of a run. Under it, compiled parts run uncompiled: kernels would hide operators."""

    def __init__(self, run: RegionRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert run.parts.inner is not None
        self._rules = run.parts.inner
        self._calls: list[Any] = run.parts.results
        self._around = run
        self._keys: Any = None  # those of the dispatcher around the run, included and excluded

    def __enter__(self) -> Any:
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self._around.tag = self.tag
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._around.tag = None  # otherwise a cycle

    @abstractmethod
    def tag(self, tensor: Tensor, name: str) -> Tensor:
        """Return a tensor that the region names, or what takes its place."""

    def _may_keep(self, operator: Any) -> bool:
        """Return whether a rule may be for results of an operator that runs now."""
        around = self._around
        if not self._rules.may_keep(operator) or current() is not around or innermost_pack() is not around.hook:
            return False
        again = is_in_batch(operator) or (is_collective(operator) and collectives.moves_weights(__name__))
        return not (again or is_traced())

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Run code as outside of all operators, and unseen by the mode of decisions."""
        with torch._C._ForceDispatchKeyGuard(*self._keys), self._around.paused():
            yield


class MadeResult(NamedTuple):
    """Result of an operator, and how it is to wait."""

    call: OperatorCall
    result: Any
    frame: Frame
    decision: Keep | Encode | Offload


class RecentResult:
    """Result of one of the last operators, without the memory of its first tensor."""

    __slots__ = ("_first", "_form", "_layout", "_rest", "call", "frame", "storage")

    def __init__(self, call: OperatorCall, result: Any, frame: Frame) -> None:
        self.call = call
        self.frame = frame
        self._rest, self._form = tree_flatten(result)
        first = self._rest[0]
        self._rest[0] = None
        self._first = ref(first)
        self._layout = first.shape, first.stride(), int(first.storage_offset())
        self.storage = StorageWeakRef(first.untyped_storage())

    @staticmethod
    def fits(result: Any) -> bool:
        """Return whether the tensors after the first one take no more memory than that."""
        leaves = tree_flatten(result)[0]
        if not leaves or not is_plain(leaves[0]):
            return False
        return sum(leaf.nbytes for leaf in leaves[1:] if isinstance(leaf, Tensor)) <= int(leaves[0].nbytes)

    def made(self, tagged: Tensor, decision: Keep | Encode | Offload) -> MadeResult | None:
        """Return the result again, of whose first tensor `tagged` is a view; None where that is not possible."""
        first = self._first()
        if first is None:  # an operator such as `_unsafe_view` has made another tensor of its memory
            shape, stride, offset = self._layout
            first = tagged if tagged._base is None else tagged._base
            if first.numel() != shape.numel() or not (first.is_contiguous() and first.storage_offset() == offset):
                return None
            if not torch.empty_strided(shape, stride, device="meta").is_contiguous():
                return None
            first = first.view(shape)
        return MadeResult(self.call, tree_unflatten([first, *self._rest[1:]], self._form), self.frame, decision)


class Alias(NamedTuple):
    """A result that waits in the memory of the tensor itself."""

    tensor: ResultTensor
    made: MadeResult


class Keeping(ResultMode):
    """Mode of a first run, which stores the results of operators by their rules."""

    def __init__(self, run: FirstRun) -> None:
        super().__init__(run)
        self._run = run
        self._made: MadeResult | None = None  # of the last operator; autograd knows it when the next one begins
        self._arrivals = Arrivals()
        self._recent: deque[RecentResult] = deque(maxlen=_MAX_RECENT)
        self._aliases: dict[int, list[Alias]] = {}  # by the storage under them
        self._stored: dict[int, list[ref[ResultTensor]]] = {}  # all that wait, by the storage of the result

    def call(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._made is not None:
            self._settle()
        if self._arrivals.are_open:
            with self._outside():
                self._arrivals.read(operator, args, kwargs)
        if self._stored or self._recent:
            self._write(list(written_by(operator, args, kwargs)))
        if not self._may_keep(operator):
            return redispatch(operator, args, kwargs)
        frame = self._run.scope.tracker.frame
        call = OperatorCall(name_of(operator), call_shape(operator, args), self._run.count())
        self._calls.append(call)
        decision = self._rules.decide(frame.place.name, operator=call.operator)
        if decision is None and not self._rules.tags:
            return redispatch(operator, args, kwargs)
        result = self._run_once(operator, args, kwargs, call, decides=decision is None)
        later = decision is not None and comes_later(operator, args, kwargs)
        if is_collective(operator):
            if decision is not None and not later:
                collectives.wait(result)
            if writes_results(operator):
                to = list(written_by(operator, args, kwargs))
                store = partial(self._keep_written, to, call, frame, decision)
                self._arrivals.begin(Arrival(operator, frame.place.name, to, result, store)) if later else store()
                return result
        if not has_own_memory(result, args, kwargs):
            return result
        if decision is not None:
            made = MadeResult(call, result, frame, decision)
            if later:
                store = partial(self._settle, made)
                self._arrivals.begin(Arrival(operator, frame.place.name, tree_leaves(result), result, store))
            else:
                self._made = made
        if self._rules.tags and RecentResult.fits(result):
            self._recent.append(RecentResult(call, result, frame))
        return result

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        """Store a tensor by the rule of its tag, as the result of the operator that made it where that is known."""
        if innermost_pack() is not self._run.hook:
            return tensor
        if self._made is not None:
            self._settle()
        self._arrivals.read(None, (tensor,), {})
        call = OperatorCall(f"tag {name}", tuple(tensor.shape), self._run.count())
        self._calls.append(call)
        if not is_plain(tensor):
            return tensor
        frame, key = self._run.scope.tracker.frame, tensor.untyped_storage()._cdata
        recent = next((recent for recent in reversed(self._recent) if recent.storage.cdata == key), None)
        operator = "" if recent is None else recent.call.operator
        decision = self._rules.decide(frame.place.name, name, operator)
        waits = recent and self._rules.decide(recent.frame.place.name, operator=operator)  # its own rule, if any
        if decision is None or decision == waits:
            return tensor
        made = None if recent is None else recent.made(tensor, decision)
        if made is not None:  # a payload by the operator's own rule would serve this one, too
            made.call.drop()
            self._aliases.pop(key, None)
        self._made = made or MadeResult(call, tensor, frame, decision)
        self._settle()
        return tensor

    def finish(self, output: Any) -> None:
        """End the run, whose region may change its output afterwards."""
        if self._made is not None:
            self._settle()
        with self._outside():
            self._arrivals.finish()
        packs = self._run.count()
        for call in self._calls:
            call.ended(packs, replays=self._run.replays)
        leaves, _ = flatten((output,), {})
        self._leave_alone(leaf for leaf in leaves if isinstance(leaf, Tensor))
        self._aliases.clear()
        self._stored.clear()

    def _run_once(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], call: OperatorCall, *, decides: bool
    ) -> Any:
        """Run an operator, and note what later runs need. Where it `decides`, the mode of decisions sees it."""
        mode, generators, before = self._run.mode, self._run.parts.generators, None
        if draws(operator):
            with self._outside():
                before = generators.now()
        if decides:
            count = 0 if mode is None else mode.count
            result = redispatch(operator, args, kwargs)
            call.decisions = 0 if mode is None else mode.count - count
        else:
            with self._run.paused():
                result = redispatch(operator, args, kwargs)
        if before is not None:
            with self._outside():
                call.states = generators.drawn(before)
        return result

    def _keep_written(
        self, tensors: list[Tensor], call: OperatorCall, frame: Frame, decision: Keep | Encode | Offload | None
    ) -> None:
        """Store copies of what a collective has written."""
        if decision is None or not all(map(is_plain, tensors)):
            return
        if frame.module is not None:
            collectives.count_write(frame.module, tensors)
        with self._outside():
            copies = [own_copy(tensor.detach()) for tensor in tensors]
        self._settle(MadeResult(call, copies, frame, decision))

    def _settle(self, made: MadeResult | None = None) -> None:
        """Store a result: that of the last operator, where none is given."""
        if made is None:
            made, self._made = self._made, None
        assert made is not None
        with self._outside():
            made.call.put(made.result, lambda tensor: self._note(tensor, self._store(tensor, made)))

    def _note(self, tensor: Tensor, stored: ResultTensor) -> ResultTensor:
        for storage in storages_of(tensor):
            self._stored.setdefault(storage._cdata, []).append(ref(stored))
        return stored

    def _store(self, tensor: Tensor, made: MadeResult) -> ResultTensor:
        decision = made.decision
        if isinstance(decision, Keep) or tensor.requires_grad:
            stored = ResultTensor(tensor, self._pack(tensor, made))
            if type(stored.handle) is Stored and stored.handle.alias is None:
                stored.handle.any_version = True  # its bytes are those from before any write
            else:
                for storage in storages_of(tensor):
                    self._aliases.setdefault(storage._cdata, []).append(Alias(stored, made))
            return stored
        return ResultTensor(tensor, self._pack(own_copy(tensor), made))  # the store encodes it after the next node

    def _pack(self, tensor: Tensor, made: MadeResult) -> Any:
        what = made.call.operator
        note = f"{what if what.startswith('tag ') else f'result of {what}'}, which recomputations read"
        return self._run.scope.tracker.pack_as(self._run.pack, tensor, made.decision, made.frame, note=note)

    def _write(self, tensors: Sequence[Tensor]) -> None:
        """Note writes of the region, also those that no version tells: `unsafe_chunk` gives its chunks their own."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                for weak in self._stored.get(storage._cdata, ()):
                    if (stored := weak()) is not None:
                        stored.written = True
        self._leave_alone(tensors)

    def _leave_alone(self, tensors: Iterable[Tensor]) -> None:
        """Copy the results that wait in memory to which the region or its caller may write from now on."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                key = storage._cdata
                if any(recent.storage.cdata == key for recent in self._recent):
                    left = [recent for recent in self._recent if recent.storage.cdata != key]
                    self._recent = deque(left, maxlen=_MAX_RECENT)
                for alias in self._aliases.pop(key, ()):
                    if alias.made.call.holds(alias.tensor):
                        with self._outside():
                            kept = self._run.parts.unpack(alias.tensor.handle)
                            alias.tensor.handle = self._pack(own_copy(kept), alias.made)


class Serving(ResultMode):
    """Mode of a later run, which returns the results of the first run."""

    def __init__(self, run: LaterRun) -> None:
        super().__init__(run)
        self._run = run
        self._next = 0

    def call(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self._may_keep(operator):
            return redispatch(operator, args, kwargs)
        call = self._take(name_of(operator), call_shape(operator, args))
        if call.runs_again:
            return redispatch(operator, args, kwargs)
        if isinstance(self._run.mode, Repeating):
            self._run.mode.skip(call.decisions)
        with self._outside():
            leaves = call.replay(self._run)
        if is_collective(operator) and writes_results(operator):
            with self._run.paused():
                return collectives.write_again(operator, args, kwargs, leaves)
        # Here `detach` makes tensors that autograd knows nothing of, as those that an operator returns.
        return tree_unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], call.form)

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        """Return the stored tensor in place of one that has been computed again."""
        if innermost_pack() is not self._run.hook:
            return tensor
        call = self._take(f"tag {name}", tuple(tensor.shape))
        if call.runs_again:
            return tensor
        with self._outside():
            stored: Tensor = call.replay(self._run)[0].detach()
        if tensor.requires_grad:
            stored.requires_grad_()
        return stored.clone() if call.written else stored  # no operator writes to a leaf

    def _take(self, name: str, shape: tuple[int, ...]) -> OperatorCall:
        call = self._calls[self._next] if self._next < len(self._calls) else None
        self._next += 1
        if call is None or (call.operator, call.shape) != (name, shape):
            was = "no further one" if call is None else f"{call.operator} of {shape_text(call.shape)}"
            found = f"{name} of {shape_text(shape)}"
            raise self._run.differs(
                self._run.parts.region,
                f"its operator {self._next} of those that rules name is {found}, and was {was}",
            )
        assert isinstance(call, OperatorCall)
        return call


def keeping(run: FirstRun, forward: Forward) -> Forward:
    """Return the forward of a first run that stores the results of operators by their rules."""
    if run.parts.inner is None:
        return forward

    def keep(*args: Any, **kwargs: Any) -> Any:
        with Keeping(run) as mode:
            output = forward(*args, **kwargs)
            mode.finish(output)
        return output

    return keep


def serving(run: LaterRun, forward: Forward) -> Forward:
    """Return the forward of a later run that gets these results."""
    if run.parts.inner is None:
        return forward

    def serve(*args: Any, **kwargs: Any) -> Any:
        with Serving(run):
            return forward(*args, **kwargs)

    return serve
