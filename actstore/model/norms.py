"""The statistics of normalizations, which a forward may read before it updates them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_Lent = list[tuple[Module, dict[str, Any]]]


def updates(module: Module, name: str) -> bool:
    """Return whether a forward of a module writes to its buffer of this name, without a version that tells."""
    return name in STATISTICS and isinstance(module, _NormBase) and module.training


class NormStatistics:
    """Copies of the statistics of normalizations before a forward. A second run of it updates copies of these.

    Versions of tensors do not tell that a norm has updated them. So all are copied, many by one operator.
    """

    def __init__(self, norms: Iterable[Module]) -> None:
        groups: dict[Any, dict[int, Tensor]] = {}
        self._places: list[tuple[Module, str, int]] = []
        for norm in norms:
            for name, buffer in norm._buffers.items():
                if name in STATISTICS:
                    self._places.append((norm, name, id(buffer)))
                    if buffer is not None:
                        groups.setdefault(_key_of(buffer), {})[id(buffer)] = buffer
        self._groups = [
            (key, [*group], [*map(Tensor.numel, group.values())], _joined(key, [*group.values()]))
            for key, group in groups.items()
        ]

    def lend(self) -> _Lent:
        """Give the norms copies of their statistics from before the forward. Returns what `give_back` takes."""
        twins: dict[int, Tensor] = {}
        for key, buffers, sizes, joined in self._groups:
            twins |= {each: part.clone() for each, part in zip(buffers, _parts(key, joined, sizes), strict=True)}
        copies: dict[Module, dict[str, Any]] = {}
        for norm, name, key in self._places:
            copies.setdefault(norm, {})[name] = twins.get(key)
        for norm, lent in copies.items():
            with _lending:
                loan = _loans.setdefault(norm, _StatisticsLoan(norm._buffers.copy(), []))
                loan.lent.append(lent)
                norm._buffers.update(lent)
        return [*copies.items()]


def give_back(lent: _Lent) -> None:
    """Give norms their own statistics back, or the copies of another second run that has not ended."""
    for norm, copies in lent:
        with _lending:
            loan = _loans[norm]
            loan.lent[:] = [each for each in loan.lent if each is not copies]
            norm._buffers.update(loan.lent[-1] if loan.lent else {name: loan.own[name] for name in copies})
            if not loan.lent:
                del _loans[norm]


class _StatisticsLoan(NamedTuple):
    """The buffers of a normalization, and the copies that second runs have in their place."""

    own: dict[str, Any]
    lent: list[dict[str, Any]]


def _key_of(buffer: Tensor) -> Any:
    """Return the key of the buffers that one operator copies: vectors, or numbers."""
    plain = type(buffer) is Tensor and buffer.layout is torch.strided and buffer.ndim < 2
    return (buffer.ndim, buffer.dtype, buffer.device) if plain else id(buffer)


def _joined(key: Any, group: list[Tensor]) -> Tensor:
    """Return a copy of all buffers of a group."""
    if not isinstance(key, tuple):
        return group[0].detach().clone()
    return torch.stack(group) if key[0] == 0 else torch.cat(group)


def _parts(key: Any, joined: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Return views of the copies of the buffers of a group."""
    if not isinstance(key, tuple):
        return (joined,)
    return joined.unbind() if key[0] == 0 else joined.split(sizes)


_lending = Lock()
_loans: dict[Module, _StatisticsLoan] = {}  # of the process, as modules are shared by stores and threads
