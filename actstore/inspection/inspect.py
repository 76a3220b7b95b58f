"""`inspect_step`: a training step run once plainly and once with a store, with all that autograd saves noted."""

from __future__ import annotations

import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from actstore.autograd.deciders import caller
from actstore.autograd.modules import current
from actstore.autograd.storages import joined, nbytes_of, part_of
from actstore.autograd.unpack import unpack
from actstore.base.call_site import operator_name
from actstore.base.checkpoints import innermost_pack
from actstore.base.layout import layout_of
from actstore.devices import cpu_memory
from actstore.errors import ActstoreError, ConfigError, StateError
from actstore.inspection.beside import BesideActivations
from actstore.inspection.result import Inspection
from actstore.inspection.saved import InspectedTensor
from actstore.inspection.suggestions import Suggestion, suggest
from actstore.inspection.timeline import MemoryPoint, Timeline
from actstore.policy.decision import policy_text
from actstore.rerun.state import ModelState, require_initialized
from actstore.rerun.step import leaves_of, run_backward, takes_store
from actstore.session.activation_store import ActivationStore
from actstore.session.entries import is_active

_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_path("stdlib"))
_SITE = ("site-packages", "dist-packages")


class CodeLine(NamedTuple):
    """The operator that saves a tensor, and where the user's code called it.

    Attributes
    ----------
    operator : the name by which Python calls it, such as ``layer_norm`` or ``@``; empty where that is not known
    file, line, function : of the innermost frame outside of PyTorch, actstore and Python's library; empty without one
    """

    operator: str
    file: str
    line: int
    function: str


def current_line() -> CodeLine:
    """Return the line that runs now, for a saved-tensor hook."""
    frame = caller()
    operator = "" if frame is None else operator_name(frame)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return CodeLine(operator, "", 0, "")
    return CodeLine(operator, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@cache
def _is_users(file: str) -> bool:
    """Return whether a file is neither PyTorch's nor actstore's nor one of Python's library."""
    path = Path(file)
    if path.is_relative_to(_TORCH) or path.is_relative_to(_OURS):
        return False
    standard = path.is_relative_to(_STANDARD) and not any(part in _SITE for part in path.parts)
    return not standard and not file.startswith("<frozen")


RESOLUTION = 1 / 400  # of the peak so far: a smaller change of memory makes no point


class InspectedHandle:
    """Handle of the store in an inspected step. It dies when autograd lets the saved tensor go."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Recorder:
    """Context that stands for a store in one step.

    Attributes
    ----------
    points : the memory at each moment
    saved : the tensors that went through the hooks, in order
    device : where the model is
    entered, ran_backward : whether the step has entered the context, and computed a gradient

    Parameters
    ----------
    plain : whether to count what plain autograd holds; otherwise what the store holds
    """

    def __init__(self, store: ActivationStore, *, plain: bool) -> None:
        model = store.model
        tensors = [] if model is None else [*model.parameters(), *model.buffers()]
        self.points: list[MemoryPoint] = []
        self.saved: list[InspectedTensor] = []
        self._store, self._plain = store, plain
        self._weights = {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}
        self._leaves = [t for t in tensors if t.requires_grad and t.is_leaf]
        self._watches: list[RemovableHandle] = []
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self._modules = Counter[str]()  # bytes that plain autograd holds
        self._storages: dict[int, tuple[str, int]] = {}  # those that autograd holds: the module, and the bytes
        self._tensors = Counter[int]()  # that autograd holds, by storage
        self._parts = defaultdict[int, dict[int, tuple[int, int]]](dict)  # ranges of storages, by their own keys
        self._began, self._own_ns = perf_counter_ns(), 0
        self._most = self._last = 0
        self._gradients: dict[int, int] = {}  # bytes, by weight
        self.entered = self.ran_backward = False

    def __enter__(self) -> Recorder:
        if not self._watches:
            self._watches = [leaf.register_post_accumulate_grad_hook(self._note_gradient) for leaf in self._leaves]
        self._store.__enter__()
        if not self.entered:
            self._began = perf_counter_ns()
        self.entered = True
        self._pack_inner = innermost_pack()
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        self.note()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._store.__exit__(kind, error, trace)
        self.note()

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the gradients that the weights got."""
        return sum(self._gradients.values())

    def end(self) -> None:
        """Note the memory at the end of the step, and remove the hooks of the weights."""
        self.note()
        for watch in self._watches:
            watch.remove()

    def note(self) -> None:
        """Note the memory of this moment."""
        begin = perf_counter_ns()
        self._add_point(begin)
        self._own_ns += perf_counter_ns() - begin

    def _note_gradient(self, leaf: Tensor) -> None:
        """Note the memory when a weight gets its gradient."""
        began = perf_counter_ns()
        self._gradients[id(leaf)] = 0 if leaf.grad is None else leaf.grad.nbytes
        self.ran_backward = True
        self._note_change(began)
        self._own_ns += perf_counter_ns() - began

    def _pack(self, tensor: Tensor) -> InspectedHandle:
        began = perf_counter_ns()
        number = len(self.saved)
        tracker = current()
        module = "" if tracker is None else tracker.frame.place.name
        storage = tensor.untyped_storage() if tensor.layout is torch.strided and not tensor.is_nested else None
        key = 0 if storage is None else storage._cdata
        counts = storage is not None and key not in self._weights
        nbytes = 0 if storage is None else storage.nbytes()
        frame = None if tracker is None else tracker.frame
        grouped = (
            frame is not None and nbytes < frame.keep_below and (tensor._base is None or frame.groups(tensor, nbytes))
        )
        if counts and not grouped and not self._tensors[key]:
            part, known = part_of(tensor, nbytes), joined([*self._parts.get(key, {}).values()])
            nbytes = nbytes_of(joined([*known, part or (0, nbytes)])) - nbytes_of(known)
            if part is not None:
                whole, key = key, hash((key, part))  # each range has a key of its own
                self._parts[whole][key] = part
        new = counts and not self._tensors[key]
        line = current_line()
        self.saved.append(
            InspectedTensor(
                module,
                line.operator,
                "" if tensor.grad_fn is None else tensor.grad_fn.name(),
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                _layout(tensor),
                nbytes if new else 0,
                line.file,
                line.line,
                line.function,
                self._ms(began),
                None,
            )
        )
        self._own_ns += perf_counter_ns() - began
        packed = InspectedHandle(self._pack_inner(tensor))
        own = perf_counter_ns()
        if new:
            self._storages[key] = module, nbytes
            self._modules[module] += nbytes
        self._tensors[key] += counts
        finalize(packed, self._let_go, number, key if counts else None).atexit = False
        self._note_change(own)
        self._own_ns += perf_counter_ns() - own
        return packed

    def _unpack(self, packed: Any) -> Tensor:
        """Return the tensor of a handle; those of payloads in compiled graphs are the store's own."""
        began = perf_counter_ns()
        self.ran_backward = True
        self._note_change(began)
        self._own_ns += perf_counter_ns() - began
        return unpack(packed.handle if isinstance(packed, InspectedHandle) else packed)

    def _let_go(self, number: int, key: int | None) -> None:
        """Note that autograd has let a saved tensor go, and its storage with the last one."""
        self.saved[number] = replace(self.saved[number], freed_ms=self._ms(perf_counter_ns()))
        if key is None:
            return
        self._tensors[key] -= 1
        if not self._tensors[key]:
            for parts in self._parts.values():
                parts.pop(key, None)
            module, nbytes = self._storages.pop(key)
            self._modules[module] -= nbytes

    def _note_change(self, now_ns: int) -> None:
        """Note this moment if the memory has changed by more than the resolution."""
        held = self._modules.total() if self._plain else self._store.held_bytes
        if abs(held - self._last) > RESOLUTION * self._most:
            self._add_point(now_ns)

    def _add_point(self, now_ns: int) -> None:
        modules = dict(self._modules) if self._plain else self._store.held_by_module()
        self._last = sum(modules.values())
        self._most = max(self._most, self._last)
        allocated = cpu_memory.memory_allocated() if self.device.type == "cpu" else _allocated(self.device)
        gradients = sum(leaf.grad.nbytes for leaf in self._leaves if leaf.grad is not None)
        self.points.append(MemoryPoint(self._ms(now_ns), self.ran_backward, modules, allocated, gradients))

    def _ms(self, now_ns: int) -> float:
        return (now_ns - self._began - self._own_ns) / 1e6


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _layout(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return str(tensor.layout).removeprefix("torch.")
    return "dense" if layout_of(tuple(tensor.shape), tensor.stride()).dense else "strided"


def inspect_step(
    step: Callable[..., Any], store: ActivationStore, *, stateful: Iterable[Any] = (), try_policies: bool = False
) -> Inspection:
    """Run a training step plainly and with the store, and note each saved tensor, its line, and the memory.

    Parameters
    ----------
    step : a function that runs forward and backward, in one of the forms that `check_gradients` takes
    store : ``ActivationStore(model, policy)``
    stateful : other objects that the step changes, with `state_dict` and `load_state_dict`. Optimizers are found
        automatically
    try_policies : whether to run the step with each policy that is suggested, and measure it

    Returns
    -------
    Inspection : prints itself as a table of the lines that hold most; `plot` draws the memory through the step

    Raises
    ------
    ConfigError : the step does not fit one of the forms, or computes no gradient, or `store` is not an ActivationStore
    StateError : a store is active here, the step did not enter the store that it was given, or it runs graphs that
        ``store.compile()`` made

    Notes
    -----
    The step runs twice plainly, twice with the store and twice with each policy that is tried, each time from the same
    state, which is restored, also after an exception. Later steps cost nothing. Not thread-safe: other threads must not
    train the model meanwhile.
    """
    if not isinstance(store, ActivationStore):
        raise ConfigError(f"store={store!r}: must be an ActivationStore. Make one: ActivationStore(model, 'int8').")
    if is_active():
        raise StateError("inspect_step was called inside a store's context. Call it outside: it enters the store.")
    require_initialized(store.model)
    passes = takes_store(step)
    with ModelState(store.model, (), stateful) as state, closing(ActivationStore(store.model, min_bytes=0)) as kept:

        def run(recorder: Recorder) -> Recorder:
            state.restore()
            try:
                if passes:
                    returned = step(recorder)
                else:
                    with recorder:
                        returned = step()
                if not recorder.entered:
                    raise StateError(
                        "the step did not enter the store that it was given. Write `with store:` around forward."
                    )
                if not recorder.ran_backward:
                    run_backward(dict(leaves_of(returned)))
                del returned
            finally:
                recorder.end()
            return recorder

        run(Recorder(kept, plain=True))  # the first step of a process allocates more than later ones
        plain = run(Recorder(kept, plain=True))
        beside = BesideActivations.of(store.model, plain.gradients_bytes, state.optimizers)
        seen, counted = sum(tensor.saved_bytes for tensor in plain.saved), kept.report().saved_bytes
        if seen != counted:
            raise StateError(
                f"hooks see {seen} of {counted} bytes that the step saves: the rest is in graphs that "
                "store.compile() made. Inspect the model before it is compiled."
            )

        def run_with(store: ActivationStore) -> Timeline:
            run(Recorder(store, plain=False))  # the store learns the order of backward's reads
            stored = run(Recorder(store, plain=False))
            return Timeline(policy_text(store.policy).replace("\n", "; "), tuple(stored.points))

        timeline = Timeline("plain PyTorch", tuple(plain.points))
        stored = run_with(store)
        suggestions = suggest(plain.saved, timeline, beside.optimizer_bytes, plain.device)
        if try_policies:
            suggestions = tuple(_tried(each, store.model, timeline, run_with) for each in suggestions)
        return Inspection(tuple(plain.saved), timeline, stored, beside, suggestions, store.report())


def _tried(
    suggestion: Suggestion, model: Module | None, plain: Timeline, run_with: Callable[[ActivationStore], Timeline]
) -> Suggestion:
    if not suggestion.policy:
        return suggestion
    with closing(ActivationStore(model, suggestion.policy)) as store:
        try:
            added_ms = run_with(store).ms - plain.ms
        except ActstoreError as error:
            return replace(suggestion, error=str(error))
        return replace(suggestion, tried_peak_bytes=store.report().peak_held_bytes, tried_added_ms=added_ms)
