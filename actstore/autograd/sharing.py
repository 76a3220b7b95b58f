"""Payloads that serve a tensor that is saved again.

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
from weakref import ref

from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from actstore.autograd.handles import Stored
from actstore.autograd.regions import source_at
from actstore.base.layout import layout_of
from actstore.base.operators import APPLY_CODE
from actstore.codecs import Codec
from actstore.codecs.dispatch import KernelCodec
from actstore.policy.decision import Encode
from actstore.store.comparison import compare
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
        if frame is None or frame.f_code is APPLY_CODE:
            return frame is not None
        frame = frame.f_back
    return False
