"""A compiled region as it runs: the store that is entered accounts for what it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from actstore.autograd.handles import Kept
from actstore.autograd.modules import current
from actstore.autograd.tracker import SMALL_INDEX, Tracker
from actstore.autograd.unpack import Handle
from actstore.base.checkpoints import innermost_pack
from actstore.base.ledger import Account
from actstore.base.note import Note
from actstore.base.reaper import Finalizer
from actstore.compiled.table import AGAIN, EXTRA, INPUT, KEPT, PAYLOAD, SAMPLE, TOKEN, SavedRow, Table, running_table
from actstore.compiled.tokens import Puts, nbytes_of_token, site_of
from actstore.errors import PayloadError
from actstore.store.observers import Seal

_UNKNOWN = SavedRow(KEPT, note="saved by a compiled region that tells nothing of its tensors")
_HOOKS = "actstore."
_RECOMPUTING = "actstore.recompute."  # their hooks drop what a region saves


def accounted(call: Callable[..., Any], prefix: str, table: Callable[[], Table | None]) -> Callable[..., Any]:
    """Return the compiled region `call` with the hooks that account for it in the store that is entered.

    Parameters
    ----------
    prefix : name of the compiled module, for the names in the table
    table : returns the table of a region that was partitioned in this process; None for one from a cache
    """

    def run(*args: Any) -> Any:
        tracker, outer = current(), innermost_pack()
        if tracker is None or not torch.is_grad_enabled() or not _is_a_stores(outer):
            return call(*args)
        _, unpack = _top_saved_tensors_default_hooks(False)
        with Puts(tracker, prefix), saved_tensors_hooks(_Packing(tracker, outer, prefix, table).pack, unpack):
            return call(*args)

    return run


def _is_a_stores(pack: Any) -> bool:
    """Return whether the innermost hooks are those of a store."""
    module = getattr(pack, "__module__", "") or ""
    return module.startswith(_HOOKS) and not module.startswith(_RECOMPUTING)


class _Packing:
    """The saves of one run of a region."""

    def __init__(self, tracker: Tracker, outer: Any, prefix: str, table: Callable[[], Table | None]) -> None:
        self._tracker = tracker
        self._outer = outer
        self._prefix = prefix
        self._find = table
        self._table: Table | None = None
        self._number = 0

    def pack(self, tensor: Tensor) -> Handle:
        if self._number == 0:
            self._table = self._find() or running_table() or ()
            self._book_again(row for row in self._table if row.kind == AGAIN)
        rows, number = self._table or (), self._number
        self._number = number + 1
        row = rows[number] if number < len(rows) and rows[number].kind != AGAIN else _UNKNOWN
        if row.kind == INPUT:
            handle: Handle = self._outer(tensor)
            return handle
        return self._keep(tensor, row)

    def _book_again(self, rows: Iterable[SavedRow]) -> None:
        """Add to the ledger what the region would save without the store, and computes again in backward."""
        ledger = self._tracker.frame.place.ledger
        for row in rows:
            account = ledger.account(site_of(self._prefix, row.name, row.number))
            account.decision = row.decision
            account.count += row.tensors
            ledger.add(account, row.saved, 0, 0)

    def _keep(self, tensor: Tensor, row: SavedRow) -> Handle:
        """Return the handle of a section of a payload, or of a tensor that the graph keeps."""
        tracker = self._tracker
        ledger = tracker.frame.place.ledger
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if row.kind == SAMPLE or key in tracker.storages.parameters:
            return tensor.detach(), tensor._version, tracker.frame
        account = ledger.account(site_of(self._prefix, row.name, row.number))
        account.decision, account.exact = row.decision, row.exact
        if row.kind == TOKEN:  # its payload has been booked where it waits, with a note where no tier has room
            account.count += row.tensors
            saved = row.per_byte * nbytes_of_token(tensor) if row.saved < 0 else row.saved
            return Kept(tensor, account, ledger.hold(account, saved, 0, 0))
        account.note = Note(row.note, kept=row.number != SMALL_INDEX)
        if row.kind == PAYLOAD:
            account.count += row.tensors
            saved = row.per_byte * nbytes if row.saved < 0 else row.saved
            kind = Sealed if tracker.home[0].observers.verifies else Kept
            return kind(tensor, account, ledger.hold(account, saved, nbytes, nbytes))
        account.count += 1
        saved = 0 if row.kind == EXTRA else tracker.saved_nbytes(key, storage)
        weak = tracker.storages.kept.get(key)
        first = weak() if weak is not None else None
        if first is not None:
            ledger.add(account, saved, 0, 0)
            return Kept(tensor, account, first)
        kept = Kept(tensor, account, ledger.hold(account, saved, 0, nbytes))
        tracker.storages.kept[key] = ref(kept)
        return kept


class Sealed(Kept):
    """A section of a payload in memory, whose bytes are compared with their checksum at each read."""

    __slots__ = ("_seal",)

    def __init__(self, tensor: Tensor, account: Account, holds: Finalizer | Kept) -> None:
        super().__init__(tensor, account, holds)
        self._seal = Seal(_bytes_of(tensor))

    def get(self) -> Tensor:
        tensor = super().get()
        try:
            self._seal.check(_bytes_of(tensor))
        except PayloadError as error:
            error.add_context(f"while decoding {self.account.site} ({self.account.where}) in a compiled graph")
            raise
        return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return all memory under a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
