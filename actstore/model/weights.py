"""The weights and buffers that a recomputed forward uses: those of its first run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from actstore.base.storage import storages_of
from actstore.errors import MutationError, StateError
from actstore.model.norms import STATISTICS, NormStatistics, give_back
from actstore.model.snapshot import AS_IT_IS, Snapshot
from actstore.model.tree import AttributeFound, Entries, ModuleTree, has_version, is_flat, requires_grad_of, versions_of
from actstore.model.writes import WatchedTensor, WriteHistory, by_copy

MAX_COPIED_NBYTES = 2**12  # of a buffer that forward does not write to
_ANY = -1  # version of a parameter to which the forward itself has written


class Weights(Snapshot):
    """The parameters and buffers of modules before a forward, so that it can run with them again.

    They differ from the modules' own where `torch.func.functional_call` runs the model, which removes its own before
    backward, and where a module replaces a buffer in its forward. Normalizations get copies of their statistics from
    before the forward, so that it reads these, and a step updates them once. Spectral norms get their previous
    estimates, since each run continues from the last one's. FSDP and DTensor gather sharded weights themselves.

    Buffers, and tensors in attributes, that the forward writes to in place come back as copies from before it. Other
    values are not copied. After an in-place change the forward cannot run again, and `rewound` refuses it. For
    parameters all changes count, except those by the forward itself: these may be repeated if they then change nothing,
    and the end of the second run refuses the rest. For buffers, changes count where autograd saved them.

    Parameters
    ----------
    tree : the modules
    history : what earlier forwards of `root` have written to
    hidden : makes a stand-in for a tensor of this name that other code has written to since. Its use is an error

    Attributes
    ----------
    buffers : the buffers to report to `saved`, by the identity of their storage

    Notes
    -----
    Several threads may recompute the same normalizations at once. A forward with weights of `functional_call` must not
    run or be recomputed beside another; nor must spectral norms. A forward that runs while a thread recomputes the
    same normalization loses its running statistics, and does not limit the norms of embedding rows.
    """

    def __init__(
        self,
        tree: ModuleTree,
        loose: Iterable[AttributeFound] = (),
        history: WriteHistory | None = None,
        hidden: Callable[[str], Any] | None = None,
    ) -> None:
        self._tree = tree
        self._expected = versions_of(tree.parameters)
        self._trained = [*map(requires_grad_of, tree.leaves)]
        self._versions: list[tuple[Tensor, int]] = []  # of other tensors
        self._history = history or WriteHistory()
        self._watched: list[WatchedTensor] = []  # the forward may write to them
        self._written: list[WatchedTensor] = []  # it has, and their copies are from before
        self._repeated: list[tuple[str, Tensor]] = []  # it has, and nothing has their values from before
        # It has not: with their versions, and copies of small ones.
        self._unwritten: list[tuple[Entries, str, ref[Tensor], int, Tensor | None]] = []
        self._hidden = hidden
        self._seen: list[tuple[Entries, Entries]] = []  # buffers, and weights that a hook has computed
        self._estimates: list[tuple[Entries, Entries]] = []
        self._computed: list[tuple[Entries, str]] = []  # weights that a hook computes before each forward
        self._saved: list[tuple[Tensor, int]] = []
        self._has_more = True  # than parameters that are as they were
        self.buffers: dict[int, Tensor] = {}
        norms = []
        for module, runs_again in tree.stateful:
            hooked = self._hooked(module) if module._forward_pre_hooks else False
            if hooked:
                self._estimates.append((module._buffers, _copies(module._buffers)))
                continue
            self._keep_buffers(module, runs_again=runs_again)
            if isinstance(module, _NormBase):
                norms.append(module)
        for each in loose:
            if type(each.value) is Tensor:
                self._watch(each.entries, {each.name: each.value})
        self._statistics = [NormStatistics(norms)] if norms else []

    def _keep_buffers(self, module: Module, *, runs_again: bool) -> None:
        """Keep the buffers of a module, whose forward may write to them."""
        buffers: Entries = module._buffers
        others = dict(buffers)
        if isinstance(module, _NormBase):
            others = {name: each for name, each in buffers.items() if name not in STATISTICS}
            if runs_again and not module.training:
                tracked = buffers.get("num_batches_tracked")  # moving the statistics changes its version, not theirs
                self._versions += [(tracked, tracked._version)] if has_version(tracked) else []
                self._report(buffers)
        if others:
            self._seen.append((buffers, others))
            self._watch(buffers, others)
            self._report(others)

    def _report(self, buffers: Entries) -> None:
        known = [buffer for buffer in buffers.values() if has_version(buffer)]
        self.buffers |= {storage._cdata: buffer for buffer in known for storage in storages_of(buffer)}

    def _watch(self, entries: Entries, among: Entries) -> None:
        """Note tensors that the forward may write to, with copies where it is not known that it does not."""
        fresh = self._tree.root.training not in self._history.ended
        for name, tensor in among.items():
            if type(tensor) is Tensor and has_version(tensor):
                known = fresh or (id(entries), name) in self._history.known or _is_small(tensor)
                copy = tensor.detach().clone() if known else None
                self._watched.append(WatchedTensor(entries, name, tensor, tensor._version, copy))

    def _hooked(self, module: Module) -> bool:
        """Note weights that hooks compute, and return whether a hook of `torch.nn.utils.spectral_norm` does."""
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm | WeightNorm)]
        for hook in hooks:
            entries = vars(module)
            self._computed.append((entries, hook.name))
            if module is self._tree.root:  # the hook has run, and does not run again with the forward
                self._seen.append((entries, {hook.name: entries[hook.name]}))
        return any(isinstance(hook, SpectralNorm) for hook in hooks)

    def saved(self, storage: int) -> None:
        """Note that autograd has saved a tensor with the storage of one of the `buffers` in the forward."""
        buffer = self.buffers[storage]
        self._saved.append((buffer, buffer._version))

    def ended(self) -> None:
        """Mark the end of the forward. What the forward itself wrote to its parameters does not count as a change."""
        tree = self._tree
        now = versions_of(tree.parameters)
        if now != self._expected:
            limited = {id(module.weight) for module, _ in tree.limited}
            names = {id(each): name for name, each in tree.root.named_parameters()}
            for i, each in enumerate(tree.parameters):
                if now[i] == self._expected[i]:
                    continue
                self._expected[i] = now[i] if id(each) in limited else _ANY
                if self._expected[i] == _ANY and id(each) in names:
                    self._repeated.append((names[id(each)], each))
        if self._versions or self._saved:
            self._versions = [each for each in self._versions if each[0]._version == each[1]] + self._saved
        self._end_writes()
        more = self._written or self._unwritten or self._repeated or self._seen or self._versions or self._statistics
        self._has_more = bool(more or self._estimates or self._computed or tree.limited)

    def _end_writes(self) -> None:
        """Drop the copies of tensors that the forward has not written to."""
        written = self._history.end(self._watched, training=self._tree.root.training)
        if self._hidden is not None:
            known = {each.key for each in written}
            unwritten = [each for each in self._watched if each.key not in known]
            self._unwritten = [
                (entries, name, ref(tensor), version, copy if _is_small(tensor) else None)
                for entries, name, tensor, version, copy in unwritten
            ]
        self._watched = []
        copied, repeated = by_copy(written)
        self._written += copied
        self._repeated += repeated

    @property
    def is_steady(self) -> bool:
        """True if the forward has changed nothing, and later forwards can change parameters alone."""
        return not (self._has_more or self.buffers)

    def before(self) -> Weights:
        """Return the steady weights before one more forward, which has changed something or may do so."""
        own = Weights(self._tree, (), self._history, self._hidden)
        own._expected, own._trained = [*self._expected], self._trained
        return own

    def one_of(self, last: Weights | None) -> Weights:
        """Return `last`, of an earlier call, where it says the same, so that calls that are alike hold it once."""
        if last is None or not self.is_steady or last._has_more or self._tree is not last._tree:
            return self
        return last if (self._expected, self._trained) == (last._expected, last._trained) else self

    def rewound(self) -> AbstractContextManager[None]:
        """Return a context in which the modules have their weights and buffers from before the forward.

        Raises
        ------
        MutationError : a parameter or buffer from before the forward was changed in place
        """
        self._check()
        tree = self._tree
        same = tree.has_same_parameters() and [*map(requires_grad_of, tree.leaves)] == self._trained
        return AS_IT_IS if same and not self._has_more else RewoundWeights(self)

    def _check(self) -> None:
        """Check that no other code has changed a tensor in place."""
        parameters = self._tree.parameters
        if versions_of(parameters) != self._expected:
            for each, version in zip(parameters, self._expected, strict=True):
                if version not in (each._version, _ANY):
                    self._refuse(each, version)
        for each, version in self._versions:
            if each._version != version:
                self._refuse(each, version)

    def _accept(self) -> None:
        """Expect the versions of now, as a second run has written what the first one wrote."""
        now = versions_of(self._tree.parameters)
        self._expected = [_ANY if was == _ANY else found for was, found in zip(self._expected, now, strict=True)]
        self._versions = [(each, each._version) for each, _ in self._versions]

    def _refuse(self, tensor: Tensor, expected: int) -> None:
        named = chain(self._tree.root.named_parameters(), self._tree.root.named_buffers())
        name = next((name for name, each in named if each is tensor), "of a functional call")
        root = type(self._tree.root).__name__
        raise MutationError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{'parameter' if tensor.requires_grad else 'weight or buffer'} {name} of a {root} "
            f"that is recomputed is at version {tensor._version}; expected version {expected} instead. Recompute "
            "would run with values that forward did not have: call backward before what changes them "
            "(optimizer.step, load_state_dict), or give this module another policy, such as raw.",
            name=name,
            expected=expected,
            found=tensor._version,
        )


class RewoundWeights:
    """Context in which modules have the weights and buffers of a snapshot. A failure leaves nothing changed.

    Raises
    ------
    StateError : the second run has written other values to a tensor than the first one
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._meanwhile: list[tuple[Entries, Entries]] = []
        self._borrowed: list[tuple[Module, Entries]] = []  # norms with their copies
        self._first: list[tuple[str, Tensor, Tensor]] = []  # written tensors with the values of the first run
        self._switched: list[Tensor] = []  # parameters that require a gradient for the second run alone, or not for it

    def __enter__(self) -> None:
        try:
            self._rewind()
        except BaseException:  # no memory for a copy
            self._resume()
            raise

    def __exit__(self, *_: object) -> None:
        self._resume()

    def _rewind(self) -> None:
        weights, tree, before = self._weights, self._weights._tree, self._meanwhile
        trained = zip(tree.leaves, weights._trained, strict=True)
        self._switched += [each for each, was in trained if each.requires_grad is not was]
        _switch(self._switched)
        before += [(entries, {name: entries[name]}) for entries, name in weights._computed if name in entries]
        parameters = (each.registries[0] for each in tree.entries)
        for entries, seen in chain(parameters, weights._seen):
            _replace(entries, {n: was for n, was in seen.items() if _is_other(entries, n, was)}, before)
        for module, limit in tree.limited:  # already limited; a second time could round differently
            before.append((vars(module), {"max_norm": limit}))
            vars(module)["max_norm"] = None
        for buffers, estimates in weights._estimates:
            _replace(buffers, _copies(estimates), before)  # the forward changes what it is given
        self._rewind_unwritten()
        copies: dict[int, Tensor] = {}  # a buffer of two modules is one tensor for both
        copied, repeated = by_copy(each.before() for each in weights._watched)  # where the forward has not ended
        for entries, name, tensor, _, copy in (*weights._written, *copied):
            if copy is not None and name in entries:
                twin = copies.setdefault(id(tensor), copy.clone())
                _replace(entries, {name: twin}, before)
        self._first = [(name, each, each.detach().clone()) for name, each in (*weights._repeated, *repeated)]
        for statistics in weights._statistics:
            self._borrowed += statistics.lend()

    def _rewind_unwritten(self) -> None:
        """Put copies, or stand-ins, in the place of tensors that other code has written to since the forward.

        Small ones have copies in any case: no version tells a write to `Tensor.data`, also by the forward itself.
        """
        found = [each[2]() for each in self._weights._unwritten if each[4] is not None]
        owners = Counter(tensor.untyped_storage()._cdata for tensor in found if tensor is not None)
        for entries, name, known, version, copy in self._weights._unwritten:
            tensor = known()
            if entries.get(name) is not tensor or tensor is None:
                continue
            is_newer = tensor._version != version
            if copy is not None and (is_newer or owners[tensor.untyped_storage()._cdata] == 1):
                _replace(entries, {name: copy.clone()}, self._meanwhile)
            elif is_newer and self._weights._hidden is not None:
                _replace(entries, {name: self._weights._hidden(name)}, self._meanwhile)

    def _resume(self) -> None:
        """Give the modules the entries that they had before."""
        _switch(self._switched)
        give_back(self._borrowed)
        for entries, before in reversed(self._meanwhile):
            entries.update(before)
        differs = [name for name, each, was in self._first if not _put_back(each, was)]
        self._weights._accept()
        if differs:
            raise StateError(
                f"{differs[0]} of a {type(self._weights._tree.root).__name__} that is recomputed: its forward must not "
                "write to it in place, unless it writes the same each time. Its second run has written other values. "
                "Assign a new tensor instead, or write keep in place of recompute.",
                name=differs[0],
            )


def _is_small(tensor: Tensor) -> bool:
    """Return whether a copy of a tensor may wait for a second run."""
    return tensor.layout is torch.strided and tensor.numel() * tensor.itemsize <= MAX_COPIED_NBYTES


def _switch(parameters: Iterable[Tensor]) -> None:
    for each in parameters:
        each.requires_grad_(not each.requires_grad)


def _replace(entries: Entries, others: Entries, before: list[tuple[Entries, Entries]]) -> None:
    if others:
        before.append((entries, {name: entries[name] for name in others}))
        entries.update(others)


def _is_other(entries: Entries, name: str, was: Tensor | None) -> bool:
    """Return whether an entry is a different tensor than `was`, and not the same one gathered or sharded."""
    if name not in entries or (now := entries[name]) is was:
        return False
    return now is None or was is None or not (is_flat(now) or is_flat(was) or _sharding(now) != _sharding(was))


def _sharding(tensor: Tensor) -> tuple[Any, Any]:
    """Return the mesh and placements of a DTensor; FSDP2's weights are DTensors, with other ones while gathered."""
    return getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)


def _put_back(tensor: Tensor, was: Tensor) -> bool:
    """Return whether a tensor has the values `was`; give it these if it has not."""
    same = tensor.detach() == was
    if not was.is_floating_point() or was.is_complex():
        is_same = bool(same.all())
    else:
        is_same = bool((same | (was.isnan() & tensor.detach().isnan())).all())
    if not is_same:
        tensor.detach().copy_(was)
    return is_same


def _copies(buffers: Entries) -> Entries:
    return {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}


_parametrize: Any = parametrize


class CachedWeights(Snapshot):
    """Weights that `parametrize.cached()` has at hand when this object is made.

    A forward that runs again computes those that it computed before. The object holds the memory of the weights, and
    not their graph.
    """

    __slots__ = ("_weights",)

    def __init__(self) -> None:
        self._weights: dict[Any, Any] | None = None
        if _parametrize._cache_enabled:
            self._weights = {key: _alias(weight) for key, weight in _parametrize._cache.items()}

    def rewound(self) -> AbstractContextManager[None]:
        return AS_IT_IS if self._weights is None and not _parametrize._cache_enabled else self._placed()

    @contextmanager
    def _placed(self) -> Iterator[None]:
        now = _parametrize._cache_enabled, _parametrize._cache
        _parametrize._cache_enabled = int(self._weights is not None)
        _parametrize._cache = dict(self._weights or {})
        try:
            yield
        finally:
            _parametrize._cache_enabled, _parametrize._cache = now


def _alias(weight: Any) -> Any:
    return weight.detach().requires_grad_(weight.requires_grad) if isinstance(weight, Tensor) else weight
