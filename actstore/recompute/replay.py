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
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from actstore.autograd.handles import Kept, Stored, check_version
from actstore.base.ledger import Account, Ledger
from actstore.base.reaper import Finalizer
from actstore.base.spec import Spec
from actstore.base.storage import storages_of
from actstore.base.trees import Form, unflatten
from actstore.model.generators import GeneratorStates
from actstore.model.surroundings import Surroundings
from actstore.model.weights import Weights
from actstore.recompute.offers import Offers
from actstore.recompute.recording import Recording
from actstore.recompute.repeating import Repeating

if TYPE_CHECKING:
    from actstore.policy import Recompute
    from actstore.recompute.decisions import Decisions
    from actstore.recompute.gates import SharedGate
    from actstore.recompute.schedule import Schedule

Values = dict["Carry", Tensor]


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

    def __init__(self, producer: RegionCall, index: int, first: int, tensor: Tensor, *, any_version: bool) -> None:
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
        self.witness = tensor.detach()
        self.witness.data = tensor.new_empty(0)  # shares the version counter, without the memory

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


class CallInput(NamedTuple):
    """An input of a call: a carry, or the hooks' handle of a tensor from outside the chain.

    `gate` is the gate that an earlier call reads from that handle.
    """

    carry: Carry | None
    handle: Any
    requires_grad: bool
    gate: SharedGate | None = None


class RegionCall:
    """One call of a recomputed module, and all that a rerun needs.

    Parameters
    ----------
    region : the name of the module and its decision, for messages
    account : the books of its inputs
    leaves : its arguments, flat; tensors among them are released once it has run

    Attributes
    ----------
    decisions : decisions of the first run, if later runs repeat them
    """

    __slots__ = (
        "__weakref__", "account", "chain", "decisions", "form", "forward", "generators", "given", "made", "number",
        "region", "rest", "same", "saved_nbytes", "sources", "surroundings", "unpack", "weights",
    )  # fmt: skip

    def __init__(
        self,
        region: str,
        account: Account,
        forward: Callable[..., Any],
        leaves: list[Any],
        form: Form,
        unpack: Callable[[Any], Tensor],
        weights: Weights,
        generators: GeneratorStates,
    ) -> None:
        self.region = region
        self.account = account
        self.forward = forward
        self.given: list[Any] | None = leaves
        self.form = form
        self.rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.unpack = unpack
        self.weights = weights
        self.generators = generators
        self.surroundings = Surroundings()
        self.sources: dict[int, CallInput] = {}
        self.same: dict[int, int] = {}  # arguments that are one tensor: `attention(x, x, x)` tests their identity
        self.chain: CallChain | None = None  # None unless its decision replays inputs
        self.number = 0  # in its chain
        self.made: dict[int, ref[Carry]] = {}  # leaves of its output that later calls take
        self.decisions: Decisions | None = None
        self.saved_nbytes = 0  # saved by autograd in the first run, without the inputs

    def carries(self) -> Iterator[Carry]:
        """Yield the inputs that other calls of the chain have returned."""
        for source in self.sources.values():
            if source.carry is not None:
                yield source.carry

    @property
    def comes_back_exactly(self) -> bool:
        """True if no input is lossy and no input needs a replay."""
        return all(source.carry is None and is_exact(source.handle) for source in self.sources.values())

    def first_run(self) -> Any:
        """Run forward on the call's arguments."""
        assert self.given is not None
        args, kwargs = unflatten(self.given, self.form)
        if self.decisions is None:
            return self.forward(*args, **kwargs)
        with Recording(self.decisions):
            return self.forward(*args, **kwargs)

    def again(self) -> tuple[Callable[[], Any], set[int], Repeating | None]:
        """Prepare a rerun on equal inputs. Returns its function, the storages of inputs booked as held, and its mode.

        The caller rewinds weights, buffers and generators. Repeatable, and safe from any thread.
        """
        values = self.chain.values_for(self) if self.chain is not None else {}
        return self._prepare(values)

    def replay(self, values: Values) -> list[Any]:
        """Rerun forward for its output alone, with `values` as its carries. Returns the leaves of the output.

        Gradients are enabled as in the first run, because operators choose kernels by it and their bits differ.
        """
        run, _, _ = self._prepare(values)
        with self.surroundings.again(), _no_hooks(), self.rewound():
            return tree_leaves(run())

    def _prepare(self, values: Values) -> tuple[Callable[[], Any], set[int], Repeating | None]:
        """Prepare a rerun as `again` does, with `values` as its carries."""
        leaves, kept, fixed = list(self.rest), set[int](), set[int]()
        for i, (carry, handle, requires_grad, gate) in self.sources.items():
            tensor = self.unpack(handle) if carry is None else values[carry]
            if gate is not None:
                gate.settle(tensor)
            if isinstance(handle, Kept) or (carry is not None and (carry.kept or isinstance(carry.handle, Kept))):
                kept.add(tensor.untyped_storage()._cdata)
            source = handle if carry is None else carry.handle
            if is_exact(source) or getattr(source, "alias", None) is not None:
                fixed.update(storage._cdata for storage in storages_of(tensor))
            leaves[i] = _fresh(tensor, requires_grad=requires_grad, copy=carry is not None and carry.changed)
        for i, first in self.same.items():
            leaves[i] = leaves[first]
        args, kwargs = unflatten(leaves, self.form)
        if self.decisions is None:
            return lambda: self.forward(*args, **kwargs), kept, None
        repeating = Repeating(self.decisions, fixed)

        def run() -> Any:
            with repeating:
                return self.forward(*args, **kwargs)

        return run, kept, repeating

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Give modules the weights and buffers of the first run, and generators their states before it, until exit."""
        weights, generators = self.weights.again(), self.generators.again()
        weights.rewind()
        try:
            generators.rewind()
            yield
        finally:
            generators.resume()
            weights.resume()


class CallChain:
    """Calls in the order of forward, each of which takes inputs that earlier calls returned.

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
        self._stored: dict[int, ref[RegionCall]] = {}  # calls whose carries are stored, by number
        self._kept: dict[int, list[ref[Carry]]] = {}  # carries that replays keep, by the number of the taking call

    def arrive(self, call: RegionCall) -> int:
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

    def values_for(self, call: RegionCall) -> Values:
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
    def _way_to(call: RegionCall) -> tuple[list[RegionCall], dict[Carry, int]]:
        """Return the calls that must rerun, in order, and the carries that they must return.

        Each carry has the number of the last call that takes it on the way.
        """
        runs: dict[int, RegionCall] = {}
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

    def _replay(self, runs: Sequence[RegionCall], needed: dict[Carry, int], call: RegionCall) -> Values:
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
        """Free the carries that are kept for calls after `number`, which another backward left behind."""
        for later in [position for position in self._kept if position > number]:
            for weak in self._kept.pop(later):
                carry = weak()
                if carry is not None and carry.first > number:
                    carry.kept = None


class CallOutput(NamedTuple):
    """The output of a call, valid until it changes."""

    root: ref[Tensor]
    call: ref[RegionCall]
    leaf: int
    version: int
    dtype: torch.dtype


class Calls:
    """The recomputed calls of one entry of a store on one thread, and their outputs."""

    def __init__(self) -> None:
        self.generators: GeneratorStates | None = None  # of the last call
        self.offers = Offers()
        self.begun: dict[object, int] = {}  # by module: number of its calls, or of the chains that begin with it
        self._made: dict[tuple[Any, ...], CallOutput] = {}
        self._prune_at = 1024

    def begin(self, what: object) -> int:
        """Count a beginning of `what`. Returns how often it has begun before."""
        before = self.begun.get(what, 0)
        self.begun[what] = before + 1
        return before

    def put_out(self, call: RegionCall, leaves: Iterable[Any]) -> None:
        """Register the tensors of a call's output, so that `find` knows them when a later call takes them."""
        for index, leaf in enumerate(leaves):
            key = _key_of(leaf)
            if key is not None:
                self._made[key] = CallOutput(ref(_root_of(leaf)), ref(call), index, leaf._version, leaf.dtype)
        if len(self._made) > self._prune_at:
            self._made = {key: made for key, made in self._made.items() if made.root() is not None}
            self._prune_at = 1024 + 2 * len(self._made)

    def find(self, leaf: Any, decision: Recompute) -> tuple[RegionCall, int] | None:
        """Return the call under `decision` that returned a tensor, and its leaf's index; None if the tensor changed."""
        key = _key_of(leaf)
        made = self._made.get(key) if key is not None else None
        if made is None or made.root() is not _root_of(leaf):
            return None
        call = made.call()
        if call is None or call.chain is None or call.chain.decision != decision:
            return None
        return (call, made.leaf) if (made.version, made.dtype) == (leaf._version, leaf.dtype) else None


def is_exact(handle: Any) -> bool:
    """Return whether a handle's tensor comes back exactly, as far as the hooks know now."""
    if isinstance(handle, Stored):
        owner = handle.owner or handle
        return owner.alias is None and owner.codec.lossless
    return isinstance(handle, Kept | tuple | Tensor)


def _root_of(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base


def _key_of(leaf: Any) -> tuple[Any, ...] | None:
    """Return a key of a plain tensor, which no other live tensor has unless it is equal; None for any other object."""
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_inference():
        return None
    return id(_root_of(leaf)), leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()


def _fresh(tensor: Tensor, *, requires_grad: bool, copy: bool) -> Tensor:
    """Return an alias without history, or a copy where the forward that takes it may write to it."""
    alias = tensor.detach().clone() if copy else tensor.detach()
    return alias.requires_grad_() if requires_grad else alias


def _stream_of(tensor: Tensor) -> Any:
    """Return the stream on which a tensor's memory can be used without waiting; None on a CPU."""
    return None if tensor.device.type == "cpu" else torch.accelerator.current_stream(tensor.device)


def _no_hooks() -> saved_tensors_hooks:
    """Return hooks for a replay, whose saves must reach neither an enclosing recomputation's hooks nor a store's."""
    return saved_tensors_hooks(Tensor.detach, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
