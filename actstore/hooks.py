"""The saved-tensor hooks: pack decides where a tensor waits, unpack brings it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch._C import _current_autograd_node, _current_graph_task_id
from torch._C._autograd import _get_sequence_nr
from torch.autograd import graph
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from actstore.codecs import Codec, Raw
from actstore.errors import ActstoreError, StateError
from actstore.handles import ANY_VERSION, Alias, Kept, Stored
from actstore.layout import layout_of
from actstore.policy import Decision, Encode, Keep, Offload
from actstore.protect import is_cast_parameter, lossy_reason
from actstore.regions import SPARE, Region, can_be_lossy, region_of
from actstore.spec import Spec

if TYPE_CHECKING:
    from actstore.ledger import Account
    from actstore.modules import Tracker
    from actstore.policy import Policy
    from actstore.store import Entry, Store

RAW = Raw()

Handle = Alias | Kept | Stored


def unpack(handle: Handle) -> Tensor:
    return handle.get()


class Scope:
    """One entry of a store on one thread: the hooks, and what they remember until the exit.

    What a storage was saved as is remembered within a scope only, so that no later step can meet stale bytes.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        tracker: Tracker,
        parameters: set[int],
        *,
        min_nbytes: int,
        allow_mutation: bool,
        has_model: bool,
    ) -> None:
        self.tracker = tracker
        self._store = store
        self.ledger = store.ledger
        self._policy = policy
        self.parameters = parameters
        self._min_nbytes = min_nbytes
        self._allow_mutation = allow_mutation
        self._has_model = has_model
        self._kept: dict[int, ref[Kept]] = {}
        self._regions: dict[int, list[Region]] = {}
        self._counted: dict[int, StorageWeakRef] = {}  # storages seen inside recomputed regions
        self._tags: dict[int, tuple[StorageWeakRef, str]] = {}
        self._unsettled: list[tuple[ref[Stored], Codec, tuple[str, ...], Tensor | None]] = []
        self._unsettled_nr = 0
        self._empty: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    # -- pack ---------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Handle:
        if self._unsettled and _get_sequence_nr() != self._unsettled_nr:
            self.settle()
        frame = self.tracker.frame
        index = frame.index
        frame.index = index + 1
        accounts = frame.place.accounts
        account = accounts[index] if index < len(accounts) else frame.place.account(index)
        account.count += 1
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, jagged, and other layouts without one storage
            account.note = f"kept: {type(tensor).__name__} of layout {tensor.layout} has no storage of its own"
            return Alias(tensor.detach(), tensor._version, account.site)
        key = storage._cdata
        if key in self.parameters or type(tensor) is Parameter or type(tensor._base) is Parameter:
            return Alias(tensor.detach(), tensor._version, account.site)
        if storage.nbytes() < self._min_nbytes:
            return self._keep(tensor, account, key, storage.nbytes())
        try:
            return self._place(tensor, account, key, storage)
        except ActstoreError as error:
            error.add_context(f"while saving {account.site} ({Spec.of(tensor)}, {account.where})")
            raise

    def _keep(self, tensor: Tensor, account: Account, key: int, nbytes: int) -> Kept:
        weak = self._kept.get(key)
        first = weak() if weak is not None else None
        if first is not None:
            return Kept(tensor.detach(), tensor._version, account, self.ledger, 0, first)
        kept = Kept(tensor.detach(), tensor._version, account, self.ledger, nbytes, None)
        self._kept[key] = ref(kept)
        if key in self._regions or key in self._counted:
            self.ledger.add(account, held=nbytes)
        else:
            self.ledger.keep(account, nbytes)
        return kept

    def _place(self, tensor: Tensor, account: Account, key: int, storage: torch.UntypedStorage) -> Handle:
        """Where a tensor of some size waits."""
        if type(tensor) is not Tensor or tensor.is_nested:
            account.note = f"kept: {type(tensor).__name__} has no codec"
            return self._keep(tensor, account, key, storage.nbytes())
        tag = self._tag_of(key)
        if tag:
            account = self.ledger.account(account.site._replace(tag=tag))
            account.count += 1
        decision = self._decide(tensor, account, tag)
        if not isinstance(decision, Encode | Offload):
            return self._keep(tensor, account, key, storage.nbytes())
        if _current_graph_task_id() != -1:
            _refuse_reentrant()
            account.note = "kept: saved by a backward that is itself differentiated"
            return self._keep(tensor, account, key, storage.nbytes())
        if is_cast_parameter(tensor):
            account.note = "kept: a view or a cast of a parameter"
            return self._keep(tensor, account, key, storage.nbytes())
        if tensor.nbytes < self._min_nbytes and tensor.nbytes * SPARE > storage.nbytes():
            return self._keep(tensor, account, key, storage.nbytes())
        codec, tiers = decision.codec, decision.tiers if isinstance(decision, Offload) else ("device",)
        if not (codec.lossless and codec.accepts(tensor.dtype)):
            reason = self._exact_reason(tensor, codec)
            if reason:
                account.note = f"exact: {reason}"
                if tiers == ("device",):
                    return self._keep(tensor, account, key, storage.nbytes())
                codec = RAW
        return self._save(tensor, account, key, storage, codec, tiers)

    def _decide(self, tensor: Tensor, account: Account, tag: str) -> Decision:
        frame = self.tracker.frame
        if frame.inputs is not None:
            decision: Decision = frame.inputs
        elif frame.place.decision is not None and not tag:
            decision = frame.place.decision
        else:
            decision = self._policy(account.site, Spec.of(tensor))
        if not account.where:
            account.where = str(decision)
        return decision

    def _exact_reason(self, tensor: Tensor, codec: Codec) -> str:
        if not codec.accepts(tensor.dtype):
            return f"{codec.name} does not take {str(tensor.dtype).removeprefix('torch.')}"
        if self._has_model and self.tracker.frame.module is None and self.tracker.frame.inputs is None:
            return "saved outside of the model: part of the loss"
        if not can_be_lossy(layout_of(tuple(tensor.shape), tensor.stride())):
            return "its elements overlap in memory"
        return lossy_reason(tensor)

    def _save(
        self,
        tensor: Tensor,
        account: Account,
        key: int,
        storage: torch.UntypedStorage,
        codec: Codec,
        tiers: tuple[str, ...],
    ) -> Handle:
        weak = self._kept.get(key)
        if weak is not None and weak() is not None:  # alive as it is: nothing is saved by a second form of it
            return self._keep(tensor, account, key, 0)
        allow = self._allow_mutation or graph._allow_mutation_on_saved_tensors_enabled
        version = tensor._version
        handle = Stored(tensor, ANY_VERSION if allow else version, account, self._witness(tensor))
        for region in self._regions.get(key, ()):
            entry = region.entry() if region.entry is not None else None
            if entry is not None and (entry.codec.lossless or entry.codec == codec):
                layout = layout_of(handle.spec.shape, handle.spec.stride)
                if region.covers(tensor, handle.offset, layout.span, layout.compact):
                    handle.entry, handle.region = entry, region
                    return handle
        if tensor.requires_grad:
            if not self._encode(handle, tensor, version, codec, tiers):
                account.note = f"kept: no room in {' > '.join(tiers)}"
                return self._keep(tensor, account, key, storage.nbytes())
            return handle
        # An operator may still write into what it saves without a gradient (rrelu's noise): encode it one node later.
        handle.alias = self._keep(tensor, account, key, storage.nbytes())
        copy = tensor.clone(memory_format=torch.preserve_format) if allow else None
        self._unsettled.append((ref(handle), codec, tiers, copy))
        self._unsettled_nr = _get_sequence_nr()
        return handle

    def settle(self) -> None:
        """Encode what waited for its operator to end."""
        unsettled, self._unsettled = self._unsettled, []
        for weak, codec, tiers, copy in unsettled:
            handle = weak()
            if handle is None or handle.alias is None:
                continue
            alias = handle.alias.alias
            version = handle.alias.version
            changed = alias._version != version
            if changed and copy is None:
                continue  # stays an alias: its unpack gives autograd's verdict
            if changed:
                assert copy is not None
                handle.offset = copy.storage_offset()
                alias = copy
            if self._encode(handle, alias, version, codec, tiers):
                handle.alias = None
            else:
                handle.account.note = f"kept: no room in {' > '.join(tiers)}"

    def count(self, storage: torch.UntypedStorage, account: Account) -> None:
        """Book a storage that plain autograd would save, and that a recomputed region does not."""
        key = storage._cdata
        weak = self._kept.get(key)
        known = key in self.parameters or key in self._counted or key in self._regions
        if not known and (weak is None or weak() is None):
            self._counted[key] = StorageWeakRef(storage)
            self.ledger.add(account, saved=storage.nbytes())

    def tag(self, tensor: Tensor, name: str) -> None:
        """Name the storage under `tensor`, for the rules of tensors that are saved after this."""
        storage = tensor.untyped_storage()
        self._tags[storage._cdata] = (StorageWeakRef(storage), name)

    # -- encode -------------------------------------------------------------------------------------------------------

    def _encode(self, handle: Stored, tensor: Tensor, version: int, codec: Codec, tiers: tuple[str, ...]) -> bool:
        """Put the bytes that `handle` needs into the store; False when no tier has room."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        src, region = region_of(tensor, version, lossless=codec.lossless)
        entry = self._store.put(src, codec, tiers, handle.account)
        if entry is None:
            return False
        known = self._regions.get(key)
        if known is None:
            self._regions[key] = [region]
            if key not in self._counted and handle.alias is None:
                self.ledger.add(handle.account, saved=storage.nbytes())
        else:
            known.append(region)
        region.entry = ref(entry)
        handle.entry, handle.region = entry, region
        return True

    def _witness(self, tensor: Tensor) -> Tensor:
        """A tensor with `tensor`'s version counter and none of its memory."""
        key = (tensor.dtype, tensor.device)
        empty = self._empty.get(key)
        if empty is None:
            empty = self._empty[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        witness = tensor.detach()
        witness.data = empty
        return witness

    def _tag_of(self, key: int) -> str:
        if not self._tags:
            return ""
        known = self._tags.get(key)
        return known[1] if known is not None else ""


def _refuse_reentrant() -> None:
    node = _current_autograd_node()
    if node is not None and node.name() == "CheckpointFunctionBackward":
        raise StateError(
            "a checkpoint with use_reentrant=True recomputes inside this store's context, because backward runs there: "
            "everything that it recomputes would be saved once more. Run backward after the with block, or use "
            "use_reentrant=False."
        )
