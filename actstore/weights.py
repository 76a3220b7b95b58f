"""The weights and buffers that a recomputed forward sees: those of its first run."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm

Entries = dict[str, Any]  # a module's parameters or its buffers by name; None is one that the module goes without


class Weights:
    """The parameters and buffers of modules before a forward, so that it can run with them again.

    They are others than the modules' own where `torch.func.functional_call` runs the model, which takes its own away
    before backward, and where a module replaces a buffer as it runs. Normalisations get copies of their buffers, so
    that running statistics are updated once a step, and spectral norms the estimates that they had, each of whose runs
    goes on from the last one's. What is sharded is left to those who gather it.

    Notes
    -----
    Several threads may recompute the same normalisations at once. One forward with other weights than the modules' own
    must run, and be recomputed, by itself, as for `functional_call`. Running statistics of a forward that runs while
    another thread recomputes the same normalisation are lost.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        self._seen: list[tuple[Entries, Entries]] = []
        self._norms: list[tuple[_NormBase, Entries]] = []
        self._estimates: list[tuple[Entries, Entries]] = []
        for module in modules:
            buffers: Entries = module._buffers
            parameters: Entries = module._parameters
            if parameters:
                self._seen.append((parameters, dict(parameters)))
            if not buffers:
                continue
            if isinstance(module, _NormBase):
                self._norms.append((module, dict(buffers)))
            elif isinstance(module, _SpectralNorm) and module.training:
                self._estimates.append((buffers, _copies(buffers)))
            else:
                self._seen.append((buffers, dict(buffers)))
        self._meanwhile: list[tuple[Entries, Entries]] = []
        self._borrowers: list[_NormBase] = []

    def again(self) -> Weights:
        """The same weights and buffers, to `rewind` and `resume` by itself: several may be rewound at once."""
        twin = object.__new__(Weights)
        twin.__dict__ = self.__dict__ | {"_meanwhile": [], "_borrowers": []}
        return twin

    def rewind(self) -> None:
        """Give the modules what they had before the forward, until `resume`. Nothing has changed where this fails."""
        try:
            for entries, seen in self._seen:
                _replace(entries, {n: was for n, was in seen.items() if _is_other(entries, n, was)}, self._meanwhile)
            for buffers, estimates in self._estimates:
                _replace(buffers, _copies(estimates), self._meanwhile)  # the forward changes what it is given
            for norm, seen in self._norms:
                _lend(norm, seen)
                self._borrowers.append(norm)
        except BaseException:  # no memory for a copy
            self.resume()
            raise

    def resume(self) -> None:
        """Give the modules what they had before `rewind`."""
        for norm in self._borrowers:
            _give_back(norm)
        self._borrowers = []
        for entries, before in self._meanwhile:
            entries.update(before)
        self._meanwhile = []


def _replace(entries: Entries, others: Entries, before: list[tuple[Entries, Entries]]) -> None:
    if others:
        before.append((entries, {name: entries[name] for name in others}))
        entries.update(others)


def _is_other(entries: Entries, name: str, was: Tensor | None) -> bool:
    """Whether an entry is another tensor than it was, and not the same one gathered or sharded."""
    if name not in entries or (now := entries[name]) is was:
        return False
    return now is None or was is None or not (_is_flat(now) or _is_flat(was) or _sharding(now) != _sharding(was))


def _sharding(tensor: Tensor) -> tuple[Any, Any]:
    """How a DTensor is spread; FSDP2's weights are DTensors, and others while they are gathered."""
    return getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)


def _is_flat(tensor: Tensor) -> bool:
    """Whether FSDP1 has gathered a weight: it is part of one flat parameter."""
    return bool(getattr(tensor._base, "_is_flat_param", False))


def _copies(buffers: Entries) -> Entries:
    return {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}


class _Loan:
    """The buffers that a normalisation gets back when its last user is done."""

    __slots__ = ("own", "users")

    def __init__(self, own: Entries) -> None:
        self.own = own
        self.users = 0


_lending = Lock()
_loans: dict[Module, _Loan] = {}  # of the process, as modules are shared by stores and threads


def _lend(norm: Module, seen: Entries) -> None:
    """Give a normalisation copies of `seen` for its buffers, unless it has copies."""
    with _lending:
        loan = _loans.get(norm)
        if loan is None:
            copies = _copies(seen)
            loan = _loans[norm] = _Loan(dict(norm._buffers))
            norm._buffers.update(copies)
        loan.users += 1


def _give_back(norm: Module) -> None:
    with _lending:
        loan = _loans[norm]
        loan.users -= 1
        if not loan.users:
            norm._buffers.update(loan.own)
            del _loans[norm]
