"""Byte accounting: what each site saved, stored and holds."""

from __future__ import annotations

from threading import Lock

from actstore.reaper import Reaper
from actstore.spec import Site


class Account:
    """The figures of one site, in bytes; `count` in tensors. Changed by its ledger only."""

    __slots__ = ("away", "count", "held", "held_at_exit", "note", "peak", "saved", "site", "stored", "where")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.saved = 0  # new storages that plain autograd would hold
        self.stored = 0  # payloads made
        self.held = 0  # now on the compute device
        self.away = 0  # now in host memory or on disk
        self.peak = 0  # high-water of held since the last reset
        self.held_at_exit = 0
        self.count = 0  # tensors packed
        self.where = ""  # the decision, as policy text
        self.note = ""  # why the decision was not followed, where it was not


class Ledger:
    """All accounts of one store. Thread-safe; `release` is safe in finalizers."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._gone = Reaper[tuple[Account, int, int]](self._lock, self._book_gone)
        self._accounts: dict[Site, Account] = {}
        self.held = 0
        self.peak = 0
        self.held_at_exit = 0

    def account(self, site: Site) -> Account:
        """The account of `site`, opened at its first use."""
        account = self._accounts.get(site)
        if account is None:
            account = self._accounts.setdefault(site, Account(site))
        return account

    def accounts(self) -> list[Account]:
        self._gone.drain()
        return list(self._accounts.values())

    def add(self, account: Account, *, saved: int = 0, stored: int = 0, held: int = 0, away: int = 0) -> None:
        """Book bytes; each may be negative where bytes move from one place to another."""
        with self._lock:
            account.saved += saved
            account.stored += stored
            account.away += away
            self._hold(account, held)
        if self._gone:
            self._gone.drain()

    def keep(self, account: Account, nbytes: int) -> None:
        """Book a storage that is saved and held as it is: the short form of `add` for the hot path."""
        with self._lock:
            account.saved += nbytes
            account.held = held = account.held + nbytes
            if held > account.peak:
                account.peak = held
            self.held = held = self.held + nbytes
            if held > self.peak:
                self.peak = held
        if self._gone:
            self._gone.drain()

    def release(self, account: Account, held: int, away: int = 0) -> None:
        """Book bytes as gone. Called by finalizers."""
        self._gone.put((account, held, away))

    def touch_peak(self, account: Account, transient: int) -> None:
        """Book a high-water: `transient` more bytes than are held exist on the compute device at this moment."""
        with self._lock:
            account.peak = max(account.peak, account.held + transient)
            self.peak = max(self.peak, self.held + transient)

    def start(self) -> None:
        """Forget the figures of the last forward; what is still held goes on being held."""
        self._gone.drain()
        with self._lock:
            for account in self._accounts.values():
                account.saved = account.stored = account.count = 0
                account.peak = account.held
            self.peak = self.held

    def mark_exit(self) -> None:
        """Remember what is held now: the end of forward."""
        self._gone.drain()
        with self._lock:
            for account in self._accounts.values():
                account.held_at_exit = account.held
            self.held_at_exit = self.held

    def _hold(self, account: Account, nbytes: int) -> None:
        account.held += nbytes
        self.held += nbytes
        account.peak = max(account.peak, account.held)
        self.peak = max(self.peak, self.held)

    def _book_gone(self, item: tuple[Account, int, int]) -> None:
        account, held, away = item
        account.held -= held
        account.away -= away
        self.held -= held
