"""Saved-tensor hooks: pack decides where a tensor waits, unpack brings it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from sys import _getframe, modules
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch._C import _current_graph_task_id, _len_torch_dispatch_stack
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import graph
from torch.nn import Module, Parameter

from actstore.autograd.compiled import region_saves
from actstore.autograd.composite import Composite, StoredPart, is_parameter, parts_of
from actstore.autograd.deciders import is_reader
from actstore.autograd.derived import Derived, Recipe, find_recipe, is_masked, is_plain, note_norm
from actstore.autograd.encoder import Encoder, SavedTensor, name_in, set_precedent
from actstore.autograd.handles import Kept, Stored, alias_of
from actstore.autograd.protect import COMPILED, COMPUTED, MAX_NODES_INSPECTED, WITHOUT_GRADIENT, is_of_weight_hook
from actstore.autograd.readers import Reader, Readers
from actstore.autograd.regions import is_whole
from actstore.autograd.storages import part_of
from actstore.autograd.tracker import ASK, DEVICE, MAX_SMALL_PER_FRAME, SMALL_INDEX, Deriving, Precedent, target_of
from actstore.autograd.unpack import COMPILER, Handle, is_ours, return_originals, turns
from actstore.autograd.verdict import Facts, judge, mask_codec, note_of, why_unfit, why_unstorable
from actstore.base.checkpoints import in_reentrant
from actstore.base.compiler import is_traced
from actstore.base.note import DERIVED, FOLLOWED, Note
from actstore.base.operators import producer_of
from actstore.base.spec import Site, Spec
from actstore.base.storage import free_weak, hold_weak
from actstore.errors import ActstoreError
from actstore.policy.rules import asks_operators, derives

if TYPE_CHECKING:
    from actstore.autograd.tracker import Frame, ModuleSites, Target, Tracker
    from actstore.base.ledger import Account
    from actstore.policy import Policy
    from actstore.store.payload import ForwardPass
    from actstore.store.store import Store


class Scope:
    """One entry of a store on one thread: the hooks, and their state until the exit.

    The scope forgets saved storages at its end, so that no later step can find stale bytes.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        tracker: Tracker,
        forward: ForwardPass,
        *,
        min_nbytes: int,
        allow_mutation: bool,
        on_accelerator: bool,
        readers: Readers | None = None,
    ) -> None:
        self.thread = get_ident()
        self.on_accelerator = on_accelerator
        self.tracker = tracker
        self.storages = tracker.storages
        self.parameters = tracker.storages.parameters
        self.readers = readers  # of the payloads, in sampled steps
        self.ledger = store.ledger
        self.gauge = store.observers.gauge
        self.recomputing = partial(store.observers.recomputing, forward)
        self._store = store
        self._forward = forward
        self.follow(policy, tracker.places)
        self._min_nbytes = min_nbytes
        self._allow_mutation = allow_mutation
        self._encoder = Encoder(store, forward, tracker)
        self._sharing = self._encoder.sharing
        self._turned = False  # whether a backward has begun
        self._alone = store.alone
        self._looked = 0  # nodes that Python has inspected

    def entry_hook(self) -> Callable[..., Handle | Reader]:
        """Return the pack hook of one entry of the store, with readers in a sampled step."""
        pack, tracker = self.pack_hook(), self.tracker
        return self.readers.hook(pack, lambda: tracker.frame.inputs is not None) if self.readers is not None else pack

    def pack_hook(self) -> Callable[..., Handle]:
        """Return the pack hook. A closure, because it runs for each saved tensor: its names need no look-up."""
        tracker, parameters, encoder = self.tracker, self.parameters, self._encoder
        unsettled, follow = encoder.unsettled, self._follow

        def pack(tensor: Tensor, outer: Tensor | None = None) -> Handle:
            if _len_torch_dispatch_stack() and is_traced():  # bytes would be lost to a trace
                return alias_of(tensor), tensor._version, tracker.frame
            if unsettled and _get_sequence_nr() != encoder.unsettled_nr:
                self.settle()
            frame = tracker.frame
            kind, base = type(tensor), tensor._base
            if kind is not Tensor or (base is not None and type(base) is not Tensor):
                if (kind is Parameter or type(base) is Parameter) and tensor.layout is torch.strided:
                    if tensor.untyped_storage()._cdata not in parameters:
                        tracker.storages.adopt(tensor)
                    encoder.before = _get_sequence_nr(), 0
                    if kind is not Parameter or not tensor.is_leaf:
                        return tensor.detach(), tensor._version, frame
                    if tensor.__dict__:
                        return_originals()
                    # As autograd does: a library that shards weights gives a Parameter new data, for backward too.
                    return tensor, tensor._version, frame
                if (handle := self._of_class(tensor, frame)) is not None:
                    return handle
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse, jagged, and other layouts without one storage
                return _without_storage(tensor, frame)
            nbytes = storage.nbytes()
            if nbytes < frame.keep_below and (base is None or tensor.requires_grad or frame.groups(tensor, nbytes)):
                key, small = hold_weak(storage), frame.small  # the reference is first, as in `Storages.meet`
                if key in small or key in parameters:
                    free_weak(key)
                else:
                    small[key] = nbytes
                    if len(small) == MAX_SMALL_PER_FRAME:
                        tracker.renew()
                encoder.before = _get_sequence_nr(), 0
                return tensor.detach(), tensor._version, frame
            key = storage._cdata
            if key in parameters:
                return tensor.detach(), tensor._version, frame
            index, accounts = frame.index, frame.place.accounts
            frame.index = index + 1
            account = accounts[index] if index < len(accounts) else frame.place.account(index, tensor.dtype)
            account.count += 1
            precedent = account.precedent
            try:
                if precedent is not None and precedent.target is frame.follows and outer is None:
                    handle = follow(precedent, tensor, account, key, storage, nbytes)
                    if handle is not None:
                        return handle
                return self._place((tensor, frame, account, key, storage, nbytes, outer))
            except ActstoreError as error:
                name_in(error, account, tensor)
                raise

        return pack

    def _of_class(self, tensor: Tensor, frame: Frame) -> Handle | None:
        """Return the handle of a tensor of another class; None for one that is neither a parameter nor a wrapper."""
        alias = tensor.detach()
        if isinstance(tensor, FakeTensor):  # without bytes to count
            return alias, tensor._version, frame
        if is_parameter(tensor):
            self.tracker.storages.adopt(tensor)
            return tensor if isinstance(tensor, Parameter) and tensor.is_leaf else alias, tensor._version, frame
        parts = parts_of(alias)
        if parts is None:
            return None
        pack = self.pack_hook()  # a hook with a reference to itself would be a cycle
        before, handles = self._encoder.before, {}
        for name, part in parts.items():
            self._encoder.before = before  # for autograd, all parts are one tensor
            handles[name] = pack(part, tensor)
        return Composite(alias, handles, Site(frame.place.name, SMALL_INDEX), self.allows_mutation())

    def allows_mutation(self) -> bool:
        """Return whether a saved tensor may change before backward."""
        return self._allow_mutation or graph._allow_mutation_on_saved_tensors_enabled

    def _keep(self, tensor: Tensor, account: Account, key: int, storage: UntypedStorage, note: Note = FOLLOWED) -> Kept:
        account.note = note or account.note
        first = self.storages.first_kept(key)
        part = part_of(tensor, storage.nbytes())
        saved = self.tracker.saved_nbytes(key, storage, part)
        held = self.storages.keep(key, storage.nbytes(), part, new=first is None)
        if first is not None:
            if held:  # more of the storage than the first one booked
                return Kept(tensor, account, (first, self.ledger.hold(account, saved, 0, held)))
            self.ledger.add(account, saved, 0, 0)
            return Kept(tensor, account, first)
        owner = self.storages.small.get(key)
        frame = owner() if owner is not None else None
        if frame is None:
            kept = Kept(tensor, account, self.ledger.hold(account, saved, 0, held))
        else:  # it is held already, by the small tensors of an ended call
            self.ledger.add(account, saved, 0, 0)
            self.storages.kept_parts.pop(key, None)  # all of it is kept
            kept = Kept(tensor, account, frame.share(key))
        self.storages.kept[key] = ref(kept)
        return kept

    def _place(self, saved: SavedTensor) -> Handle:
        """Return the handle of a tensor, where the policy decides. Autograd knows `outer` if the tensor is its part."""
        tensor, frame, account, key, storage, nbytes, outer = saved
        before, self._encoder.before = self._encoder.before, (_get_sequence_nr(), min(tensor.nbytes, nbytes))
        if _current_graph_task_id() != -1 and in_reentrant():
            account.count -= 1
            return tensor.detach(), tensor._version, frame
        decided = frame.target
        if decided is ASK or key in self.storages.tags:
            account, decided = self._decide(tensor, account, key, outer)
        if isinstance(decided, Deriving):
            account.decision, target = decided.decision, decided.rest
            shares = self.storages.is_kept(key) or (target is not None and key in self.storages.stored)
            recipe = self._recipe(tensor, account, target) if outer is None and not shares else None
            if recipe is not None and recipe.codec is None:
                return self._derived(tensor, account, key, storage, recipe)
            if target is None and (codec := mask_codec(tensor)) is not None:
                target = codec, DEVICE, True, decided.decision
        else:
            target, recipe = decided, None
        if target is None:
            return self._keep(tensor, account, key, storage)
        return self._encode_or_keep(saved, account, target, before, recipe)

    def _encode_or_keep(
        self, saved: SavedTensor, account: Account, target: Target, before: tuple[int, int], recipe: Recipe | None
    ) -> Handle:
        """Return the handle of a tensor whose target is a codec, by the verdict on it.

        recipe : of the tensor with an error, which serves where the codec's own would
        """
        tensor, frame, _, key, storage, nbytes, outer = saved
        codec, tiers, protected, decision = target
        derive, account.decision = account.decision, decision
        reason = why_unstorable(tensor, in_backward=_current_graph_task_id() != -1)
        whole = not reason and is_whole(tensor, nbytes)
        reason = reason if reason or whole else why_unfit(tensor, nbytes, self._min_nbytes)
        if not reason and self._looked == MAX_NODES_INSPECTED:
            reason = f"one of more than {MAX_NODES_INSPECTED} in one forward"
        if reason:
            return self._keep(tensor, account, key, storage, Note(reason, kept=True))
        known = tensor if outer is None else outer
        exact = frame.exact or COMPUTED * (key in self.storages.computed or is_of_weight_hook(frame.module, key))
        first = outer is None is frame.inputs and not codec.lossless and self.storages.is_new(key)
        if first and is_masked(tensor) and (product := self._recipe(tensor, account, None)):
            account.note = DERIVED  # of a softmax, which stays exact, and the mask of dropout
            return self._derived(tensor, account, key, storage, product)
        excluded = "" if self._alone is None else self._encoder.excluded(account, key, self._alone)
        facts = Facts(known, self._producer(known), whole, exact, excluded, frame.inputs is None, before)
        verdict = judge(tensor, codec, facts, self.parameters, protected=protected, on_device=tiers == DEVICE)
        codec, reason = verdict.codec or codec, verdict.reason
        if reason is WITHOUT_GRADIENT and COMPILER in modules and region_saves():
            reason = COMPILED
        if verdict.codec is None:
            account.exact = verdict.exact
            return self._keep(tensor, account, key, storage, Note(reason, kept=True))
        if reason:
            account.note = note_of(codec.name, reason, verdict.exact)
        if recipe is not None and codec is target[0] and not reason:
            account.decision = derive
            return self._derived(tensor, account, key, storage, recipe)
        if self.storages.is_kept(key):
            return self._keep(tensor, account, key, storage)
        allow, empty = self.allows_mutation(), self._encoder.empty_like(tensor)
        if allow and outer is not None and not outer.requires_grad:
            return self._keep(tensor, account, key, storage, Note("may change before backward", kept=True))
        handle = _stored(tensor, account, outer, empty, whole=whole, allow=allow)
        if key in self.storages.stored:
            own = self._encoder.share(handle, tensor, key, storage, codec)
            if own is None:
                return handle
            codec = own
        alike = whole and outer is None and target is frame.follows
        if facts.producer or known.requires_grad:
            route = self._encoder.encode(handle, tensor, storage, whole, codec, tiers)
            if route is None:
                return self._keep(tensor, account, key, storage, Note.no_room(tiers))
            if self._sharing.over:
                self._go_on()
            if alike:
                set_precedent(handle, saved, target, facts.producer, empty, route)
            return handle
        if alike and reason is not COMPILED:
            set_precedent(handle, saved, target, "", empty, (codec, account.note))
        self._encoder.defer(handle, self._keep(tensor, account, key, storage), codec, tiers, allow=allow)
        return handle

    def _follow(
        self, precedent: Precedent, tensor: Tensor, account: Account, key: int, storage: UntypedStorage, nbytes: int
    ) -> Kept | Stored | None:
        """Return the handle as `_place` would, for a tensor like the last of its site; None if `_place` must decide."""
        target, producer, shape, stride, is_like, known_nbytes, empty, route, code, at = precedent
        storages = self.storages
        if (
            tensor.is_nested
            or nbytes != known_nbytes
            or not is_like(tensor)
            or key in storages.stored
            or key in storages.kept
            or key in storages.small
            or key in storages.computed
            or storages.tags
            or self._alone is not None
            or self._looked == MAX_NODES_INSPECTED
            or _current_graph_task_id() != -1
            or (code and ((call := _getframe(2)).f_code is not code or call.f_lasti != at) and is_reader(call))
        ):
            return None
        node: Any = tensor.grad_fn
        if ("" if node is None else node.name()) != producer:
            return None
        account.decision = target[3]
        allow = self._allow_mutation or graph._allow_mutation_on_saved_tensors_enabled
        handle = Stored(tensor, account, shape, stride, empty, allow)
        if node is None:
            codec, note = route
            account.note = note or account.note
            self._encoder.defer(handle, self._keep(tensor, account, key, storage), codec, target[1], allow=allow)
            return handle
        self._looked += 1
        saved = self.tracker.saved_nbytes(key, storage)
        weak = self._store.put(handle, tensor, route, saved, self._forward)
        if weak is None:
            storages.uncount(key, saved)
            return self._keep(tensor, account, key, storage, Note.no_room(target[1]))
        storages.stored[key] = [weak]
        if self._sharing.over:
            self._go_on()
        return handle

    def _recipe(self, tensor: Tensor, account: Account, target: Target | None) -> Recipe | None:
        """Return the recipe of a tensor that saved tensors can derive; None for any other tensor.

        target : of what cannot be derived; payloads of its codec will do. None where only exact tensors will
        """
        root = tensor if tensor._base is None else tensor._base
        if root.is_leaf or tensor._version or self._looked == MAX_NODES_INSPECTED or not is_plain(tensor, root):
            return None
        self._looked += 1
        if self.allows_mutation():
            return None
        codec = target[0] if target is not None and self.tracker.frame.inputs is None else None
        lossy = codec is not None and not codec.lossless
        if lossy and self._alone == str(account.site):  # what it is made of is exact now
            return None
        return find_recipe(root, is_ours, codec if lossy else None)

    def _derived(self, tensor: Tensor, account: Account, key: int, storage: UntypedStorage, recipe: Recipe) -> Derived:
        """Return the handle of a tensor that `recipe` derives. A sampled step measures its error, if it has one."""
        self.ledger.add(account, self.tracker.saved_nbytes(key, storage), 0, 0)
        working = None if self.gauge is None else self.gauge.recomputing
        root = tensor if tensor._base is None else tensor._base
        handle = Derived(tensor, root, account, self.ledger, self._encoder.empty_like(tensor), recipe, working)
        observers = self._store.observers
        if recipe.codec is not None and observers.samples:
            observers.take(tensor, handle.peek, account, self._store.place(tensor.device).device)
        return handle

    def _producer(self, tensor: Tensor) -> str:
        """Return the name of the autograd node whose output `tensor` is; empty where it has no node."""
        node: Any = tensor.grad_fn
        self._looked += node is not None
        return "" if node is None else str(node.name())

    def _decide(
        self, tensor: Tensor, account: Account, key: int, outer: Tensor | None
    ) -> tuple[Account, Target | Deriving | None]:
        """Return the account and the target of a tensor that the policy is asked about. Its storage may have a tag."""
        if key in self.storages.tags:
            account.count -= 1
            account = self.ledger.account(replace(account.site, tag=self.storages.tags[key]))
            account.count += 1
        if tensor.is_nested:  # it has no single shape to ask for
            return account, None
        site, looked = account.site, 0
        if self._asks_operators:
            known = tensor if outer is None else outer
            account.operator, looked = producer_of(known, MAX_NODES_INSPECTED - self._looked)
            site = replace(site, operator=account.operator)
        target = target_of(self._policy(site, Spec.of(tensor)))
        self._looked += looked if target is None else max(looked - 1, 0)  # the first node is looked at again
        return account, target

    def follow(self, policy: Policy, places: dict[Module, ModuleSites]) -> None:
        """Apply another policy to tensors that are saved from now on."""
        self._policy, self._asks_operators, self.tracker.places = policy, asks_operators(policy), places
        self.tracker.returned = note_norm if derives(policy) else None

    def settle(self) -> None:
        """Encode the tensors that waited for their operator to end."""
        if self._encoder.settle() and self._sharing.over:
            self._go_on()

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

    def note_savers(self) -> None:
        """Note who saves each storage from now on, where the step is measured."""
        if self.gauge is not None and self.gauge.measures:
            self.storages.savers = {}

    def close(self, *, failed: bool) -> None:
        """Record the open frames, and forget every storage. After a `failed` forward, nothing more is encoded."""
        try:
            if not failed:
                self.settle()
        finally:
            self._store.end(self._forward)
            self.tracker.end()
            if self.gauge is not None and self.storages.savers is not None:
                self.gauge.share(self.storages.shared())
            for handle, nbytes in self.storages.alive():
                handle.account.alive += nbytes
            self._store.remember(weak for stored in self.storages.stored.values() for weak in stored)
            self.storages.clear()


def _stored(
    tensor: Tensor, account: Account, outer: Tensor | None, empty: Tensor, *, whole: bool, allow: bool
) -> Stored:
    """Return an empty handle of a tensor, or of a part of the wrapper `outer`."""
    if outer is None:
        handle = Stored(tensor, account, tuple(tensor.shape), tensor.stride(), empty, allow)
    else:
        handle = StoredPart(tensor, account, tuple(tensor.shape), tensor.stride(), empty, any_version=True)
        handle.belong_to(outer)
    if not whole:
        handle.offset, handle.conj, handle.neg = int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
    return handle


def _without_storage(tensor: Tensor, frame: Frame) -> Handle:
    frame.place.account(frame.index).note = Note(f"a {tensor.layout} tensor has no storage of its own", kept=True)
    return tensor.detach(), tensor._version, frame
