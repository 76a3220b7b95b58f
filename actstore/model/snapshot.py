"""State from before a forward, which finds it again when it runs a second time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

AS_IT_IS: AbstractContextManager[Any] = nullcontext()


class Snapshot(ABC):
    """State from before a forward. Several second runs of the forward may be under way at once."""

    __slots__ = ()

    def ended(self) -> None:
        """Mark the end of the forward, and drop all that it left as it was."""
        return

    @abstractmethod
    def rewound(self) -> AbstractContextManager[Any]:
        """Return a context with the state from before the forward, for a second run; that of now comes back afterwards.

        It is `AS_IT_IS` where the state is that of now.
        """
