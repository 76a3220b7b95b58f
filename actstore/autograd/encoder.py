"""Encoding of saved tensors: into the store at once, one node later, or not at all where a payload serves.

Plain autograd saves a storage once, however many of its tensors are saved. A store has the bytes as they were when
saved, so one payload serves two saves only if no write came in between. The version counter does not prove that: a
write through ``x.data`` leaves it unchanged. So the bytes are compared with the payload, unless one node of the graph
saves both, without Python code in between:

* where the payload is in host memory, at once. Where it differs, the tensor gets a payload of its own;
* where an accelerator has it, and both saves are of the same elements, by the accelerator; the host does not wait.
  Where it differs, backward raises an error, or the next entry of the store if backward was faster than the device.

Where the payload has left for another tier, the tensor gets a payload of its own. That is a matter of time, and must
not show where the tensor is to be lossy: a payload that may leave serves it only if its own payload would come back
with the same values, and a payload of its own gets the same codec and the same random bits.

No payload from before a backward serves a save after it, because an optimizer may write between the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from sys import _getframe
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch._C._autograd import _get_sequence_nr
from torch._C._dynamo import guards

from actstore.autograd.deciders import caller, is_reader
from actstore.autograd.handles import Kept, Stored
from actstore.autograd.protect import TRANSPARENT, WITHOUT_GRADIENT, may_be_reduced
from actstore.autograd.regions import exact_copy, is_whole, region_of, source_at
from actstore.autograd.storages import part_of
from actstore.autograd.tracker import DEVICE, Precedent
from actstore.autograd.verdict import RAW
from actstore.base.call_site import applies, calls_one_operator
from actstore.base.layout import layout_of
from actstore.base.ledger import Account
from actstore.base.note import Note
from actstore.base.spec import describe
from actstore.codecs import Codec
from actstore.codecs.dispatch import KernelCodec
from actstore.codecs.pair import Pair
from actstore.errors import ActstoreError
from actstore.policy.decision import Encode
from actstore.store.comparison import compare
from actstore.store.store import Store

if TYPE_CHECKING:
    from actstore.autograd.tracker import Frame, Target, Tracker
    from actstore.store.payload import ForwardPass, Route
    from actstore.store.store import Store

_MAX_FRAMES = 8  # from the hook to the caller of autograd
_NO_NODE = -1  # as a sequence number


class Sharing:
    """Search of one scope for a payload that can serve a tensor.

    Attributes
    ----------
    over : whether a backward has begun since the last tensor was stored
    """

    def __init__(self, store: Store) -> None:
        self.over = False
        self._store = store
        self._since = 0  # number of the first node that stored a tensor after the last backward

    def begin(self) -> None:
        """Continue after a backward, because a node stores a tensor."""
        self.over = False
        self._since = _get_sequence_nr()

    def find(self, owners: Iterable[ref[Stored]], handle: Stored, tensor: Tensor, codec: Codec) -> Stored | Codec:
        """Find one of `owners`, all of the same storage, whose payload has the bytes of `tensor` as it is saved now.

        Where the result of the comparison is known only later, `handle` gets it as `proof`. Where none of them has
        these bytes, or it has left, the codec for a payload of its own is returned, and `handle` gets the key of that.
        """
        if self.over:
            return codec
        for other in owners:
            owner = other()
            if (
                owner is not None
                and owner.born >= self._since
                and (owner.codec.lossless or owner.codec == codec)
                and owner.covers(handle)
            ):
                if owner.born == handle.born and not _in_function():
                    return owner
                shows = not (codec.lossless or isinstance(owner.account.decision, Encode))  # whether it has left
                if shows and not (owner.codec.lossless or _would_be(owner, handle)):
                    continue
                if self._is_unchanged(owner, handle, tensor, again=shows):
                    return owner
                if shows:
                    handle.key = owner.key
                    return owner.codec
        return codec

    def _is_unchanged(self, owner: Stored, handle: Stored, tensor: Tensor, *, again: bool) -> bool:
        source = source_at(tensor, owner.region, owner.shape, owner.stride)
        place = self._store.place(tensor.device)
        if source is not None and source.numel() != tensor.numel() and not place.device.on_host:
            return False  # the remaining elements may change, through views with version counters of their own
        found = source is not None and compare(owner, source, place, self._store.unproved)
        if found is False:
            if not again:
                owner.born = _NO_NODE  # its storage has changed since
            return False
        handle.proof = None if found is True else found
        return True


def _would_be(owner: Stored, handle: Stored) -> bool:
    """Return whether a payload of the same values would have the same bytes, with the same random bits."""
    layouts = [(each.shape, each.stride) for each in (owner, handle)]
    if owner.offset != handle.offset:
        return False
    if layouts[0] == layouts[1]:
        return True
    codec = owner.codec
    if not isinstance(codec, KernelCodec) or len({codec._fitted(*layout) for layout in layouts}) > 1:
        return False
    return prod(owner.shape) == prod(handle.shape) and all(layout_of(*layout).dense for layout in layouts)


def _in_function() -> bool:
    frame: FrameType | None = _getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None or applies(frame):
            return frame is not None
        frame = frame.f_back
    return False


# A tensor that autograd saves in the call `Frame`; its account; the key of its storage, the storage, and the bytes of
# that; the wrapper that it is a part of, or None.
SavedTensor = tuple[Tensor, "Frame", Account, int, UntypedStorage, int, Tensor | None]


class Encoder:
    """Encoding of the tensors that one scope saves.

    Attributes
    ----------
    sharing : the search for payloads that can serve again
    unsettled : handles that wait for the node that runs to end, each with its codec and its tiers
    unsettled_nr : the sequence number of that node
    before : the sequence number, one ahead, of the last node that has saved a tensor without a precedent, and the bytes
        of that tensor, 0 for a small one or a parameter
    """

    def __init__(self, store: Store, forward: ForwardPass, tracker: Tracker) -> None:
        self.sharing = Sharing(store)
        self.unsettled: list[tuple[ref[Stored], Codec, tuple[str, ...]]] = []
        self.unsettled_nr = 0
        self.before = 0, 0
        self._store = store
        self._forward = forward
        self._tracker = tracker
        self._storages = tracker.storages
        tracker.home = store, forward
        self._empty: dict[torch.dtype, Tensor] = {}

    def encode(
        self, handle: Stored, tensor: Tensor, storage: UntypedStorage, whole: bool, codec: Codec, tiers: tuple[str, ...]
    ) -> Route | None:
        """Put the bytes that `handle` needs into the store. Returns the route; None when no tier has room.

        A mask that was written to since its verdict may have more than two values: on the device it then stays.
        """
        part = None if whole else part_of(tensor, storage.nbytes())
        if not whole:
            tensor, handle.region = region_of(tensor, lossless=codec.lossless)
        if isinstance(codec, Pair):
            found = Pair.of(tensor)
            if found is None and tiers == DEVICE:
                return None
            codec = found or RAW
        key = storage._cdata
        if handle.alias is None:
            saved = self._tracker.saved_nbytes(key, storage, part)
        else:  # it has been counted; its snapshot has a storage of its own, which is freed after this
            saved = 0
            self._storages.meet(key, storage)
        route = self._store.route(handle.account, tensor, codec, tiers)
        weak = self._store.put(handle, tensor, route, saved, self._forward)
        if weak is None:
            self._storages.uncount(key, saved)
            return None
        stored = self._storages.stored
        if key in stored:
            stored[key].append(weak)
        else:  # never an empty list, even if an interrupt comes between
            stored[key] = [weak]
        return route

    def share(self, handle: Stored, tensor: Tensor, key: int, storage: UntypedStorage, codec: Codec) -> Codec | None:
        """Let an earlier payload of the same storage serve `handle`, if one can.

        Returns
        -------
        Codec : of the payload that `handle` needs; None where an earlier one serves it
        """
        owner = self.sharing.find(self._storages.stored[key], handle, tensor, codec)
        if not isinstance(owner, Stored):
            return owner
        handle.owner = owner
        owner.add_reader()
        part = part_of(tensor, storage.nbytes())
        self._store.ledger.add(handle.account, self._tracker.saved_nbytes(key, storage, part), 0, 0)
        return None

    def excluded(self, account: Account, key: int, alone: str) -> str:
        """Return the reason why a tensor is exact while the site `alone` is lossy; empty for one of that site."""
        owners = [weak() for weak in self._storages.stored.get(key, ())]  # sites that read its payload are lossy, too
        sites = [account.site, *(owner.account.site for owner in owners if owner is not None)]
        return "" if any(str(site) == alone for site in sites) else f"only {alone} is lossy now"

    def defer(self, handle: Stored, kept: Kept, codec: Codec, tiers: tuple[str, ...], *, allow: bool) -> None:
        """Encode a tensor without a gradient when the node that runs has ended.

        An operator may still write to it, as to the noise of rrelu.

        Parameters
        ----------
        kept : the tensor itself, until then
        allow : whether it may change before backward: then its values of now are encoded
        """
        handle.alias = kept
        handle.snapshot = exact_copy(kept.alias) if allow else None
        self.unsettled.append((ref(handle), codec, tiers))
        self.unsettled_nr = _get_sequence_nr()

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an empty tensor of the dtype and the device of `tensor`, the same one again and again."""
        empty = self._empty.get(tensor.dtype)
        if empty is None or empty.device != tensor.device:
            empty = self._empty[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty

    def settle(self) -> bool:
        """Encode the tensors that waited for their operator to end. Returns whether a payload was stored.

        A tensor that cannot be encoded stays an alias.
        """
        unsettled, has_stored = self.unsettled[:], False
        self.unsettled.clear()
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
                route = self.encode(handle, tensor, storage, is_whole(tensor, storage.nbytes()), codec, tiers)
            except ActstoreError as error:
                name_in(error, handle.account, tensor)
                raise
            if route is not None:
                handle.alias = handle.snapshot = None
                has_stored = True
            elif isinstance(codec, Pair) and tiers == DEVICE:
                handle.account.note, handle.account.precedent = Note(WITHOUT_GRADIENT, kept=True), None
            else:
                handle.account.note = Note.no_room(tiers)
        return has_stored


_guards: Any = guards
_ANY_CODE = calls_one_operator.__code__  # it saves nothing: each call is looked at


def set_precedent(
    handle: Stored, saved: SavedTensor, target: Target, producer: str, empty: Tensor, route: Route | tuple[Codec, Note]
) -> None:
    """Let the next tensor of a site follow the tensor that was just encoded.

    empty : of its dtype and device
    route : that it took. For a tensor without a gradient, which is encoded when its node has ended, codec and note
    """
    tensor, _, _, _, _, nbytes, _ = saved
    codec, _, protected, _ = target
    if isinstance(route, tuple):
        alike = codec.lossless or protected or not codec.accepts(tensor.dtype)  # whatever operator saves it
    else:
        alike = producer != "" and producer not in TRANSPARENT and route.codec in (codec, codec.keeping_signs)
    if not alike or tensor.is_complex():
        return
    code, at = None, 0
    if producer and not codec.lossless:
        frame = caller()
        if "Norm" in producer or frame is None or is_reader(frame) or may_be_reduced(handle.shape, handle.stride):
            return
        code, at = (frame.f_code, frame.f_lasti) if calls_one_operator(frame) else (_ANY_CODE, 0)
    shape, stride = handle.shape, handle.stride
    check = _guards.TensorGuards(tensor, dynamic_dims_sizes=[[*shape]], dynamic_dims_strides=[[*stride]]).check
    handle.account.precedent = Precedent(target, producer, shape, stride, check, nbytes, empty, route, code, at)


def name_in(error: ActstoreError, account: Account, tensor: Tensor) -> None:
    """Add the saved tensor to the context of an error."""
    error.add_context(f"while saving {account.site} ({describe(tensor)}, {account.where})")
