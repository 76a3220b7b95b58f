"""Payloads of variable size: their length is known after they are encoded, on an accelerator later still."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch

from actstore.base.ledger import Ledger
from actstore.base.reaper import Finalizer
from actstore.base.units import round_up
from actstore.kernels.base import ALIGN, LENGTH_NBYTES
from actstore.store.payload import ForwardPass, Payload, Route
from actstore.store.tierset import TierSet
from actstore.tiers import Slot
from actstore.transfer import Berth, Readback, Readbacks


class VariablePayloads:
    """Payloads of variable size on one compute device.

    A tensor is encoded into room for the longest payload, and its bytes move to room for just these: at once where the
    compute device is a CPU. On an accelerator the payload stays there until its length has come to the host. The host
    does not wait: `move_known` and later payloads look.
    """

    def __init__(self, place: TierSet, ledger: Ledger) -> None:
        self._place = place
        self._ledger = ledger
        self._lengths = Readbacks(place.device, LENGTH_NBYTES)
        self._waiting: deque[tuple[ref[Payload], Readback, Sequence[str], ForwardPass]] = deque()  # for their lengths

    def put(self, entry: Payload, src: torch.Tensor, route: Route, saved: int, forward: ForwardPass) -> int | None:
        """Encode `src`. Returns the length of the payload if no tier has room for it; else None."""
        place, tiers, bound = self._place, route.tiers, entry.bound
        stage = place.stage(bound.nbytes)
        try:
            used = bound.encode(src, stage.memory, entry.key)
            late = None if place.device.on_host else self._lengths.expect(stage.memory)
        except BaseException:
            stage.tier.free(stage)
            raise
        entry.room = stage
        entry.last = self._ledger.hold(entry.account, saved, 0, stage.nbytes)
        if late is not None:
            with self._place.late_lock:
                self._waiting.append((ref(entry), late, tiers, forward))
            self.move_known()
            return None
        assert used is not None, "kernels of a CPU return the length of a payload"
        moved = False
        try:
            moved = self._move(entry, stage, used, tiers, forward)
        finally:
            if not moved:
                entry.free()
                self._ledger.add(entry.account, -saved, 0, 0)
        return None if moved else used

    def move_known(self) -> None:
        """Move the payloads whose lengths have come to the host."""
        place = self._place
        while self._waiting:
            with self._place.late_lock:
                if not self._waiting or not self._waiting[0][1].ready():
                    return
                weak, length, tiers, forward = self._waiting.popleft()
                (used,) = self._lengths.take(length, torch.int64)
                entry = weak()
                stage = None if entry is None else entry.room
                if entry is None or not isinstance(stage, Slot):
                    continue
                with place.device.on(length.stream):  # in the order of the encoding, and of the stage's allocator
                    if not self._move(entry, stage, used, tiers, forward):
                        self._move(entry, stage, used, ("device",), forward)
                if forward.ended and place in forward.runs:  # no later call flushes the run
                    place.engine.flush(forward.runs[place])

    def close(self, stack: ExitStack) -> None:
        """Forget the payloads that wait for their lengths. `stack` returns the memory of these at its end."""
        with self._place.late_lock:
            waiting = [length for _, length, _, _ in self._waiting]
            self._waiting.clear()
        stack.callback(self._lengths.close, waiting)

    def _move(self, entry: Payload, stage: Slot, used: int, tiers: Sequence[str], forward: ForwardPass) -> bool:
        """Move the `used` bytes of a stage to the first tier that has room. Returns False where no tier has."""
        place, account, nbytes = self._place, entry.account, min(_roomy(used), stage.nbytes)
        room: Any = place.find(tiers, nbytes, account, forward.runs)
        if room.__class__ is Berth:  # no call, after which an interrupt (Ctrl-C) would lose the berth
            last = Finalizer(room.engine.drop, room)
            try:
                place.device.copy(room.memory, stage.memory[:nbytes], place.device.current())
                room.memory[used:].zero_()  # some tiers compare all bytes
            except BaseException:
                room.engine.cancel(room)
                raise
            entry.last = last
            room.engine.depart(room)
            self._ledger.add(account, 0, used, 0)
        elif room is not None:
            try:
                room.written = place.device.copy(room.memory, stage.memory[:nbytes], place.device.current())
            except BaseException:
                room.tier.free(room)
                raise
            entry.last = None
            entry.last = self._ledger.hold(account, 0, used, room.nbytes)
        else:
            return False
        entry.room = room
        stage.tier.free(stage)
        return True


def _roomy(nbytes: int) -> int:
    """Round up by at most a sixteenth, so that few sizes occur and pools find free buffers of a size."""
    grain = max(ALIGN, 1 << max(0, nbytes.bit_length() - 5))
    return round_up(nbytes, grain)
