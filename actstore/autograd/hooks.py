"""Saved-tensor hooks: pack decides where a tensor waits, unpack brings it back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from sys import _getframe, modules
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch._C import _current_autograd_node, _current_graph_task_id, _get_dispatch_mode, _len_torch_dispatch_stack
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import graph
from torch.nn import Parameter

from actstore.autograd.census import Census
from actstore.autograd.compiled import region_saves
from actstore.autograd.composite import Composite, StoredPart, has_values, is_parameter, parts_of
from actstore.autograd.deciders import READERS, keep_decisions
from actstore.autograd.derived import Derived, find_recipe, is_plain
from actstore.autograd.handles import Kept, Small, Stored, check_version
from actstore.autograd.protect import (
    COMPILED,
    MAX_NODES_INSPECTED,
    TRANSPARENT,
    WITHOUT_GRADIENT,
    is_cast_parameter,
    lossy_reason,
)
from actstore.autograd.readers import Reader, Readers
from actstore.autograd.regions import MAX_STORAGE_RATIO, can_be_lossy, exact_copy, is_whole, region_of
from actstore.autograd.sharing import Sharing
from actstore.autograd.tracker import (
    ASK,
    COMPUTED,
    DEVICE,
    MAX_SMALL_PER_FRAME,
    SMALL_INDEX,
    Deriving,
    Precedent,
    target_of,
)
from actstore.base.checkpoints import in_reentrant
from actstore.base.layout import layout_of
from actstore.base.spec import Site, Spec, describe
from actstore.base.storage import revive, storages_of
from actstore.codecs import Bit1, Codec, Raw
from actstore.errors import ActstoreError
from actstore.policy.rules import derives

if TYPE_CHECKING:
    from torch.nn import Module

    from actstore.autograd.tracker import Frame, ModuleSites, Target, Tracker
    from actstore.base.ledger import Account
    from actstore.policy import Policy
    from actstore.store.payload import ForwardPass, Route
    from actstore.store.store import Store

RAW = Raw()
BITS = Bit1()  # for masks, whatever codec the policy has for floats
_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)  # bytes would be lost to a trace

Handle = Small | Kept | Stored | Derived | Composite

_COMPILER = "torch._functorch._aot_autograd.runtime_wrappers"  # imported with the first compiled region


turns: list[Scope] = []  # scopes that need to know when a backward begins


def unpack(handle: Handle | Reader) -> Tensor:
    if turns:
        _turn()
    if type(handle) is tuple:
        alias, version, frame = handle
        if alias._version != version:
            check_version(alias, version, Site(frame.place.name, SMALL_INDEX))
        return alias
    tensor = handle.get()  # type: ignore[union-attr]
    if _COMPILER in modules:
        _note_compiled(handle, tensor)
    return tensor


def _turn() -> None:
    """Tell scopes of this thread that backward begins. On an accelerator it runs on autograd's threads."""
    here = get_ident()
    for scope in turns[:]:
        if scope.thread == here or scope.on_accelerator:
            with suppress(ValueError):  # another thread has removed it
                turns.remove(scope)
                scope.turn(here)


class Scope:
    """One entry of a store on one thread: the hooks, and their state until the exit.

    The scope forgets saved storages at its end, so that no later step can find stale bytes.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        tracker: Tracker,
        census: Census,
        parameters: set[int],
        forward: ForwardPass,
        *,
        min_nbytes: int,
        allow_mutation: bool,
        on_accelerator: bool,
    ) -> None:
        self.thread = get_ident()
        self.on_accelerator = on_accelerator
        self.tracker = tracker
        self.parameters = parameters  # identities of storages that are neither counted nor moved
        self.ledger = store.ledger
        self.gauge = store.gauge
        self.recomputing = partial(store.recomputing, forward)
        self._store = store
        self._forward = forward
        self._policy = policy
        tracker.derives = derives(policy)
        self._min_nbytes = min_nbytes
        self._allow_mutation = allow_mutation
        self._kept: dict[int, ref[Kept]] = {}
        self._stored: dict[int, list[ref[Stored]]] = {}
        self._sharing = Sharing(store)
        self._turned = False  # whether a backward has begun
        self.readers: Readers | None = None  # readers of the payloads, in sampled steps
        self._alone = store.alone
        self._census = census
        self._tags: dict[int, str] = {}
        self._unsettled: list[tuple[ref[Stored], Codec, tuple[str, ...]]] = []
        self._unsettled_nr = 0
        self._looked = 0  # nodes that Python has inspected
        self._prune_at = 1024
        self._empty: dict[torch.dtype, Tensor] = {}

    # -- pack ---------------------------------------------------------------------------------------------------------

    def entry_hook(self) -> Callable[..., Handle | Reader]:
        """Return the pack hook of one entry of the store, with readers in a sampled step."""
        pack, tracker = self.pack_hook(), self.tracker
        if self.readers is None:
            return pack
        return self.readers.hook(pack, lambda: tracker.frame.inputs is not None)

    def pack_hook(self) -> Callable[..., Handle]:
        """Return the pack hook. A closure, because it runs for each saved tensor: its names need no look-up."""
        tracker, parameters, unsettled = self.tracker, self.parameters, self._unsettled
        follow = self._follow

        def pack(tensor: Tensor, outer: Tensor | None = None) -> Handle:
            if _len_torch_dispatch_stack() and any(_get_dispatch_mode(mode) is not None for mode in _TRACING):
                return _alias_of(tensor), tensor._version, tracker.frame
            if unsettled and _get_sequence_nr() != self._unsettled_nr:
                self.settle()
            frame = tracker.frame
            kind, base = type(tensor), tensor._base
            if kind is not Tensor or (base is not None and type(base) is not Tensor):
                if (kind is Parameter or type(base) is Parameter) and tensor.layout is torch.strided:
                    if tensor.untyped_storage()._cdata not in parameters:
                        tracker.adopt(tensor)
                    # As autograd does: a library that shards weights gives a Parameter new data, for backward too.
                    return tensor if kind is Parameter and tensor.is_leaf else tensor.detach(), tensor._version, frame
                handle = self._of_class(tensor, frame)
                if handle is not None:
                    return handle
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse, jagged, and other layouts without one storage
                frame.place.account(frame.index).note = f"kept: a {tensor.layout} tensor has no storage of its own"
                return tensor.detach(), tensor._version, frame
            key = storage._cdata
            if key in parameters:
                return tensor.detach(), tensor._version, frame
            nbytes = storage.nbytes()
            if nbytes < frame.keep_below:
                small = frame.small
                small[key] = nbytes
                if len(small) == MAX_SMALL_PER_FRAME:
                    tracker.renew()
                return tensor.detach(), tensor._version, frame
            index = frame.index
            frame.index = index + 1
            accounts = frame.place.accounts
            account = accounts[index] if index < len(accounts) else frame.place.account(index)
            account.count += 1
            precedent = account.precedent
            try:
                if precedent is not None and precedent.target is frame.follows and kind is Tensor and outer is None:
                    handle = follow(precedent, tensor, account, key, storage, nbytes)
                    if handle is not None:
                        return handle
                return self._place(tensor, frame, account, key, storage, nbytes, outer)
            except ActstoreError as error:
                _name(error, account, tensor)
                raise

        return pack

    def _of_class(self, tensor: Tensor, frame: Frame) -> Handle | None:
        """Return the handle of a tensor of another class; None for one that is neither a parameter nor a wrapper."""
        alias = tensor.detach()
        if isinstance(tensor, FakeTensor):  # without bytes to count
            return alias, tensor._version, frame
        if is_parameter(tensor):
            self.tracker.adopt(tensor)
            return tensor if isinstance(tensor, Parameter) and tensor.is_leaf else alias, tensor._version, frame
        parts = parts_of(alias)
        if parts is None:
            return None
        pack = self.pack_hook()  # a hook with a reference to itself would be a cycle
        handles = {name: pack(part, tensor) for name, part in parts.items()}
        return Composite(alias, handles, Site(frame.place.name, SMALL_INDEX), self.allows_mutation())

    def allows_mutation(self) -> bool:
        """Return whether a saved tensor may change before backward."""
        return self._allow_mutation or graph._allow_mutation_on_saved_tensors_enabled

    def _keep(self, tensor: Tensor, account: Account, key: int, storage: UntypedStorage, reason: str = "") -> Kept:
        if reason:
            account.note = f"kept: {reason}"
        weak = self._kept.get(key)
        first = weak() if weak is not None else None
        saved = self._saved_nbytes(key, storage)
        if first is not None:
            self.ledger.add(account, saved, 0, 0)
            return Kept(tensor, account, first)
        kept = Kept(tensor, account, self.ledger.hold(account, saved, 0, storage.nbytes()))
        self._kept[key] = ref(kept)
        return kept

    def _place(
        self,
        tensor: Tensor,
        frame: Frame,
        account: Account,
        key: int,
        storage: UntypedStorage,
        nbytes: int,
        outer: Tensor | None,
    ) -> Handle:
        """Return the handle of a tensor, where the policy decides. Autograd knows `outer` if the tensor is its part."""
        if _current_graph_task_id() != -1 and in_reentrant():
            account.count -= 1
            return tensor.detach(), tensor._version, frame
        if self._tags:
            account, decided = self._tagged(frame, account, key)
        else:
            decided = frame.target
        if decided is ASK and tensor.is_nested:  # it has no single shape to ask for
            decided = None
        elif decided is ASK:
            decided = target_of(self._policy(account.site, Spec.of(tensor)))
        if isinstance(decided, Deriving):
            account.where, target = decided.where, decided.rest
            shares = self._is_kept(key) or (target is not None and key in self._stored)
            if outer is None and not shares and (derived := self._derive(tensor, account, key, storage)) is not None:
                return derived
        else:
            target = decided
        if target is None:
            return self._keep(tensor, account, key, storage)
        codec, tiers, protected, account.where = target
        if type(tensor) is not Tensor or tensor.is_nested or tensor.is_meta or tensor._is_zerotensor():
            kind = f"a nested or {type(tensor).__name__} tensor"
            if tensor.is_meta or tensor._is_zerotensor():  # forward-mode differentiation makes zeros without memory
                kind = "a meta tensor" if tensor.is_meta else "a tensor of implicit zeros"
            return self._keep(tensor, account, key, storage, f"{kind} has no bytes to encode")
        if _current_graph_task_id() != -1:
            return self._keep(tensor, account, key, storage, "saved by a backward that is itself differentiated")
        if tensor.is_quantized:
            return self._keep(tensor, account, key, storage, "a quantized tensor has more than its bytes")
        whole = is_whole(tensor, nbytes)
        if not whole and not _fits(tensor, nbytes):
            return self._keep(tensor, account, key, storage, "its storage has been resized and holds less")
        if not whole and tensor.nbytes < self._min_nbytes and nbytes <= MAX_STORAGE_RATIO * tensor.nbytes:
            return self._keep(tensor, account, key, storage, "small")
        known = tensor if outer is None else outer
        if self._looked == MAX_NODES_INSPECTED:
            return self._keep(tensor, account, key, storage, f"one of more than {MAX_NODES_INSPECTED} in one forward")
        name = self._producer(known)
        if name in TRANSPARENT and is_cast_parameter(known, self.parameters):
            return self._keep(tensor, account, key, storage, "a view or a cast of a parameter")
        dtype = tensor.dtype
        if not (codec.lossless and codec.accepts(dtype)):
            reason = self._exact_reason(tensor, known, dtype, frame, name, key, codec, whole, protected)
            if self._alone is not None and not self._is_alone(account, key):
                reason = f"only {self._alone} is lossy now"
            if not reason:
                kept, why = keep_decisions(codec, known, name)
                if kept is None:
                    reason = why
                elif kept.decides:
                    account.note = why
                codec = kept or codec
            if reason:
                codec = BITS if dtype is torch.bool else RAW
                if tiers == DEVICE and codec is RAW:
                    account.exact = True
                    return self._keep(tensor, account, key, storage, reason)
                account.note = f"{codec.name}: {reason}"
        if key in self._kept and self._is_kept(key):
            return self._keep(tensor, account, key, storage)
        allow, empty = self.allows_mutation(), self._empty_like(tensor)
        if outer is None:
            handle = Stored(tensor, account, tuple(tensor.shape), tensor.stride(), empty, allow)
        elif allow and not outer.requires_grad:
            return self._keep(tensor, account, key, storage, "may change before backward")
        else:
            handle = StoredPart(tensor, account, tuple(tensor.shape), tensor.stride(), empty, any_version=True)
            handle.belong_to(outer)
        if not whole:
            handle.offset, handle.conj, handle.neg = int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
        if key in self._stored and self._find_owner(handle, tensor, key, storage, codec):
            return handle
        if name or known.requires_grad:
            route = self._encode(handle, tensor, storage, whole, codec, tiers)
            if route is None:
                return self._keep(tensor, account, key, storage, _no_room(tiers))
            if whole and outer is None and target is frame.follows and codec in (target[0], target[0].keeping_signs):
                self._set_precedent(handle, target, name, nbytes, empty, route)
            return handle
        # An operator may still write to a tensor that it saves without a gradient (rrelu's noise): wait one node.
        handle.alias = self._keep(tensor, account, key, storage)
        handle.snapshot = exact_copy(tensor) if allow else None
        self._unsettled.append((ref(handle), codec, tiers))
        self._unsettled_nr = _get_sequence_nr()
        return handle

    def _follow(
        self, precedent: Precedent, tensor: Tensor, account: Account, key: int, storage: UntypedStorage, nbytes: int
    ) -> Kept | Stored | None:
        """Return the handle as `_place` would, for a tensor like the last of its site; None if `_place` must decide."""
        target, producer, shape, stride, dtype, device, known_nbytes, empty, route = precedent
        if (
            tensor.is_nested
            or nbytes != known_nbytes
            or tensor.shape != shape
            or tensor.stride() != stride
            or tensor.dtype is not dtype
            or tensor.device != device
            or tensor.is_neg()
            or tensor._is_zerotensor()
            or key in self._stored
            or key in self._kept
            or key in self.tracker.computed
            or self._tags
            or self._alone is not None
            or self._looked == MAX_NODES_INSPECTED
            or _current_graph_task_id() != -1
            or _getframe(2).f_code in READERS
        ):
            return None
        node: Any = tensor.grad_fn
        if node is None:
            return None
        if node.name() != producer:
            return None
        self._looked += 1
        account.where = target[3]
        handle = Stored(tensor, account, shape, stride, empty, self.allows_mutation())
        saved = self._saved_nbytes(key, storage)
        weak = self._store.put(handle, tensor, route, saved, self._forward)
        if weak is None:
            self._uncount(key, saved)
            return self._keep(tensor, account, key, storage, _no_room(target[1]))
        if self._sharing.over:
            self._go_on()
        self._stored[key] = [weak]
        return handle

    def _set_precedent(
        self, handle: Stored, target: Target, producer: str, nbytes: int, empty: Tensor, route: Route
    ) -> None:
        """Let the next tensor of a site follow the tensor that was just encoded."""
        is_plain = producer and producer not in TRANSPARENT and not empty.is_complex()
        if is_plain and (target[0].lossless or "Norm" not in producer):
            handle.account.precedent = Precedent(
                target, producer, handle.shape, handle.stride, empty.dtype, empty.device, nbytes, empty, route
            )

    def _derive(self, tensor: Tensor, account: Account, key: int, storage: UntypedStorage) -> Derived | None:
        """Return the handle of a tensor that saved tensors can derive, bit for bit; None for any other tensor."""
        root = tensor if tensor._base is None else tensor._base
        if root.is_leaf or tensor._version or self._looked == MAX_NODES_INSPECTED or not is_plain(tensor, root):
            return None
        self._looked += 1
        recipe = None if self.allows_mutation() else find_recipe(root, unpack)
        if recipe is None:
            return None
        self.ledger.add(account, self._saved_nbytes(key, storage), 0, 0)
        working = None if self.gauge is None else self.gauge.recomputing
        return Derived(tensor, root, account, self.ledger, self._empty_like(tensor), recipe, working)

    def _is_kept(self, key: int) -> bool:
        """Return whether a handle keeps the storage on its device, where a payload would only add bytes."""
        kept = self._kept.get(key)
        return kept is not None and kept() is not None

    def _producer(self, tensor: Tensor) -> str:
        """Return the name of the autograd node whose output `tensor` is; empty where it has no node."""
        node: Any = tensor.grad_fn
        if node is None:
            return ""
        self._looked += 1
        name: str = node.name()
        return name

    def _tagged(self, frame: Frame, account: Account, key: int) -> tuple[Account, Target | Deriving | None]:
        """Return the account and the target of a storage that may have a tag."""
        if key not in self._tags:
            return account, frame.target
        account.count -= 1
        account = self.ledger.account(replace(account.site, tag=self._tags[key]))
        account.count += 1
        return account, ASK

    def _exact_reason(
        self,
        tensor: Tensor,
        known: Tensor,
        dtype: torch.dtype,
        frame: Frame,
        producer: str,
        key: int,
        codec: Codec,
        whole: bool,
        protected: bool,
    ) -> str:
        """Return the reason why `tensor` cannot go through `codec`; empty when it can."""
        if not codec.accepts(dtype):
            return f"{codec.name} does not take {str(dtype).removeprefix('torch.')}"
        if not whole and not can_be_lossy(layout_of(tensor.shape, tensor.stride())):
            return "its elements overlap in memory"
        if known is not tensor and not has_values(known, tensor):
            return f"a part of a {type(known).__name__}"
        if not protected:
            return ""
        if frame.exact:
            return frame.exact
        if key in self.tracker.computed:
            return COMPUTED
        reason = lossy_reason(known, dtype, producer)
        return COMPILED if reason is WITHOUT_GRADIENT and _COMPILER in modules and region_saves() else reason

    def _is_alone(self, account: Account, key: int) -> bool:
        """Return whether this is the one lossy site, or reads what that site has stored."""
        owners = [weak() for weak in self._stored.get(key, ())]
        sites = [account.site, *(owner.account.site for owner in owners if owner is not None)]
        return any(str(site) == self._alone for site in sites)

    def _find_owner(self, handle: Stored, tensor: Tensor, key: int, storage: UntypedStorage, codec: Codec) -> bool:
        """Let an earlier payload of the same storage serve `handle`, if one can. Returns whether one does."""
        owner = self._sharing.find(self._stored[key], handle, tensor, codec)
        if owner is None:
            return False
        handle.owner = owner
        if owner.berth is not None:
            owner.berth.readers += 1
        self.ledger.add(handle.account, self._saved_nbytes(key, storage), 0, 0)
        return True

    def follow(self, policy: Policy, places: dict[Module, ModuleSites]) -> None:
        """Apply another policy to tensors that are saved from now on."""
        self._policy, self.tracker.places = policy, places
        self.tracker.derives = derives(policy)

    def settle(self) -> None:
        """Encode the tensors that waited for their operator to end. A tensor that cannot be encoded stays an alias."""
        unsettled = self._unsettled[:]
        self._unsettled.clear()
        for weak, codec, tiers in unsettled:
            handle = weak()
            if handle is None or handle.alias is None:
                continue
            tensor = handle.alias.alias
            if tensor._version != handle.version:
                if handle.snapshot is None:
                    continue  # unpack raises autograd's error
                tensor, handle.offset = handle.snapshot, 0
            storage = tensor.untyped_storage()
            try:
                route = self._encode(handle, tensor, storage, is_whole(tensor, storage.nbytes()), codec, tiers)
            except ActstoreError as error:
                _name(error, handle.account, tensor)
                raise
            if route is not None:
                handle.alias = handle.snapshot = None
            else:
                handle.account.note = f"kept: {_no_room(tiers)}"

    def turn(self, thread: int) -> None:
        """Note that backward begins inside of the context. The first backward is the end of forward.

        A tracker belongs to the thread of its forward.
        """
        self._sharing.over = True
        if self._turned:
            return
        self._turned = True
        if thread == self.thread:
            self.tracker.renew()
        self._store.turn(self._forward)
        self.ledger.mark_turn()

    def _go_on(self) -> None:
        """Continue after a backward, because a tensor is stored: register for the next backward."""
        self._sharing.begin()
        turns.append(self)

    def close(self, *, failed: bool) -> None:
        """Record the open frames, and forget every storage. After a `failed` forward, nothing more is encoded."""
        try:
            if not failed:
                self.settle()
        finally:
            self._store.end(self._forward)
            self.tracker.end()
            self._count_alive()
            self._store.remember(weak for stored in self._stored.values() for weak in stored)
            self._kept.clear()
            self._stored.clear()
            self._tags.clear()
            self._census.clear()

    def _count_alive(self) -> None:
        """Record the stored storages that another owner than autograd still holds."""
        for key, stored in self._stored.items():
            handle = stored[0]()
            if handle is not None and handle.alias is None and (storage := revive(key)) is not None:
                handle.account.alive += storage.nbytes()

    # -- counts and tags of other modules -----------------------------------------------------------------------------

    def count(self, key: int, storage: UntypedStorage, account: Account) -> None:
        """Record a storage that plain autograd would save, and that a recomputed region does not save."""
        if key not in self.parameters and not self.tracker.knows(key):
            nbytes = self._census.count(key, storage)
            if nbytes:
                self.ledger.add(account, nbytes, 0, 0)

    def tag(self, tensor: Tensor, name: str) -> None:
        """Name the storage of `tensor`, for the rules of tensors that are saved from now on."""
        for storage in storages_of(tensor):
            self._census.meet(storage._cdata, storage)
            self._tags[storage._cdata] = name

    # -- encode -------------------------------------------------------------------------------------------------------

    def _encode(
        self,
        handle: Stored,
        tensor: Tensor,
        storage: UntypedStorage,
        whole: bool,
        codec: Codec,
        tiers: tuple[str, ...],
    ) -> Route | None:
        """Put the bytes that `handle` needs into the store. Returns the route; None when no tier has room."""
        if not whole:
            tensor, handle.region = region_of(tensor, lossless=codec.lossless)
        key = storage._cdata
        if handle.alias is None:
            saved = self._saved_nbytes(key, storage)
        else:  # it has been counted; its snapshot has a storage of its own, which is freed after this
            saved = 0
            self._census.meet(key, storage)
        route = self._store.route(handle.account, tensor, codec, tiers)
        weak = self._store.put(handle, tensor, route, saved, self._forward)
        if weak is None:
            self._uncount(key, saved)
            return None
        if self._sharing.over:
            self._go_on()
        if key in self._stored:
            self._stored[key].append(weak)
        else:  # never an empty list, even if an interrupt comes between
            self._stored[key] = [weak]
        return route

    def _saved_nbytes(self, key: int, storage: UntypedStorage) -> int:
        """Return the bytes of a storage that plain autograd holds because it is saved now."""
        census, tracker = self._census, self.tracker
        if len(census.met) > self._prune_at:
            self._prune()
        frame = tracker.frame
        if frame.inputs is not None:
            census.meet(key, storage)  # the input of a region: plain autograd need not save it
            return 0
        nbytes = census.count(key, storage)
        return 0 if key in tracker.owned or key in frame.small else nbytes

    def _uncount(self, key: int, saved: int) -> None:
        """Undo the count of `_saved_nbytes`, because the handle that keeps the storage counts it."""
        if saved:
            self._census.counted.discard(key)

    def _prune(self) -> None:
        """Forget freed storages, so that a context without an end does not grow."""
        gone = self._census.prune()
        self.tracker.forget(gone)
        self._store.remember([weak for key in gone for weak in self._stored.pop(key, ())])
        for key in gone:
            self._kept.pop(key, None)
            self._tags.pop(key, None)
        self._prune_at = 1024 + 2 * len(self._census.met)

    def _empty_like(self, tensor: Tensor) -> Tensor:
        empty = self._empty.get(tensor.dtype)
        if empty is None or empty.device != tensor.device:
            empty = self._empty[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty


def _note_compiled(handle: Handle | Reader, tensor: Tensor) -> None:
    node: Any = _current_autograd_node()  # None outside of backward
    if node is None or node.name() != "CompiledFunctionBackward":
        return
    if isinstance(handle, Reader):
        handle = handle.handle
    if isinstance(handle, Stored) and handle.alias is None:
        owner = handle.owner or handle
        key = _current_graph_task_id(), node._sequence_nr()
        owner.store.ledger.read_compiled(handle.account, key, tensor.nbytes if owner is handle else 0)


def _alias_of(tensor: Tensor) -> Tensor:
    """Return an alias of `tensor` with its memory, even where a mode makes each new tensor a fake one."""
    with unset_fake_temporarily():
        return tensor.detach()


def _no_room(tiers: tuple[str, ...]) -> str:
    return f"no room in {' > '.join(tiers)}"


def _fits(tensor: Tensor, nbytes: int) -> bool:
    """Return whether a storage of `nbytes` holds all elements of `tensor`."""
    span = layout_of(tensor.shape, tensor.stride()).span
    return span == 0 or (int(tensor.storage_offset()) + span) * tensor.itemsize <= nbytes


def _name(error: ActstoreError, account: Account, tensor: Tensor) -> None:
    """Add the saved tensor to the context of an error."""
    error.add_context(f"while saving {account.site} ({describe(tensor)}, {account.where})")
