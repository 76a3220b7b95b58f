"""Host memory that payloads cross on their way from an accelerator to disk."""

from __future__ import annotations

from threading import Condition

from actstore.tiers.base import Slot
from actstore.tiers.host import HostTier

STAGED_NBYTES = 256 * 2**20


class Staging:
    """Room in a host tier, of which at most `STAGED_NBYTES` wait to be written; a larger payload waits alone.

    Thread-safe, and not for finalizers.
    """

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self._nbytes = 0
        self._changed = Condition()

    def enter(self, nbytes: int) -> Slot:
        """Room for `nbytes`. The host waits for the disk while there is none."""
        with self._changed:
            self._changed.wait_for(lambda: not self._nbytes or self._nbytes + nbytes <= STAGED_NBYTES)
            self._nbytes += nbytes
        try:
            return self.tier.reserve(nbytes)
        except BaseException:
            self._leave(nbytes)
            raise

    def leave(self, stage: Slot) -> None:
        """Give the room back. Device operations on it may still run: the next owner of the memory waits for them."""
        self.tier.free(stage)
        self._leave(stage.nbytes)

    def _leave(self, nbytes: int) -> None:
        with self._changed:
            self._nbytes -= nbytes
            self._changed.notify_all()
