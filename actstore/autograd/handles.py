"""Handles: objects that autograd holds in place of saved tensors. A handle dies exactly when the graph releases it.

Each handle keeps the version of its tensor, and an object that shares the tensor's version counter. So a change in
place raises the error that autograd raises without a store. A handle never holds the packed tensor itself, except for
parameters, which no graph outputs: an output in its own graph would be a cycle that no collector frees.

* Small: a tuple (alias, version, frame) for parameters and small tensors; the frame accounts for them.
* Kept: a tensor that waits without a codec, on its device.
* Stored: a tensor whose bytes wait in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _get_sequence_nr
from torch._C._dynamo import guards
from torch._subclasses.fake_tensor import unset_fake_temporarily

from actstore.autograd.regions import Region
from actstore.autograd.tracker import Frame
from actstore.base.layout import layout_of
from actstore.base.ledger import Account
from actstore.base.reaper import Finalizer
from actstore.base.spec import Site, Spec, describe
from actstore.base.storage import FleetingTensor
from actstore.errors import ActstoreError, MutationError
from actstore.store.comparison import PayloadComparison
from actstore.store.payload import Payload
from actstore.transfer import Berth

Small = tuple[Tensor, int, Frame]

_guards: Any = guards
_empty_strided_cpu: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = _guards._empty_strided_cpu


class Kept:
    """A tensor that waits without a codec, on its device.

    Attributes
    ----------
    holds : books its storage as held; or the first `Kept` of the same storage, which has that finalizer; or both
    """

    __slots__ = ("__weakref__", "account", "alias", "holds", "version")

    def __init__(self, tensor: Tensor, account: Account, holds: Finalizer | Kept | tuple[Kept, Finalizer]) -> None:
        self.alias = tensor.detach()
        self.version = tensor._version
        self.account = account
        self.holds = holds

    def get(self) -> Tensor:
        if self.alias._version != self.version:
            check_version(self.alias, self.version, self.account.site)
        return self.alias


class Stored(Payload):
    """A tensor whose bytes wait in the store, in this handle's own payload or in that of an `owner`."""

    __slots__ = (
        "alias", "any_version", "born", "conj", "fresh", "neg", "offset", "owner", "proof", "region", "root",
        "shape", "snapshot", "stride", "version", "witness",
    )  # fmt: skip

    def __init__(
        self,
        tensor: Tensor,
        account: Account,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        empty: Tensor,
        any_version: bool,
    ) -> None:
        self.account = account
        self.room = self.last = None
        self.key = 0
        self.shape = shape
        self.stride = stride
        self.offset = 0
        self.conj = self.neg = False
        base = tensor._base
        self.root = ref(tensor if base is None else base)
        self.version = tensor._version
        self.born = _get_sequence_nr()  # one more than that of the node that saves it
        self.any_version = any_version  # the tensor may change after it was saved
        self.witness = witness = tensor.detach()
        witness.data = empty  # keeps the version counter, dtype and device, without the memory
        self.alias: Kept | None = None  # the tensor itself, until it is encoded
        self.snapshot: Tensor | None = None  # its values when it was saved, if it may change before it is encoded
        self.owner: Stored | None = None  # another handle, whose payload serves this tensor
        self.proof: PayloadComparison | None = None  # whether the owner's bytes equal this tensor
        self.fresh: _Fresh | None = None  # the last decoded copy, which several views share
        self.region: Region | None = None  # None: the payload is this tensor, which is contiguous and its whole storage

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.stride, self.witness.dtype, self.witness.device)

    def get(self) -> Tensor:
        changed = self.witness._version != self.version
        if changed and not self.any_version:
            check_version(self.witness, self.version, self.account.site, self.spec)
        if self.alias is not None:
            return self.snapshot if changed and self.snapshot is not None else self.alias.alias
        try:
            owner = self.owner
            if owner is None and self.region is None:
                return self._read(self.shape, self.stride)
            return self._rebuild(self if owner is None else owner)
        except ActstoreError as error:
            error.add_context(f"while decoding {self.account.site} ({self.spec}, {self.account.where})")
            raise

    def covers(self, other: Stored) -> bool:
        """Return whether `other`, which was saved from the same storage, can be rebuilt from this payload."""
        if self.witness.dtype != other.witness.dtype or self.version != other.version or not same_root(self, other):
            return False
        region = self.region or Region(0, prod(self.shape))
        return region.covers(other.offset, layout_of(other.shape, other.stride))

    def _read(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """Return the payload as a dense tensor with memory of its own."""
        room = self.room
        if isinstance(room, Tensor) and not _len_torch_dispatch_stack():  # in a pool, which is in host memory
            tensor = _empty_strided_cpu(shape, stride, self.witness.dtype)
        else:
            memory = self.store.borrow(self, self.witness.dtype) if isinstance(room, Berth) else None
            if memory is not None:
                return memory.as_strided(shape, stride)
            tensor = self.witness.new_empty_strided(shape, stride)
        self.store.get(self, tensor)
        return tensor

    def _rebuild(self, owner: Stored) -> Tensor:
        spec = self.spec
        region = owner.region or Region(0, prod(owner.shape))
        if region.compact is not None:
            dense = torch.empty(region.compact[0], dtype=spec.dtype, device=spec.device)
            owner.store.get(owner, dense)
            tensor = spec.empty()
            tensor.as_strided(*region.compact).copy_(dense)
        elif region.numel == spec.numel and layout_of(spec.shape, spec.stride).dense:
            tensor = owner._read(spec.shape, spec.stride)
        else:
            tensor = self._share(owner, region.numel).as_strided(spec.shape, spec.stride, self.offset - region.start)
        if self.proof is not None:
            self._prove(self.proof, owner)
        if self.conj:
            tensor = tensor.conj()
        if self.neg:
            tensor = torch._neg_view(tensor)
        spec.check(tensor)
        return tensor

    def _prove(self, proof: PayloadComparison, owner: Stored) -> None:
        """Check that the payload of `owner` is what this tensor was when it was saved.

        Raises
        ------
        MutationError : it differs. Where the device has not compared them yet, the next entry of the store raises it
        """
        proof.refuse(
            MutationError(
                f"site={self.account.site}: what is saved twice in one forward must not be written to in between "
                f"without a trace. {owner.account.site} had saved the same memory, then came a write that no version "
                "counter tells of (through .data, or by code that PyTorch does not see), and only the first bytes were "
                "stored. Write in place under torch.no_grad(), or make a new tensor.",
                site=self.account.site,
                expected=self.version,
                found=self.version,
            )
        )

    def _share(self, owner: Stored, numel: int) -> Tensor:
        """Return the decoded region, in memory that the views of one backward node share as their originals did.

        Each handle gets a copy once; a second read gets a fresh copy. So does each read after a change of the copy in
        place, after its memory is freed, and on another stream.
        """
        device = self.witness.device
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        base = owner.fresh.take(self, stream) if owner.fresh is not None else None
        if base is None:
            base = owner._read((numel,), (1,))
            owner.fresh = None if base.is_inference() else _Fresh(base, self, stream)
        return base


class _Fresh(FleetingTensor):
    """A decoded copy, reusable while its memory lives, its version is the same and its stream is current."""

    __slots__ = ("served", "stream")

    def __init__(self, base: Tensor, handle: Stored, stream: Any) -> None:
        super().__init__(base)
        self.stream = stream
        self.served = {id(handle)}

    def take(self, handle: Stored, stream: Any) -> Tensor | None:
        if id(handle) in self.served or stream != self.stream or self.is_changed():
            return None
        base = self.again()
        if base is not None:
            self.served.add(id(handle))
        return base


def same_root(a: Stored, b: Stored) -> bool:
    """Return whether two tensors are views of one tensor and so share its version counter: same version, same values.

    Tensors over one storage need not share it: ``x.data``, `unsafe_chunk` and `set_` start their own counters.
    """
    root = a.root()
    return root is not None and root is b.root()


def alias_of(tensor: Tensor) -> Tensor:
    """Return an alias of `tensor` with its memory, even where a mode makes each new tensor a fake one."""
    with unset_fake_temporarily():
        return tensor.detach()


def check_version(
    tensor: Tensor, expected: int, site: Site, spec: Spec | None = None, *, is_weight: bool = False
) -> None:
    """Raise the error that autograd raises without a store, with the name of the site.

    Raises
    ------
    MutationError : `tensor`, or the tensor that it is the witness of, has another version than `expected`
    """
    found = tensor._version
    if found != expected:
        if is_weight:
            next_step = (
                "It is a weight, which is not copied: run backward before what changes weights, such as "
                "optimizer.step or load_state_dict."
            )
        else:
            next_step = (
                "Replace the in-place operation that follows in the model. Where a copy is stored and the value at the "
                "time of saving is meant, use ActivationStore(..., allow_mutation=True)."
            )
        raise MutationError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{spec or describe(tensor)}], saved at {site}, is at version {found}; expected version {expected} "
            f"instead. {next_step}",
            site=site,
            expected=expected,
            found=found,
        )


def is_exact(handle: Any) -> bool:
    """Return whether a handle's tensor comes back exactly, as far as the hooks know now."""
    if isinstance(handle, Stored):
        owner = handle.owner or handle
        return owner.alias is None and owner.codec.lossless
    return isinstance(handle, Kept | tuple | Tensor)


def is_lossy(handle: Any) -> bool:
    """Return True if the handle's tensor comes back with an error."""
    return isinstance(handle, Stored) and handle.alias is None and not (handle.owner or handle).codec.lossless
