"""Chains of recomputed calls: an input that an earlier call of the chain returned need not be stored.

Such an input is a `Carry`. It is live from the call that takes it to the next call of the chain. Then it is stored or
freed, as the chain's schedule decided when the call came. Where backward asks for one that is gone, the calls that
lead to it run once more, from inputs that exist. Inputs on the way are kept where the schedule can use them, until
backward has passed them.

    live -> stored | gone        forward
    gone -> kept -> gone         backward

References point from a call to its inputs and from those to the calls that returned them, never back: the graph of a
call holds what its backward needs, and nothing holds the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from actstore.autograd.handles import Kept, check_version
from actstore.base.ledger import Account, Ledger
from actstore.base.reaper import Finalizer
from actstore.base.spec import Spec
from actstore.base.storage import without_memory

if TYPE_CHECKING:
    from actstore.policy import Recompute
    from actstore.recompute.schedule import Schedule

Values = dict["Carry", Tensor]


class ChainedCall(Protocol):
    """A call of a recomputed module, as its chain sees it."""

    region: str
    account: Account
    number: int
    chain: CallChain | None
    made: dict[int, ref[Carry]]
    saved_nbytes: int
    unpack: Callable[[Any], Tensor]

    def carries(self) -> Iterator[Carry]:
        """Return the inputs that other calls of the chain returned."""

    def replay(self, values: Values) -> list[Any]:
        """Run forward for the leaves of its output, on these values of its carries."""


class Carry:
    """A tensor that one call of a chain returns and later calls take as input.

    Attributes
    ----------
    producer, index : the call, and the index of the leaf of its output
    first : the number of the first call that takes it, which is the last one that backward reaches
    handle : the hooks' handle while it is live or stored; None when it is gone
    live : whether the handle serves only until the next call
    kept : after a replay the tensor, the finalizer that books it as gone, and the stream that computed it; else None
    """

    __slots__ = (
        "__weakref__", "account", "any_version", "first", "handle", "index", "kept", "live", "producer", "spec",
        "version", "witness",
    )  # fmt: skip

    def __init__(self, producer: ChainedCall, index: int, first: int, tensor: Tensor, *, any_version: bool) -> None:
        self.producer = producer
        self.index = index
        self.first = first
        self.handle: Any = None
        self.live = False
        self.kept: tuple[Tensor, Finalizer, Any] | None = None
        self.account = producer.account
        self.any_version = any_version  # the tensor may change after a call took it
        self.version = tensor._version
        self.spec = Spec.of(tensor)
        self.witness = without_memory(tensor)

    @property
    def changed(self) -> bool:
        """True if the tensor has changed since the call that returned it."""
        return self.witness._version != self.version

    def there(self) -> bool:
        """Return whether the values need no replay.

        Raises
        ------
        MutationError : the values must not be used, because the tensor has changed
        """
        changed = self.changed
        if changed and not self.any_version:
            check_version(self.witness, self.version, self.account.site, self.spec)
        if self.kept is not None and self.kept[2] == _stream_of(self.witness):
            return True
        return self.handle is not None and not (changed and isinstance(self.handle, Kept))

    def get(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Return the values, where they are `there`."""
        if self.kept is not None and self.kept[2] == _stream_of(self.witness):
            return self.kept[0]
        return unpack(self.handle)

    def keep(self, tensor: Tensor, nbytes: int, ledger: Ledger) -> None:
        """Keep the result of a replay, which holds `nbytes` more, until `kept` is None again."""
        self.kept = tensor, ledger.hold(self.account, 0, 0, nbytes), _stream_of(tensor)


class CallChain:
    """Calls in the order of forward. Each takes inputs that earlier calls returned.

    Parameters
    ----------
    lengths, nth : the dict that keeps the chain's length for the next step, and its key

    Notes
    -----
    Thread-safe: a replay holds the chain's lock.
    """

    def __init__(
        self, decision: Recompute, schedule: Schedule, ledger: Ledger, lengths: dict[int, int], nth: int
    ) -> None:
        self.decision = decision
        self.length = 0
        self._lengths = lengths
        self._nth = nth
        self._schedule = schedule
        self._ledger = ledger
        self._lock = RLock()  # a replayed forward may itself run a backward
        self._live: list[ref[Carry]] = []
        self._stored: dict[int, ref[ChainedCall]] = {}  # calls whose carries are stored, by number
        self._kept: dict[int, list[ref[Carry]]] = {}  # carries that replays keep, by the number of the taking call

    def arrive(self, call: ChainedCall) -> int:
        """Add a call to the chain, and free the live carries.

        Returns
        -------
        int : the number of the last call whose inputs are stored; its own where they will be
        """
        with self._lock:
            call.chain, call.number = self, self.length
            self._lengths[self._nth] = self.length = self.length + 1
            for live in self._live:
                carry = live()
                if carry is not None and carry.live:
                    carry.handle = None
            self._live.clear()
            if call.number == 0:
                return 0
            wanted, given_up = self._schedule.arrive(call.number)
            for number in given_up:
                earlier = self._stored.pop(number)()
                for carry in earlier.carries() if earlier is not None else ():
                    carry.handle = None
            if wanted:
                self._stored[call.number] = ref(call)
            return self._schedule.stored[-1]

    def hold(self, carry: Carry) -> None:
        """Free a carry when the next call arrives."""
        self._live.append(ref(carry))

    def values_for(self, call: ChainedCall) -> Values:
        """Return the carries of a call, for its recomputation.

        Raises
        ------
        MutationError : a carry, or an input of the replay, has changed since a call took it
        """
        with self._lock:
            runs, needed = self._way_to(call)
            values = self._replay(runs, needed, call) if runs else {}
            found = {c: values[c] if c in values else c.get(call.unpack) for c in call.carries()}
            self._kept.pop(call.number, None)
            for carry in found:
                if carry.first >= call.number:  # backward has passed all calls that take it
                    carry.kept = None
                elif carry in values:
                    self._keep([carry], values)
            return found

    @staticmethod
    def _way_to(call: ChainedCall) -> tuple[list[ChainedCall], dict[Carry, int]]:
        """Return the calls that must rerun, in order, and the carries that they must return.

        Each carry has the number of the last call that takes it on the way.
        """
        runs: dict[int, ChainedCall] = {}
        needed: dict[Carry, int] = {}
        ahead = [call]
        while ahead:
            taker = ahead.pop()
            for carry in taker.carries():
                if carry in needed:
                    needed[carry] = max(needed[carry], taker.number)
                elif not carry.there():
                    needed[carry] = taker.number
                    if carry.producer.number not in runs:
                        runs[carry.producer.number] = carry.producer
                        ahead.append(carry.producer)
        return [runs[number] for number in sorted(runs)], needed

    def _replay(self, runs: Sequence[ChainedCall], needed: dict[Carry, int], call: ChainedCall) -> Values:
        first = runs[0].number
        self._forget(call.number)
        keep_at = set(self._schedule.keep(len(runs), first, sum(number < first for number in self._kept)))
        values: Values = {}
        made: list[Carry] = []
        try:
            for i, run in enumerate(runs):
                if i in keep_at:
                    fresh = self._keep(values, values)
                    made += fresh
                    self._kept[run.number] = [ref(carry) for carry in fresh]
                leaves = run.replay({c: values[c] if c in values else c.get(run.unpack) for c in run.carries()})
                for index, weak in run.made.items():
                    carry = weak()
                    if carry is not None and carry in needed:
                        values[carry] = leaves[index].detach()
                transient = sum(tensor.nbytes for carry, tensor in values.items() if carry.kept is None)
                self._ledger.touch_peak(run.account, transient + run.saved_nbytes, "recomputation")
                values = {carry: tensor for carry, tensor in values.items() if needed[carry] > run.number}
        except BaseException as error:
            for carry in made:
                carry.kept = None
            if isinstance(error, Exception):
                error.add_note(f"while replaying {run.region} for its output")
            raise
        return values

    def _keep(self, carries: Iterable[Carry], values: Values) -> list[Carry]:
        """Keep the carries that are not kept yet, and return them. Each storage is booked once."""
        fresh = [carry for carry in carries if carry.kept is None]
        booked = set[int]()
        for carry in fresh:
            storage = values[carry].untyped_storage()
            carry.keep(values[carry], 0 if storage._cdata in booked else storage.nbytes(), self._ledger)
            booked.add(storage._cdata)
        return fresh

    def _forget(self, number: int) -> None:
        """Free the carries that are kept for calls after `number`, which another backward has left."""
        for later in [position for position in self._kept if position > number]:
            for weak in self._kept.pop(later):
                carry = weak()
                if carry is not None and carry.first > number:
                    carry.kept = None


def _stream_of(tensor: Tensor) -> Any:
    """Return the stream on which a tensor's memory can be used without waiting; None on a CPU."""
    return None if tensor.device.type == "cpu" else torch.accelerator.current_stream(tensor.device)
