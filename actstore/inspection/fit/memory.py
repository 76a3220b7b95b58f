"""Bytes of the tensors of a dry step: how many live at each moment, what they are, and what runs then."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from types import FrameType
from typing import Any, Literal, NamedTuple, get_args
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import _engine_run_backward
from torch.nn import Module

from actstore.devices.cpu_memory import NO_RESERVE
from actstore.model.names import named_modules

SOFTMAX = "_log_softmax"  # of logits
_ENGINE: Any = _engine_run_backward.__code__
_COPIES_LOCALS = sys.version_info < (3, 13)  # into a dict that a frame keeps


class RunningModules:
    """Names for what runs, by the Python frames and autograd's nodes.

    Attributes
    ----------
    operator : that runs, by its name in ``aten``
    optimizer : that updates weights now; empty outside of updates
    loss : modules that ran the last softmax of logits, the innermost one first
    """

    def __init__(self) -> None:
        self.operator = self.optimizer = ""
        self.loss: tuple[str, ...] = ()
        self._names: dict[Module, str] = {}
        self._made: dict[int, tuple[str, ...]] = {}  # modules that made a node, by its number
        self._last = -1

    def name(self, model: Module) -> None:
        """Set the model whose modules have names."""
        self._names = {module: name for name, module in named_modules(model)}

    def begin(self, operator: str) -> None:
        """Begin an operator, whose node has been made."""
        self.operator = operator
        if operator == SOFTMAX:
            self.loss = self._running()[0]
        number = _get_sequence_nr() - 1
        if torch.is_grad_enabled() and number != self._last:
            self._made[number], self._last = self._running()[0], number

    def now(self) -> str:
        """Return text such as ``gelu in blocks.3.mlp.1, run again``; for backward the node of the graph is named."""
        if self.optimizer:
            return f"{self.optimizer}.step"
        (modules, in_backward), name = self._running(), self.operator or "payload"
        again = ", run again" if in_backward and modules else ""
        if in_backward and not modules:
            node: Any = _current_autograd_node()
            name, modules = node.name(), self._made.get(node._sequence_nr(), ())
        return f"{name} in {modules[0] or 'the model'}{again}" if modules else name

    def _running(self) -> tuple[tuple[str, ...], bool]:
        """Return the modules whose forwards run, up to the innermost backward, and whether there is one."""
        found: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not _ENGINE:
            if frame.f_code.co_name == "forward" and (module := _owner(frame)) in self._names:
                found.append(self._names[module])
            frame = frame.f_back
        return tuple(found), frame is not None


def _owner(frame: FrameType) -> Any:
    names = frame.f_locals
    found = names.get("self")
    if _COPIES_LOCALS:
        names.clear()  # it would hold tensors as long as the function runs
    return found if isinstance(found, Module) else None


Label = Literal["weights", "gathered", "gradients", "optimizer", "logits", "payloads", "activations", "working"]
# A tensor keeps the label of the highest rank that it had: a weight that autograd saves is a weight.
RANKS: dict[Label, int] = {label: rank for rank, label in enumerate(reversed(get_args(Label)))}


class _UntouchedPages(mmap):
    """Pages that no one has touched: addresses without memory. They die with their storage."""


class _Counted(NamedTuple):
    """A storage in the book.

    Attributes
    ----------
    nbytes : that one rank has
    number : counts storages
    parts : ranks that split it; each has a part
    address : where its memory begins, if other storages may share it; else 0
    """

    nbytes: int
    label: Label
    number: int
    parts: int
    address: int = 0


class LiveMemory:
    """Book of the storages that live on one rank, each with a label, and of its peak.

    Attributes
    ----------
    nbytes : of all storages that live
    is_split : whether a storage has more than one part
    running : the modules that run
    peak_at : the operator and module of the peak since `reset`
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.is_split = False
        self.running = RunningModules()
        self.peak_at = self._grew_at = ""
        self._peak_bytes = 0
        self._at_peak = Counter[Label]()
        self._labels = Counter[Label]()
        self._sizes: dict[int, _Counted] = {}  # by storage
        self._count = self._count_at_peak = 0
        self._watches: dict[int, ref[object]] = {}
        self._lent: dict[int, int] = {}  # storages by the addresses of memory that other storages may share

    @property
    def peak_bytes(self) -> int:
        """Peak since `reset`."""
        self._note_peak()
        return self._peak_bytes

    @property
    def at_peak(self) -> Counter[Label]:
        """Bytes by label at that moment; a label that a storage gets later counts, too."""
        self._note_peak()
        return self._at_peak

    def reset(self) -> None:
        """Forget the peak so far."""
        self._peak_bytes, self._at_peak = self.nbytes, self._labels.copy()
        self._count_at_peak = self._count
        self.peak_at = self._grew_at

    def empty(
        self, nbytes: int, label: Label = "working", counted: int | None = None, parts: int = 1
    ) -> UntypedStorage:
        """Return a storage of `nbytes` > 0 on the CPU that takes no memory until someone writes to it.

        Parameters
        ----------
        counted : bytes of one rank; None for all
        parts : ranks that split it
        """
        pages = _UntouchedPages(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS | NO_RESERVE)
        storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        self._add(storage._cdata, nbytes if counted is None else counted, label, parts, pages)
        return storage

    def buffer(self, nbytes: int) -> Tensor:
        """Return uint8 memory for payloads, which a tensor may get as its own: such a tensor counts as this one.

        nbytes : more than 0
        """
        storage = self.empty(nbytes, "payloads")
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        key, address = storage._cdata, storage.data_ptr()
        self._sizes[key] = self._sizes[key]._replace(address=address)
        self._lent[address] = key
        return memory

    def meet(self, tensor: Tensor, label: Label = "working", counted: int | None = None, parts: int = 1) -> None:
        """Count the storage of a tensor that PyTorch has made, unless it is counted."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if self._key(storage) in self._sizes:
            if parts > 1:
                self.split(tensor, parts)
        elif storage.nbytes():
            self._add(storage._cdata, storage.nbytes() if counted is None else counted, label, parts, storage)

    def parts(self, tensor: Tensor) -> int:
        """Return how many ranks split a tensor."""
        found = self._found(tensor)
        return 1 if found is None else found.parts

    def split(self, tensor: Tensor, parts: int) -> None:
        """Count a tensor as one of `parts`, from its beginning."""
        found = self._found(tensor)
        if found is not None and found.parts != parts:
            self._change(tensor, found._replace(nbytes=-(-found.nbytes * found.parts // parts), parts=parts))
            self.is_split = True

    def nbytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor that count."""
        found = self._found(tensor)
        return tensor.nbytes if found is None else found.nbytes

    def resize(self, tensor: Tensor, nbytes: int) -> None:
        """Count other bytes of a tensor from now on."""
        found = self._found(tensor)
        if found is not None:
            self._note_peak()
            self._change(tensor, found._replace(nbytes=nbytes))

    def label(self, tensor: Tensor, label: Label) -> None:
        """Label a tensor, unless its label has a higher rank."""
        self.meet(tensor, label)
        if tensor.layout is torch.strided:
            self.label_all([self._key(tensor.untyped_storage())], label)

    def label_all(self, keys: Iterable[int], label: Label) -> None:
        """Label storages, by their addresses, unless their labels have a higher rank."""
        for key in keys:
            found = self._sizes.get(key)
            if found is not None and RANKS[label] > RANKS[found.label]:
                self._sizes[key] = found._replace(label=label)
                for labels in (self._labels, self._at_peak)[: 1 + (found.number <= self._count_at_peak)]:
                    labels[found.label] -= found.nbytes
                    labels[label] += found.nbytes

    def _note_peak(self) -> None:
        """Note a moment before bytes go: until then a storage that has come may get its parts."""
        if self.nbytes > self._peak_bytes:
            self.reset()

    def _found(self, tensor: Tensor) -> _Counted | None:
        return self._sizes.get(self._key(tensor.untyped_storage())) if tensor.layout is torch.strided else None

    def _key(self, storage: UntypedStorage) -> int:
        """Return the key of a storage in the book, that of the buffer whose memory it has."""
        key: int = storage._cdata
        return self._lent.get(storage.data_ptr(), key) if self._lent and key not in self._sizes else key

    def _change(self, tensor: Tensor, counted: _Counted) -> None:
        key = self._key(tensor.untyped_storage())
        more = counted.nbytes - self._sizes[key].nbytes
        self._sizes[key] = counted
        self._labels[counted.label] += more
        self.nbytes += more

    def _add(self, key: int, nbytes: int, label: Label, parts: int, owner: object) -> None:
        self._count += 1
        self._sizes[key] = _Counted(nbytes, label, self._count, parts)
        self._watches[key] = ref(owner, partial(self._subtract, key))
        self._labels[label] += nbytes
        self.nbytes += nbytes
        if self.nbytes > self._peak_bytes:
            self._grew_at = self.running.now()

    def _subtract(self, key: int, _: ref[object]) -> None:
        self._note_peak()
        found = self._sizes.pop(key)
        self._lent.pop(found.address, None)
        del self._watches[key]
        self._labels[found.label] -= found.nbytes
        self.nbytes -= found.nbytes
