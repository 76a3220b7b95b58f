"""Book of the storages that one forward meets, by identity."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any
from weakref import ref

from torch import Tensor, UntypedStorage
from torch.nn import Module
from torch.nn.parameter import is_lazy

from actstore.base.layout import layout_of
from actstore.base.reaper import Finalizer
from actstore.base.storage import SharedStorage, expired, free_weak, hold_weak, revive, storages_of

_MIN_PRUNE_COUNT = 1024  # storages


class Storages:
    """Book of storages. Until `clear`, no new storage gets the identity of one that was met.

    Attributes
    ----------
    met : all storages
    counted : those that plain autograd holds; each counts once
    parts : byte ranges of other storages that count, in order: slices of a data set, which the program holds anyway
    parameters : storages of parameters, which are neither counted nor moved
    computed : storages of weights that are computed from parameters
    small : the call that books a small storage as held, which ended first of all that saved it; it may be dead
    kept : the first handle that keeps a storage as it is
    kept_parts : byte ranges that handles keep of a storage, where they do not keep all of it
    stored : the handles whose payloads have bytes of a storage; never an empty list
    tags : names that users gave
    savers : where a step is measured, the bytes of each storage, and who saves it, in order: the name of the module,
        and whether it is an input of a region there
    prune_count : number of met storages that makes `prune` worth its time
    """

    __slots__ = (
        "_before", "_held", "_last", "computed", "counted", "kept", "kept_parts", "met", "parameters", "parts",
        "prune_count", "savers", "small", "stored", "tags",
    )  # fmt: skip

    def __init__(self) -> None:
        self.met = set[int]()
        self.counted = set[int]()
        self.parts: dict[int, list[tuple[int, int]]] = {}
        self.parameters = set[int]()
        self.computed = set[int]()
        self.small: dict[int, ref[Any]] = {}
        self.kept: dict[int, ref[Any]] = {}
        self.kept_parts: dict[int, list[tuple[int, int]]] = {}
        self.stored: dict[int, list[ref[Any]]] = {}
        self.tags: dict[int, str] = {}
        self.savers: dict[int, tuple[int, list[tuple[str, bool]]]] | None = None
        self.prune_count = _MIN_PRUNE_COUNT
        self._held: list[int] = []
        self._last = Finalizer(deque(maxlen=0).extend, map(free_weak, self._held))  # reads the list when it runs

    def use(self, kept: dict[int, ref[Any]], small: dict[int, ref[Any]]) -> None:
        """Write `kept` and `small` to these books, which are empty and may watch what comes in."""
        self.kept, self.small = kept, small

    def meet(self, key: int, storage: UntypedStorage) -> None:
        """Keep the identity `key` of `storage` from reuse."""
        if key not in self.met:
            hold_weak(storage)  # first, so that an interrupt leaves one reference too many, never one too few
            self._held.append(key)
            self.met.add(key)

    def count(self, key: int, storage: UntypedStorage, part: tuple[int, int] | None = None) -> int:
        """Return the bytes that plain autograd holds because `storage` is saved now; 0 where it was saved before.

        part : the range of its bytes that is saved; None for all of it
        """
        if key in self.counted:
            return 0
        self._before = self.parts.get(key, [])
        if part is None:
            self.counted.add(key)
        else:
            self.parts[key] = joined([*self._before, part])
        if key not in self.met:  # as `meet`, without a call
            hold_weak(storage)
            self._held.append(key)
            self.met.add(key)
        return (storage.nbytes() if part is None else nbytes_of(self.parts[key])) - nbytes_of(self._before)

    def meet_small(self, small: dict[int, int]) -> bool:
        """Register the small storages of an ended call, which has a weak reference to each.

        Returns whether none was met before, and so none has another holder.
        """
        new = self.met.isdisjoint(small)
        self._held += small
        self.met.update(small)
        return new

    def count_small(self, small: dict[int, int]) -> tuple[int, int]:
        """Return the bytes that plain autograd holds because of small storages, and the number of new ones."""
        known = small.keys() & self.counted
        before = sum(map(small.__getitem__, known))
        if self.parts:
            before += sum(nbytes_of(self.parts[key]) for key in (small.keys() & self.parts.keys()) - known)
        self.counted.update(small)
        return sum(small.values()) - before, len(small) - len(known)

    def note_saver(self, key: int, nbytes: int, name: str, *, is_input: bool = False) -> None:
        """Note who saves a storage, in a step that is measured."""
        assert self.savers is not None
        self.savers.setdefault(key, (nbytes, []))[1].append((name, is_input))

    def shared(self) -> Iterator[SharedStorage]:
        """Yield the storages that several modules save, where a step is measured."""
        for key, (nbytes, savers) in (self.savers or {}).items():
            if len({name for name, _ in savers}) > 1:
                frame, kept = self.small[key]() if key in self.small else None, self.first_kept(key)
                holder = frame.place.name if frame else kept.account.site.name if kept else None
                yield SharedStorage(nbytes, savers, holder)

    def leave_out(self, tensor: Tensor) -> None:
        """Count no bytes of `tensor`, which plain autograd would not hold: a copy of a slice."""
        for storage in storages_of(tensor):
            self.meet(storage._cdata, storage)
            self.counted.add(storage._cdata)

    def uncount(self, key: int, saved: int) -> None:
        """Undo a count of `saved` bytes, because the handle that keeps the storage counts it."""
        if saved:
            self.counted.discard(key)
            self.parts[key] = self._before

    def adopt(self, weight: Tensor, *, computed: bool = False) -> None:
        """Register a weight by its storage, which may die before the forward ends: ZeRO-3 gathers and frees weights.

        A weight that is not a Parameter was given to `functional_call`, or was `computed` from parameters. That of a
        lazy module has no storage before its first forward.
        """
        if is_lazy(weight):
            return
        known = self.computed if computed else self.parameters
        for storage in storages_of(weight):
            self.meet(storage._cdata, storage)
            known.add(storage._cdata)

    def adopt_model(self, modules: Iterable[tuple[str, Module]]) -> None:
        """Register the parameters and buffers of modules."""
        for _, module in modules:
            for weight in chain(module._parameters.values(), module._buffers.values()):
                if weight is not None:
                    self.adopt(weight)

    def tag(self, tensor: Tensor, name: str) -> None:
        """Name the storage of `tensor`."""
        for storage in storages_of(tensor):
            self.meet(storage._cdata, storage)
            self.tags[storage._cdata] = name

    def first_kept(self, key: int) -> Any:
        """Return the first handle that keeps the storage as it is, while that lives; else None."""
        kept = self.kept.get(key)
        return None if kept is None else kept()

    def keep(self, key: int, nbytes: int, part: tuple[int, int] | None, *, new: bool) -> int:
        """Return the bytes that stay on the device because a handle keeps a storage of `nbytes`, or a `part` of it.

        new : whether no other handle keeps it
        """
        if part is None and new:
            self.kept_parts.pop(key, None)
            return nbytes
        before = [] if new else self.kept_parts.get(key)
        if before is None:  # all of it is kept
            return 0
        self.kept_parts[key] = joined([*before, part or (0, nbytes)])
        return nbytes_of(self.kept_parts[key]) - nbytes_of(before)

    def is_kept(self, key: int) -> bool:
        """Return whether a handle keeps the storage on its device, where a payload would only add bytes."""
        return self.first_kept(key) is not None or (key in self.small and self.small[key]() is not None)

    def is_new(self, key: int) -> bool:
        """Return whether no handle has the storage or a payload of it."""
        return key not in self.stored and not self.is_kept(key)

    def alive(self) -> Iterator[tuple[Any, int]]:
        """Yield the first handle of each stored storage that another owner than autograd still holds, and its bytes."""
        for key, stored in self.stored.items():
            handle = stored[0]()
            if handle is not None and handle.alias is None and (storage := revive(key)) is not None:
                yield handle, nbytes_of(self.parts.get(key, ())) or storage.nbytes()

    def prune(self, *running: Iterable[int]) -> list[ref[Any]]:
        """Forget freed storages, so that an endless context does not grow. Returns the handles of their payloads.

        Parameters
        ----------
        running : small storages of the calls that have not ended, which count when these end
        """
        gone = {key for key in self.met if expired(key)}.difference(*running, self.savers or ())
        for known in (self.met, self.counted, self.parameters, self.computed):
            known -= gone
        handles = [weak for key in gone for weak in self.stored.pop(key, ())]
        for key in gone:
            self.kept.pop(key, None)
            self.kept_parts.pop(key, None)
            self.parts.pop(key, None)
            self.small.pop(key, None)
            self.tags.pop(key, None)
        freed = [key for key in self._held if key in gone]
        self._held[:] = [key for key in self._held if key not in gone]
        for key in freed:
            free_weak(key)
        self.prune_count = _MIN_PRUNE_COUNT + 2 * len(self.met)
        return handles

    def clear(self) -> None:
        """Forget all storages but those of weights."""
        books = self.kept, self.kept_parts, self.small, self.stored, self.tags, self.met, self.counted, self.parts
        for known in books:
            known.clear()
        while self._held:
            free_weak(self._held.pop())


def part_of(tensor: Tensor, nbytes: int) -> tuple[int, int] | None:
    """Return the range of bytes that counts of a storage of `nbytes` when `tensor` is saved; None for all of them.

    A tensor without a history that is a part of its storage, as a batch sliced from a data set, counts from its first
    to its last element: the program made the rest, and holds it without autograd.
    """
    if tensor.nbytes >= nbytes or tensor.grad_fn is not None:
        return None
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + layout_of(tensor.shape, tensor.stride()).span * tensor.itemsize


def joined(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(parts):
        if found and start <= found[-1][1]:
            start, end = found[-1][0], max(end, found.pop()[1])
        found.append((start, end))
    return found


def nbytes_of(parts: Iterable[tuple[int, int]]) -> int:
    """Return the bytes in ranges that do not overlap."""
    return sum(end - start for start, end in parts)
