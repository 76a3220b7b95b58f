"""Decisions of one call of a recomputed region, in order: what each operator that decides has chosen, in compact form.

Bools wait as bits, indices in the narrowest integers. Where a later call takes the result of a ReLU as its input, the
payload of that input holds the gate of the ReLU: its bits are then redundant. When the later call reruns, which is
before the earlier one, the bits are packed from its input, and the payload can be freed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from actstore.autograd.handles import Kept, Stored
from actstore.base.layout import layout_of
from actstore.codecs import Bit1
from actstore.errors import KernelUnavailable

if TYPE_CHECKING:
    from actstore.base.ledger import Account, Ledger
    from actstore.base.reaper import Finalizer


_BITS = Bit1()
PACKED_NUMEL = 512  # smaller masks wait as they are
_NARROW = (torch.uint8, torch.int16, torch.int32)


class Packed(NamedTuple):
    """Bools at one bit an element."""

    bits: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.bits.nbytes

    def read(self) -> Tensor:
        """Return the bools."""
        mask = torch.empty_strided(self.shape, self.stride, dtype=torch.bool, device=self.bits.device)
        _BITS.decode(self.bits, mask)
        return mask


class Copy(NamedTuple):
    """Values in the narrowest dtype that holds them."""

    values: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.values.nbytes

    def read(self) -> Tensor:
        """Return the values, which the caller may change."""
        return self.values.clone() if self.values.dtype is self.dtype else self.values.to(self.dtype)


Choice = Packed | Copy


def choice_of(result: Any, bound: int | None = None) -> Any:
    """Return the compact form of a choice, whose indices are at most `bound`. Python numbers stay as they are."""
    if not isinstance(result, Tensor):
        return result
    if result.dtype is torch.bool and type(result) is Tensor and result.numel() > PACKED_NUMEL and not result.is_meta:
        if not layout_of(tuple(result.shape), result.stride()).dense:
            result = result.contiguous()
        bits = torch.empty((result.numel() + 7) // 8, dtype=torch.uint8, device=result.device)
        _BITS.encode(result.detach(), bits)
        return Packed(bits, tuple(result.shape), result.stride())
    narrow = result.dtype
    if bound is not None and result.dtype in (torch.int32, torch.int64):
        narrow = next((dtype for dtype in _NARROW if bound <= torch.iinfo(dtype).max), narrow)
    return Copy(result.detach().clone() if narrow is result.dtype else result.detach().to(narrow), result.dtype)


def gate_of(result: Tensor) -> Choice:
    """Return a choice of the elements of a ReLU result that are not 0."""
    kernels = _kernels(result)
    if kernels is None or not layout_of(tuple(result.shape), result.stride()).dense:
        choice: Choice = choice_of(result.bool())
        return choice
    numel = result.numel()
    bits = torch.empty((numel + 7) // 8, dtype=torch.uint8)
    kernels.pack(result, bits, numel)
    return Packed(bits, tuple(result.shape), result.stride())


def let_pass(x: Tensor, choice: Choice, *, in_place: bool) -> Tensor:
    """Return ReLU of `x` with the gates of its first run: above 0 where a gate is open, even if `x` is not; else 0."""
    tiny = torch.finfo(x.dtype).tiny  # a normal number: a processor may flush subnormal numbers to 0
    kernels = _kernels(x)
    if kernels is not None and isinstance(choice, Packed) and choice.stride == x.stride():
        result = x if in_place else torch.empty_like(x)
        kernels.let_pass(choice.bits, x, result, x.numel())
        return result
    passes = choice.read()
    result = x.clamp_min_(tiny) if in_place else x.clamp_min(tiny)
    return result.mul_(passes.view(torch.int8) if type(passes) is Tensor else passes)


def _kernels(x: Tensor) -> Any:
    """Return the compiled kernels for a tensor; None where no kernel serves it."""
    if x.numel() <= PACKED_NUMEL or not x.is_cpu or type(x) is not Tensor:
        return None
    return _compiled(x.dtype)


@cache
def _compiled(dtype: torch.dtype) -> Any:
    try:
        from actstore.kernels.cpu.gates import gates  # needs numba
    except KernelUnavailable:  # the codec of bools warns of it
        return None
    return gates(dtype)


class SharedGate:
    """Gate of a ReLU, read from the stored input of a later call.

    Parameters
    ----------
    handle : the handle of that input
    unpack : the unpack hook of that handle
    hold : books held bytes
    """

    __slots__ = ("_choice", "_handle", "_held", "_hold", "_unpack")

    def __init__(self, handle: Any, unpack: Callable[[Any], Tensor], hold: Callable[[int], Finalizer]) -> None:
        self._handle = handle
        self._unpack = unpack
        self._hold = hold
        self._held: Finalizer | None = None
        self._choice: Choice | None = None

    def settle(self, values: Tensor) -> None:
        """Pack the gate of the input's `values`, so that the payload is no longer needed."""
        if self._choice is None:
            choice = gate_of(values)
            self._held = self._hold(choice.nbytes)
            self._choice, self._handle = choice, None

    def choice(self) -> Choice:
        """Return the gate. Safe from any thread."""
        handle = self._handle
        if handle is not None:  # the later call has not rerun yet
            self.settle(self._unpack(handle))
        assert self._choice is not None
        return self._choice


class Decision(NamedTuple):
    """Decision of one call of an operator.

    Attributes
    ----------
    operator : name of the operator
    shape : of its first tensor
    choices : of the operator: tensors, or one Python number
    """

    operator: str
    shape: tuple[int, ...]
    choices: tuple[Any, ...]


class Decisions:
    """Decisions of one call of a region, in order.

    Parameters
    ----------
    region : name of the module and its policy, for messages
    ledger, account : the books of the kept bytes
    compiled : whether the region has compiled parts
    routing : whether only functions that route count

    Attributes
    ----------
    kept : the decisions, in order
    anew : parts of the region whose decisions no mode sees; empty for none
    results : results of ReLU, by the number of the decision, with their versions after ReLU
    nbytes : size of the kept decisions
    """

    __slots__ = (
        "__weakref__",
        "_account",
        "_compiled",
        "_held",
        "_ledger",
        "_shared",
        "anew",
        "kept",
        "nbytes",
        "region",
        "results",
        "routing",
    )

    def __init__(
        self, region: str, ledger: Ledger, account: Account, compiled: bool = False, *, routing: bool = False
    ) -> None:
        self.region = region
        self.routing = routing
        self.anew = ""
        self._compiled = compiled
        self.kept: list[Decision] = []
        self.results: list[tuple[int, ref[Tensor], int]] = []
        self.nbytes = 0
        self._ledger = ledger
        self._account = account
        self._held: Finalizer | None = None
        self._shared = False

    def ended(self) -> None:
        """Record the kept decisions as held, for as long as this object lives."""
        self.nbytes = sum(getattr(choice, "nbytes", 0) for decision in self.kept for choice in decision.choices)
        if self.kept:
            self._held = self._ledger.hold(self._account, 0, self.nbytes, self.nbytes)
        self._tell()

    def share(self, number: int, handle: Any, unpack: Callable[[Any], Tensor]) -> SharedGate:
        """Read decision `number`, one of ReLU, from the `handle` of its result instead, and free its bits."""
        gate = SharedGate(handle, unpack, partial(self._ledger.hold, self._account, 0, 0))
        decision = self.kept[number]
        freed = decision.choices[0].nbytes
        self.kept[number] = decision._replace(choices=(gate,))
        self.nbytes -= freed
        self._held = None
        self._held = self._ledger.hold(self._account, 0, -freed, self.nbytes)
        self._shared = True
        self._tell()
        return gate

    def _tell(self) -> None:
        """Note in the report which decisions are kept."""
        notes = []
        if self.kept:
            names = ", ".join(dict.fromkeys(decision.operator for decision in self.kept))
            beside = ", and one is read from the next input" if self._shared else ""
            notes.append(f"decisions of {names} keep {self.nbytes:,} bytes{beside}")
        if self._compiled:
            notes.append("decisions of compiled parts are repeated: they run uncompiled")
        if self.anew:
            notes.append(f"decisions of {self.anew} are made anew")
        if notes:
            self._account.note = self._account.note._replace(decisions="; ".join(notes))


def shape_text(shape: tuple[int, ...]) -> str:
    """Format a shape."""
    return "x".join(map(str, shape)) or "a scalar"


class _ReluResult(NamedTuple):
    """A result of ReLU that is alive at the end of its call."""

    result: ref[Tensor]
    version: int
    decisions: ref[Decisions]
    decision: int


class ReluResults:
    """Results of ReLU that later calls of the same entry of a store may take."""

    def __init__(self) -> None:
        self._results: dict[int, _ReluResult] = {}

    def add(self, decisions: Decisions) -> None:
        """Add the results that are alive when a call ends, which are its output."""
        for decision, result, version in decisions.results:
            tensor = result()
            if tensor is not None:
                self._results[id(tensor)] = _ReluResult(result, version, ref(decisions), decision)
        decisions.results.clear()

    def take(self, leaf: Tensor, handle: Any, unpack: Callable[[Any], Tensor]) -> SharedGate | None:
        """Return a gate that reads the handle of an input, for the call that returned it; None if none is there."""
        found = self._results.pop(id(leaf), None)
        if found is None or found.result() is not leaf or found.version != leaf._version or not _says_zeros(handle):
            return None
        decisions = found.decisions()
        return None if decisions is None else decisions.share(found.decision, handle, unpack)


def _says_zeros(handle: Any) -> bool:
    """Return whether exactly the elements that were 0 come back as 0."""
    if isinstance(handle, Stored):
        owner = handle.owner or handle
        return owner.alias is None and (owner.codec.lossless or getattr(owner.codec, "signs", None) == "keep")
    return isinstance(handle, Kept)
