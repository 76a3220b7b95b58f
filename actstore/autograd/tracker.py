"""Names of the running modules, per thread, while a store is active."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.parametrize import ParametrizationList

from actstore.autograd.protect import COMPUTED
from actstore.autograd.storages import Storages, part_of
from actstore.base.checkpoints import in_reentrant
from actstore.base.ledger import Account, Ledger
from actstore.base.note import SMALL, Note
from actstore.base.reaper import Finalizer
from actstore.base.spec import Site
from actstore.codecs import Codec, Raw
from actstore.policy import Decision, Derive, Encode, Keep, Offload

SMALL_INDEX = -1  # of the account of all tensors of a module that are kept because they are small
MAX_SMALL_PER_FRAME = 64  # small tensors


Target = tuple[Codec, tuple[str, ...], bool, Decision]  # codec, tiers, protected, and the decision


class Precedent(NamedTuple):
    """The last tensor of a site, if it went to its target without exception and was all of its storage.

    The next tensor like it goes the same way.
    """

    target: Target
    producer: str  # the autograd node that returned it; empty for one without a gradient, such as a mask
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_like: Callable[[torch.Tensor], bool]  # in class, layout, dtype, device and `requires_grad`
    nbytes: int
    empty: torch.Tensor  # of this dtype and device
    route: Any  # a Route; of a tensor without a gradient, which is encoded when its node has ended, codec and note
    code: CodeType | None  # of the function that called the operator; None for a lossless codec
    at: int  # the instruction of that call


class Deriving(NamedTuple):
    """Target of tensors that can be derived; `rest` is the target of all other tensors, None where they stay."""

    rest: Target | None
    decision: Derive


DEVICE: tuple[str, ...] = ("device",)
ASK: Target = (Raw(), (), True, Keep())  # the policy decides on each tensor


def target_of(decision: Decision) -> Target | Deriving | None:
    """Return the target of a decision for a tensor; None where the tensor stays on its device."""
    if isinstance(decision, Derive):
        rest = target_of(decision.rest)
        assert not isinstance(rest, Deriving), "a Derive holds none"
        return Deriving(rest, decision)
    if isinstance(decision, Encode):
        return decision.codec, DEVICE, decision.protected, decision
    if isinstance(decision, Offload):
        return decision.codec, decision.tiers, decision.protected, decision
    return None


class ModuleSites:
    """Record of one module name: its accounts in the order of its saves, and their target.

    Attributes
    ----------
    others : the records of the module's other names, by the name of the module that calls it: blocks may share one
    """

    __slots__ = (
        "_small", "accounts", "has_run", "hidden", "keep_below", "ledger", "name", "others", "target", "watched",
    )  # fmt: skip

    def __init__(
        self, name: str, ledger: Ledger, decision: Decision | None, keep_below: int, *, watched: bool = False
    ) -> None:
        self.name = name
        self.watched = watched  # whether `hidden` is to be set,
        self.hidden = False  # which says that the module's last call was in a checkpoint of the model's own
        self.has_run = False  # of the model itself
        self.accounts: list[Account] = []
        self.target: Target | Deriving | None = ASK if decision is None else target_of(decision)
        self.keep_below = keep_below  # bytes: smaller storages are kept, and accounted for in groups
        self.ledger = ledger
        self.others: dict[str, ModuleSites] = {}
        self._small: Account | None = None

    def rename(self, others: dict[str, ModuleSites]) -> None:
        """Set the records of the module's other names."""
        self.others = others

    def account(self, index: int, dtype: torch.dtype | None = None) -> Account:
        accounts = self.accounts
        while index >= len(accounts):
            accounts.append(self.ledger.account(Site(self.name, len(accounts)), dtype))
        return accounts[index]

    def book(self, saved: int, held: int, count: int) -> Finalizer:
        """Record a group of small tensors as saved, and as held until the returned finalizer dies; both in bytes."""
        if self._small is None:
            self._small = self.ledger.account(Site(self.name, SMALL_INDEX))
        self._small.note = Note("" if self.target is None else SMALL)
        self._small.count += count
        return self.ledger.hold(self._small, saved, 0, held)

    def split(self, held: Finalizer, nbytes: int) -> Finalizer:
        """Return a finalizer of its own for `nbytes` of what `book` has recorded as held."""
        return self.ledger.split(held, nbytes)


class Frame:
    """One call of a module: its record, the number of its saved tensors, and the decision for a region's inputs.

    Handles of small tensors hold their frame, so that it dies with the last of them. Their bytes are booked once, when
    the call ends, and released once, which makes a kept tensor cheap. A storage that several calls save is released
    with the last of their frames.

    Attributes
    ----------
    counted : whether its saved tensors count. Tensors that a reentrant checkpoint saves in its rerun stay as they are,
        and are freed with it: they are not part of the forward
    exact : the reason why all that it saves must be exact; empty where it need not be
    follows : the target for which tensors may follow precedents of their sites; None where `_place` decides on each
    small : bytes of small storages, by identity, until the call ends; each has a weak reference of this frame
    """

    __slots__ = (
        "__weakref__", "_others", "_own", "_shared", "counted", "exact", "follows", "index", "inputs", "keep_below",
        "last", "module", "place", "small", "target",
    )  # fmt: skip

    def __init__(
        self,
        module: Module | None,
        place: ModuleSites,
        inputs: Decision | None = None,
        exact: str = "",
        *,
        counted: bool = True,
    ) -> None:
        self.module = module
        self.counted = counted
        self.exact = exact
        self.place = place
        self.inputs = inputs
        self.target = place.target if inputs is None else target_of(inputs)
        self.follows = self.target if inputs is None and not exact else None
        self.keep_below = (place.keep_below if inputs is None else 0) if counted else sys.maxsize
        self.index = 0
        self.small: dict[int, int] = {}
        self.last: Finalizer | None = None  # books the small storages as held, but for those of other calls, too

    def end(self, storages: Storages) -> None:
        """Record the small tensors of this call. Another holder may have booked a storage as held."""
        small = self.small
        if not small:
            return
        self.small = {}  # first: an interrupt may come in between, and this function then runs once more
        new = storages.meet_small(small)
        if storages.savers is not None:
            for key, nbytes in small.items():
                storages.note_saver(key, nbytes, self.place.name)
        if not self.counted or self.last is not None:
            return
        others: list[Any] = []
        if new:
            storages.counted.update(small)
            saved = held = sum(small.values())
            count = len(small)
        else:
            saved, count = storages.count_small(small)
            for key in small.keys() & storages.kept.keys():
                if (kept := storages.kept[key]()) is not None:
                    others.append(kept)
                    if key in storages.kept_parts:
                        small[key] = storages.keep(key, small[key], None, new=False)
                    else:
                        del small[key]
            for key in small.keys() & storages.small.keys():
                if (frame := storages.small[key]()) is not None:
                    others.append(frame.share(key))
                    del small[key]
            held = sum(small.values())
        self._own, self._others = small, others
        self._shared: dict[int, Finalizer] = {}
        self.last = self.place.book(saved, held, count)
        storages.small.update(dict.fromkeys(small, ref(self)))

    def groups(self, tensor: Tensor, nbytes: int) -> bool:
        """Return whether a view is accounted for in the group: not a kept slice of a table of `nbytes`."""
        return self.target is not None or not self.counted or part_of(tensor, nbytes) is None

    def share(self, key: int) -> Finalizer:
        """Return the finalizer of one small storage of this call, which has ended, for another holder of it."""
        shared = self._shared.get(key)
        if shared is None:
            assert self.last is not None
            shared = self._shared[key] = self.place.split(self.last, self._own[key])
        return shared


class Tracker:
    """The running modules of one thread under one entry of a store."""

    __slots__ = ("ended", "frame", "hidden", "home", "places", "remember", "returned", "stack", "storages")

    def __init__(
        self,
        places: dict[Module, ModuleSites],
        top: ModuleSites,
        remember: Callable[[list[Any]], None],
        *,
        exact: str = "",
        ended: Callable[[Any], None] | None = None,
    ) -> None:
        self.home: Any = None  # the store, and the pass that its payloads belong to
        self.places = places
        self.storages = Storages()
        self.remember = remember  # takes the handles of freed storages whose payloads are still needed
        self.ended = ended  # called with the output of each outermost call
        self.hidden = 0  # calls of watched modules in checkpoints of the model's own
        self.returned: Callable[[Module, Tensor, str], None] | None = None  # takes a module, its output and its name
        self.stack: list[Frame] = []
        self.frame = Frame(None, top, exact=exact)

    def saved_nbytes(self, key: int, storage: torch.UntypedStorage, part: tuple[int, int] | None = None) -> int:
        """Count a storage, or the `part` of it, that is saved now. Returns the bytes that plain autograd then holds."""
        storages, frame = self.storages, self.frame
        if len(storages.met) > storages.prune_count:
            self._prune()
        if storages.savers is not None and part is None:
            storages.note_saver(key, storage.nbytes(), frame.place.name, is_input=frame.inputs is not None)
        if frame.inputs is not None:
            storages.meet(key, storage)  # the input of a region: plain autograd need not save it
            return 0
        return storages.count(key, storage, part)

    def _prune(self) -> None:
        storages = self.storages
        if len(storages.met) > storages.prune_count:
            self.remember(storages.prune(*(frame.small for frame in (*self.stack, self.frame))))

    def _end(self, frame: Frame) -> None:
        frame.end(self.storages)
        self._prune()

    def place_of(self, module: Module) -> ModuleSites:
        """Return the record of a module that runs, also where the model calls its `forward` past the hooks."""
        place = self.frame.place
        return place if self.frame.module is module else self.places.get(module, place)

    def push(self, module: Module | None, place: ModuleSites, inputs: Decision | None = None) -> None:
        self.stack.append(self.frame)
        computed = self.frame.exact is COMPUTED or isinstance(module, ParametrizationList)
        exact = COMPUTED if computed else ""
        self.frame = Frame(module, place, inputs, exact, counted=not in_reentrant())

    def pop(self) -> None:
        self._end(self.frame)
        self.frame = self.stack.pop()

    def pack_as(
        self,
        pack: Callable[[Tensor], Any],
        tensor: Tensor,
        decision: Decision,
        frame: Frame | None = None,
        note: str = "",
    ) -> Any:
        """Return the handle of a tensor under `decision` that plain autograd need not save, made by `pack`.

        It counts as one of the innermost call, or of that of `frame`. A `note` is for the report.
        """
        outer = frame or self.frame
        index = outer.index
        self.push(None, outer.place, decision)
        self.frame.index = outer.index
        try:
            handle = pack(tensor)
        finally:
            outer.index = self.frame.index
            self.pop()
        if note and outer.index > index:
            outer.place.account(index).note = Note(note)
        return handle

    def leave(self, module: Module) -> None:
        """End the innermost call of `module`, and the calls inside it, because an interrupt runs no hooks."""
        if self.frame.module is not module and all(frame.module is not module for frame in self.stack):
            return
        while self.frame.module is not module:
            self.pop()
        self.pop()

    def unwind(self, depth: int = 0) -> None:
        """End all calls except the outermost `depth`."""
        while len(self.stack) > depth:
            self.pop()

    def renew(self) -> None:
        """Continue with a new frame of the same call, because the old frame has its share of small tensors."""
        old = self.frame
        self._end(old)
        self.frame = Frame(old.module, old.place, old.inputs, old.exact, counted=old.counted)
        self.frame.index = old.index

    def end(self) -> None:
        """Record what frames that are still open hold."""
        self.unwind()
        self.renew()  # from here on only its handles hold the last frame
