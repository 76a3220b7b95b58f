"""What autograd holds in place of a saved tensor. A handle dies exactly when the graph no longer needs it."""

from __future__ import annotations

from typing import Any
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from actstore.errors import ActstoreError, MutationError
from actstore.layout import layout_of
from actstore.ledger import Account, Ledger
from actstore.regions import Region
from actstore.spec import Site, Spec
from actstore.store import Entry

ANY_VERSION = -1  # the version of a handle whose tensor may change after it was saved


class Alias:
    """A tensor that waits as it is: a parameter, or something that cannot be moved.

    `alias` is a detached tensor, never the one that was packed: an output in its own graph would be a cycle that no
    collector frees. It shares the version counter, and so knows of every change in place.
    """

    __slots__ = ("alias", "site", "version")

    def __init__(self, alias: Tensor, version: int, site: Site) -> None:
        self.alias = alias
        self.version = version
        self.site = site

    def get(self) -> Tensor:
        alias = self.alias
        if alias._version != self.version:
            raise mutated(alias, self.version, alias._version, self.site)
        return alias


class Kept:
    """A tensor that waits as it is, and is counted. Aliases of one storage share the first of them (`first`)."""

    __slots__ = ("__weakref__", "account", "alias", "first", "ledger", "nbytes", "version")

    def __init__(
        self, alias: Tensor, version: int, account: Account, ledger: Ledger, nbytes: int, first: Kept | None
    ) -> None:
        self.alias = alias
        self.version = version
        self.account = account
        self.ledger = ledger
        self.nbytes = nbytes  # of the storage; 0 where `first` counts it
        self.first = first

    def get(self) -> Tensor:
        alias = self.alias
        if alias._version != self.version:
            raise mutated(alias, self.version, alias._version, self.account.site)
        return alias

    def __del__(self) -> None:
        if self.nbytes:
            self.ledger.release(self.account, self.nbytes)


class Stored:
    """A tensor that waits in the store: an entry, and the view of its region that must come back."""

    __slots__ = ("__weakref__", "account", "alias", "conj", "entry", "neg", "offset", "region", "spec", "version", "witness")

    def __init__(self, tensor: Tensor, version: int, account: Account, witness: Tensor) -> None:
        self.account = account
        self.spec = Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        self.offset = tensor.storage_offset()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.version = version
        self.witness = witness  # keeps the version counter and none of the memory
        self.alias: Kept | None = None  # the tensor itself, while it is not encoded yet
        self.entry: Entry | None = None
        self.region: Region | None = None

    def get(self) -> Tensor:
        found = self.witness._version
        if found != self.version and self.version != ANY_VERSION:
            raise mutated(self.witness, self.version, found, self.account.site, self.spec)
        if self.entry is None:
            assert self.alias is not None
            return self.alias.alias
        try:
            tensor = self._rebuild(self.entry)
            if self.conj:
                tensor = tensor.conj()
            if self.neg:
                tensor = torch._neg_view(tensor)
            self.spec.check(tensor)
        except ActstoreError as error:
            error.add_context(f"while decoding {self.account.site} ({self.spec}, {self.account.where})")
            raise
        return tensor

    def _rebuild(self, entry: Entry) -> Tensor:
        spec, region = self.spec, self.region
        assert region is not None
        if region.compact is not None:
            dense = torch.empty(region.compact[0], dtype=spec.dtype, device=spec.device)
            entry.store.get(entry, dense)
            tensor = spec.empty()
            tensor.as_strided(*region.compact).copy_(dense)
            return tensor
        if region.count == spec.numel and layout_of(spec.shape, spec.stride).dense:
            tensor = spec.empty()
            entry.store.get(entry, tensor)
            return tensor
        return self._share(entry, region).as_strided(spec.shape, spec.stride, self.offset - region.start)

    def _share(self, entry: Entry, region: Region) -> Tensor:
        """The decoded region, in memory that the views of one backward node share as their originals did.

        A copy is given to each handle once: whoever asks again gets a fresh one. So does everybody once a copy was
        changed in place, or its memory is gone, or another stream is current.
        """
        stream = None if self.spec.device.type == "cpu" else torch.accelerator.current_stream(self.spec.device)
        fresh: _Fresh | None = entry.fresh
        if fresh is not None:
            base = fresh.take(self, stream)
            if base is not None:
                return base
        base = torch.empty(region.count, dtype=self.spec.dtype, device=self.spec.device)
        entry.store.get(entry, base)
        entry.fresh = _Fresh(base, self, stream)
        return base


class _Fresh:
    """A decoded copy that is used again while its memory lives, its version stands and its stream is current."""

    __slots__ = ("served", "storage", "stream", "version", "witness")

    def __init__(self, base: Tensor, handle: Stored, stream: Any) -> None:
        self.storage = StorageWeakRef(base.untyped_storage())
        self.witness = base.detach()
        self.witness.data = base.new_empty(0)
        self.version = base._version
        self.stream = stream
        self.served = {id(handle)}

    def take(self, handle: Stored, stream: Any) -> Tensor | None:
        if id(handle) in self.served or stream != self.stream or self.witness._version != self.version:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        base = self.witness.detach()  # shares the version counter, so that a change is seen by all
        dtype = handle.spec.dtype
        count = storage.nbytes() // dtype.itemsize
        base.data = torch.empty(0, dtype=dtype, device=handle.spec.device).set_(storage, 0, (count,), (1,))
        self.served.add(id(handle))
        return base


def mutated(tensor: Tensor, expected: int, found: int, site: Site, spec: Spec | None = None) -> MutationError:
    """The verdict that autograd gives without a store, with the site named."""
    shape = list(spec.shape if spec is not None else tensor.shape)
    return MutationError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {shape}], saved at {site}, is at version {found}; expected version {expected} instead. "
        "Replace the in-place operation after this point of the model, or, where a copy was stored and the value at "
        "the time of saving is meant, use ActivationStore(..., allow_mutation=True).",
        site=site,
        expected=expected,
        found=found,
    )
