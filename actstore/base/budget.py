"""DeviceBudget of bytes that are held on the compute device."""

from __future__ import annotations

from math import inf
from typing import Protocol
from weakref import ref


class RoomMaker(Protocol):
    """An engine that can move bytes off the compute device."""

    def make_room(self, nbytes: int) -> None:
        """Let bytes leave the compute device, so that `nbytes` more fit."""


class DeviceBudget:
    """Most bytes that may be held on the compute device, and the engines that make room for more.

    Attributes
    ----------
    limit : bytes; infinite where nothing limits them
    """

    __slots__ = ("_movers", "limit")

    def __init__(self) -> None:
        self.limit: float = inf
        self._movers: list[ref[RoomMaker]] = []

    def set(self, nbytes: float) -> None:
        """Set the limit."""
        self.limit = nbytes

    def add(self, mover: RoomMaker) -> None:
        """Ask `mover` for room from now on, for as long as it lives."""
        self._movers.append(ref(mover))

    def make_room(self, nbytes: int) -> None:
        """Let what can leave the compute device leave it, before `nbytes` more would exceed the limit."""
        for weak in self._movers:
            mover = weak()
            if mover is not None:
                mover.make_room(nbytes)

    def close(self) -> None:
        """Ask no engine for room any more."""
        self._movers.clear()
