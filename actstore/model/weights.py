"""The weights and buffers that a recomputed forward uses: those of its first run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from itertools import chain
from operator import is_
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from actstore.base.storage import storages_of
from actstore.errors import MutationError, StateError
from actstore.model.names import is_of_torch
from actstore.model.norms import STATISTICS, NormStatistics, give_back
from actstore.model.writes import Entries, WatchedTensor, WriteHistory, by_copy

MAX_COPIED_NBYTES = 2**12  # of a buffer that forward does not write to
_EMBEDDINGS = (Embedding, EmbeddingBag)


class _Versions(list[tuple[Tensor, int]]):
    """Tensors and their versions, expected at the next run. `shared` where several calls expect them."""

    shared = False


class Weights:
    """The parameters and buffers of modules before a forward, so that it can run with them again.

    They differ from the modules' own where `torch.func.functional_call` runs the model, which removes its own before
    backward, and where a module replaces a buffer in its forward. Normalisations get copies of their statistics from
    before the forward, so that it reads these, and a step updates them once. Spectral norms get their previous
    estimates, since each run continues from the last one's. FSDP and DTensor gather sharded weights themselves.

    Buffers, and tensors in attributes, that the forward writes to in place come back as copies from before it. Other
    values are not copied. After an in-place change the forward cannot run again, and `rewind` refuses it. For
    parameters all changes count, except those by the forward itself: these may be repeated if they then change nothing,
    and `resume` refuses the rest. For buffers, changes count where autograd saved them.

    Parameters
    ----------
    root : the module whose forward is to run again
    modules : `root` and all modules inside it, `root` first
    once : modules among them whose forward does not run again: the values of their buffers after it count
    history : what earlier forwards of `root` have written to
    hidden : makes a stand-in for a tensor of this name that other code has written to since. Its use is an error

    Attributes
    ----------
    buffers : the buffers to report to `saved`, by the identity of their storage

    Notes
    -----
    Several threads may recompute the same normalisations at once. A forward with weights of `functional_call` must not
    run or be recomputed beside another; nor must spectral norms. A forward that runs while a thread recomputes the
    same normalisation loses its running statistics, and does not limit the norms of embedding rows.
    """

    def __init__(
        self,
        root: Module,
        modules: Iterable[Module],
        once: Container[Module] = (),
        history: WriteHistory | None = None,
        hidden: Callable[[str], Any] | None = None,
    ) -> None:
        self._root = root
        self._history = history or WriteHistory()
        self._watched: list[WatchedTensor] = []  # the forward may write to them
        self._written: list[WatchedTensor] = []  # it has, and their copies are from before
        self._repeated: list[tuple[str, Tensor]] = []  # it has, and nothing has their values from before
        # It has not: with their versions, and copies of small ones.
        self._unwritten: list[tuple[Entries, str, ref[Tensor], int, Tensor | None]] = []
        self._hidden = hidden
        self._late: dict[Module, Entries] = {}  # buffers of modules whose forward does not run again
        self._seen: list[tuple[Entries, Entries]] = []
        self._norms: list[_NormBase] = []  # whose statistics are to be copied
        self._statistics: list[NormStatistics] = []
        self._estimates: list[tuple[Entries, Entries]] = []
        self._computed: list[tuple[Entries, str]] = []  # weights that a hook computes before each forward
        self._limits: list[tuple[Embedding | EmbeddingBag, float]] = []  # `max_norm` of embedding rows
        self._versions = _Versions()  # of parameters and buffers
        self._trained: list[tuple[Tensor, bool]] = []  # parameters, and whether they required a gradient
        self._saved: list[tuple[Tensor, int]] = []
        self.buffers: dict[int, Tensor] = {}
        for module in modules:
            parameters: Entries = module._parameters
            if parameters:
                self._seen.append((parameters, dict(parameters)))
                known = [p for p in parameters.values() if _has_version(p)]
                self._versions += [(p, p._version) for p in known]
                self._trained += [(p, p.requires_grad) for p in known if p.is_leaf]
            if isinstance(module, _EMBEDDINGS) and module.max_norm is not None:
                self._limits.append((module, module.max_norm))
            hooked = self._hooked(module) if module._forward_pre_hooks else False
            if hooked:
                self._estimates.append((module._buffers, _copies(module._buffers)))
            if module not in once:
                self._written_by(module, {} if hooked else module._buffers)
            elif not hooked:
                self._late[module] = module._buffers
                self._report(module._buffers)
        self._copy_statistics()
        self._meanwhile: list[tuple[Entries, Entries]] = []
        self._borrowed: list[tuple[Module, Entries]] = []  # norms with their copies
        self._first: list[tuple[str, Tensor, Tensor]] = []  # written tensors with the values of the first run
        self._switched: list[Tensor] = []  # parameters that require a gradient for the second run alone, or not for it

    def _written_by(self, module: Module, buffers: Entries) -> None:
        """Note the buffers and attributes of a module whose forward runs again, and may write to them."""
        kind: Any = type(module)
        if not is_of_torch(kind):
            self._watch(vars(module), vars(module))
        if not buffers:
            return
        others = dict(buffers)
        if isinstance(module, _NormBase):
            self._norms.append(module)
            others = {name: each for name, each in buffers.items() if name not in STATISTICS}
            if not module.training:
                tracked = buffers.get("num_batches_tracked")  # moving the statistics changes its version, not theirs
                self._versions += [(tracked, tracked._version)] if _has_version(tracked) else []
                self._report(buffers)
        if others:
            self._seen.append((buffers, others))
            self._watch(buffers, others)
            self._report(others)

    def _copy_statistics(self) -> None:
        if self._norms:
            self._statistics.append(NormStatistics(self._norms))
            self._norms = []

    def _report(self, buffers: Entries) -> None:
        known = [buffer for buffer in buffers.values() if _has_version(buffer)]
        self.buffers |= {storage._cdata: buffer for buffer in known for storage in storages_of(buffer)}

    def run_again(self, modules: Iterable[Module]) -> None:
        """Note that modules among `once` are about to run as parts of the forward, and will do so again with it."""
        for module in modules:
            if (buffers := self._late.pop(module, None)) is not None:
                self._written_by(module, buffers)
        self._copy_statistics()

    def _watch(self, entries: Entries, among: Entries) -> None:
        """Note tensors that the forward may write to, with copies where it is not known that it does not."""
        if Tensor not in map(type, among.values()):  # the common case
            return
        fresh = self._root.training not in self._history.ended
        for name, tensor in among.items():
            if type(tensor) is Tensor and _has_version(tensor):
                known = fresh or (id(entries), name) in self._history.known or _is_small(tensor)
                copy = tensor.detach().clone() if known else None
                self._watched.append(WatchedTensor(entries, name, tensor, tensor._version, copy))

    def _hooked(self, module: Module) -> bool:
        """Note weights that hooks compute, and return whether a hook of `torch.nn.utils.spectral_norm` does."""
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm | WeightNorm)]
        for hook in hooks:
            entries = vars(module)
            self._computed.append((entries, hook.name))
            if module is self._root:  # the hook has run, and does not run again with the forward
                self._seen.append((entries, {hook.name: entries[hook.name]}))
        return any(isinstance(hook, SpectralNorm) for hook in hooks)

    def saved(self, storage: int) -> None:
        """Note that autograd has saved a tensor with the storage of one of the `buffers` in the forward."""
        buffer = self.buffers[storage]
        self._saved.append((buffer, buffer._version))

    def ended(self) -> None:
        """Mark the end of the forward. What the forward itself wrote to its parameters does not count as a change."""
        unchanged = [(each, version) for each, version in self._versions if each._version == version]
        if len(unchanged) < len(self._versions):
            once = {id(module.weight) for module, _ in self._limits}
            names = {id(each): name for name, each in self._root.named_parameters()}
            for each, version in self._versions:
                if each._version != version and id(each) not in once and id(each) in names:
                    self._repeated.append((names[id(each)], each))
        limited = [(each, each._version) for module, _ in self._limits if _has_version(each := module.weight)]
        self._versions = _Versions((*unchanged, *limited, *self._saved))
        self._seen += [(buffers, dict(buffers)) for buffers in self._late.values() if buffers]
        self._end_writes()

    def _end_writes(self) -> None:
        """Drop the copies of tensors that the forward has not written to."""
        written = self._history.end(self._watched, training=self._root.training)
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

    def one_of(self, last: Weights | None) -> Weights:
        """Return `last`, of an earlier call, where it says the same, so that calls that are alike hold it once."""
        if last is None or not (self._is_plain() and last._is_plain() and self._is_same(last)):
            return self
        last._versions.shared = True
        return last

    def _is_plain(self) -> bool:
        """Return whether the forward had parameters alone, and has written to none."""
        others = self._watched or self._written or self._unwritten or self._repeated or self._late or self._statistics
        return not (others or self._estimates or self._computed or self._limits or self._saved or self.buffers)

    def _is_same(self, other: Weights) -> bool:
        versions, seen = (self._versions, other._versions), (self._seen, other._seen)
        if self._root is not other._root or len(versions[0]) != len(versions[1]) or len(seen[0]) != len(seen[1]):
            return False
        if any(a is not b or v != w for (a, v), (b, w) in zip(*versions, strict=True)):
            return False
        if [trained for _, trained in self._trained] != [trained for _, trained in other._trained]:
            return False
        return all(
            entries is others and [*was] == [*were] and all(map(is_, was.values(), were.values()))
            for (entries, was), (others, were) in zip(*seen, strict=True)
        )

    def again(self) -> Weights:
        """Return a twin with the same weights and buffers: several twins may be rewound at once."""
        twin = object.__new__(Weights)
        twin.__dict__ = self.__dict__ | {"_meanwhile": [], "_borrowed": [], "_first": [], "_switched": []}
        return twin

    def rewind(self) -> None:
        """Give the modules their entries from before the forward, until `resume`. A failure leaves nothing changed.

        Raises
        ------
        MutationError : a parameter or buffer from before the forward was changed in place
        """
        for each, version in self._versions:
            if each._version != version:
                self._refuse(each, version)
        try:
            self._switched += [each for each, trained in self._trained if each.requires_grad is not trained]
            _switch(self._switched)
            self._meanwhile += [(entries, {name: entries[name]}) for entries, name in self._computed if name in entries]
            for entries, seen in self._seen:
                _replace(entries, {n: was for n, was in seen.items() if _is_other(entries, n, was)}, self._meanwhile)
            for module, limit in self._limits:  # already limited; a second time could round differently
                self._meanwhile.append((vars(module), {"max_norm": limit}))
                vars(module)["max_norm"] = None
            for buffers, estimates in self._estimates:
                _replace(buffers, _copies(estimates), self._meanwhile)  # the forward changes what it is given
            self._rewind_unwritten()
            copies: dict[int, Tensor] = {}  # a buffer of two modules is one tensor for both
            copied, repeated = by_copy(each.before() for each in self._watched)  # where the forward has not ended
            for entries, name, tensor, _, copy in (*self._written, *copied):
                if copy is not None and name in entries:
                    twin = copies.setdefault(id(tensor), copy.clone())
                    _replace(entries, {name: twin}, self._meanwhile)
            self._first = [(name, each, each.detach().clone()) for name, each in (*self._repeated, *repeated)]
            for statistics in self._statistics:
                self._borrowed += statistics.lend()
        except BaseException:  # no memory for a copy
            self.resume()
            raise

    def _rewind_unwritten(self) -> None:
        """Put copies, or stand-ins, in the place of tensors that other code has written to since the forward.

        Small ones have copies in any case: no version tells a write to `Tensor.data`, also by the forward itself.
        """
        found = [each[2]() for each in self._unwritten if each[4] is not None]
        owners = Counter(tensor.untyped_storage()._cdata for tensor in found if tensor is not None)
        for entries, name, known, version, copy in self._unwritten:
            tensor = known()
            if entries.get(name) is not tensor or tensor is None:
                continue
            is_newer = tensor._version != version
            if copy is not None and (is_newer or owners[tensor.untyped_storage()._cdata] == 1):
                _replace(entries, {name: copy.clone()}, self._meanwhile)
            elif is_newer and self._hidden is not None:
                _replace(entries, {name: self._hidden(name)}, self._meanwhile)

    def _refuse(self, tensor: Tensor, expected: int) -> None:
        named = chain(self._root.named_parameters(), self._root.named_buffers())
        name = next((name for name, each in named if each is tensor), "of a functional call")
        raise MutationError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{'parameter' if tensor.requires_grad else 'weight or buffer'} {name} of a {type(self._root).__name__} "
            f"that is recomputed is at version {tensor._version}; expected version {expected} instead. Recompute "
            "would run with values that forward did not have: call backward before what changes them "
            "(optimizer.step, load_state_dict), or give this module another policy, such as raw.",
            name=name,
            expected=expected,
            found=tensor._version,
        )

    def resume(self) -> None:
        """Give the modules the entries that they had before `rewind`."""
        _switch(self._switched)
        self._switched = []
        give_back(self._borrowed)
        self._borrowed = []
        for entries, before in reversed(self._meanwhile):
            entries.update(before)
        self._meanwhile = []
        first, self._first = self._first, []
        differs = [name for name, each, was in first if not _put_back(each, was)]
        if not self._versions.shared:  # another call would otherwise take the second run's writes for its own
            self._versions[:] = [(each, each._version) for each, _ in self._versions]
        if differs:
            raise StateError(
                f"{differs[0]} of a {type(self._root).__name__} that is recomputed: its forward must not write to it "
                "in place, unless it writes the same each time. Its second run has written other values. "
                "Assign a new tensor instead, or write keep in place of recompute.",
                name=differs[0],
            )


def _has_version(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a version counter shows changes of a tensor, and sharding code does not change it."""
    if tensor is None or tensor.is_inference():
        return False
    kind = tensor.__class__
    return kind is Parameter or (kind is Tensor and not is_flat(tensor))


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


def is_flat(tensor: Tensor) -> bool:
    """Return whether FSDP1 has gathered a weight: it is then part of one flat parameter."""
    return bool(getattr(tensor._base, "_is_flat_param", False))


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
