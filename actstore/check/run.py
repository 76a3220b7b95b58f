"""Runs of a training step from a known state, their checksums, and the comparison of their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import local
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _current_graph_task_id
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from actstore.autograd.modules import GlobalHook
from actstore.base.operators import ACCUMULATE_GRAD
from actstore.check.result import TensorComparison
from actstore.errors import ConfigError, StateError
from actstore.model.names import named_modules
from actstore.recompute.tiles import checking
from actstore.rerun.state import ModelState, require_initialized
from actstore.rerun.step import is_number, leaves_of, run_backward, takes_store
from actstore.rerun.values import Error, compare, copies, digest
from actstore.session.activation_store import ActivationStore
from actstore.session.entries import is_active


class Key(NamedTuple):
    """Identity of a tensor in a run: the same in another run of the same program.

    kind : "output" of a module; "incoming" or "outgoing" gradient of an operation
    call : number of earlier calls of the module
    operation : the name of the autograd node, "" for outputs
    number : index among the operations of that name in the call
    time : number of earlier backward runs of the operation
    place : index among its tensors
    """

    kind: str
    module: str
    call: int
    operation: str
    number: int
    time: int
    place: int


@dataclass
class Observation:
    """Shape, dtype and checksums of a tensor in a run."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digests: list[Any]  # 0-d tensors on the device until the run ends, numbers from then on

    def differs(self, other: Observation) -> bool:
        return (self.shape, self.dtype, self.digests) != (other.shape, other.dtype, other.digests)


@dataclass
class _ModuleCall:
    """A call of a module that has not returned."""

    module: Module
    name: str
    number: int
    begin: int  # sequence number of the first autograd node that it makes


@dataclass
class RunWatch:
    """Context manager around one run.

    Parameters
    ----------
    names : the modules to watch
    leaves : the tensors whose gradients to keep
    on_call : a function that the watch calls at each call of one of these modules
    capture : the one tensor to copy to host memory

    Notes
    -----
    The watch attaches nothing to the model. It does not watch recomputes in backward, nor threads other than this one
    and autograd's. Autograd nodes belong to the innermost module that made them.
    """

    names: dict[Module, str]
    leaves: dict[str, Tensor]
    on_call: Callable[[], None]
    capture: Key | None = None
    seen: dict[Key, Observation] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)  # as accumulated, in host memory
    captured: list[Tensor] | None = None

    def __enter__(self) -> RunWatch:
        self._calls: list[_ModuleCall] = []
        self._counts: Counter[str] = Counter()
        self._nodes: set[Node] = set()  # held, so that their identities stay
        self._times: Counter[tuple[str, int, str, int]] = Counter()
        self._hooks: list[Any] = [*_HOOKS]
        for hook in _HOOKS:
            hook.add()
        for name, leaf in self.leaves.items():
            if leaf.is_leaf and leaf.requires_grad:
                self._hooks.append(_first_after_accumulation(leaf, self._keep_gradient(name)))
        _running.watch = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _running.watch = None
        for hook in self._hooks:
            hook.remove()
        self._nodes.clear()
        self._calls.clear()

    @property
    def ran_backward(self) -> bool:
        return bool(self.gradients) or any(key.kind != "output" for key in self.seen)

    def read(self) -> None:
        """Fetch the checksums. The host waits."""
        waiting: dict[torch.device, list[tuple[Observation, int]]] = {}
        for seen in self.seen.values():
            for i, value in enumerate(seen.digests):
                waiting.setdefault(value.device, []).append((seen, i))
        for device, places in waiting.items():
            if device.type != "cpu":
                torch.accelerator.synchronize(device)  # backward may have used several streams
            numbers = torch.stack([seen.digests[i] for seen, i in places]).tolist()
            for (seen, i), number in zip(places, numbers, strict=True):
                seen.digests[i] = number

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin(self, module: Module) -> None:
        """Note that a module starts to run."""
        self.on_call()
        name = self.names[module]
        self._calls.append(_ModuleCall(module, name, self._counts[name], _get_sequence_nr()))
        self._counts[name] += 1

    def end(self, module: Module, output: Any) -> None:
        """Take the outputs of a module that has run."""
        while self._calls:  # an exception that the model catches leaves calls without an end
            call = self._calls.pop()
            if call.module is module:
                break
        else:
            return
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for place, tensor in enumerate(outputs):
            self._see(Key("output", call.name, call.number, "", 0, 0, place), tensor)
        self._watch_nodes(call, outputs)

    def _watch_nodes(self, call: _ModuleCall, outputs: list[Tensor]) -> None:
        """Watch the nodes that the call made: those that lead to its outputs and that no inner call has claimed."""
        reached: set[Node] = set()
        stack = [tensor.grad_fn for tensor in outputs]
        while stack:
            node = stack.pop()
            if node is None or node in reached or node.name() == ACCUMULATE_GRAD or node._sequence_nr() < call.begin:
                continue
            reached.add(node)
            stack.extend(following for following, _ in node.next_functions)
        found = reached - self._nodes
        self._nodes |= found
        numbers: Counter[str] = Counter()
        for node in sorted(found, key=lambda node: node._sequence_nr()):
            name = node.name()
            self._hooks.append(node.register_hook(self._watch_node(call.name, call.number, name, numbers[name])))
            numbers[name] += 1

    # -- backward -----------------------------------------------------------------------------------------------------

    def _watch_node(self, module: str, call: int, name: str, number: int) -> Callable[[Any, Any], None]:
        where = (module, call, name, number)

        def hook(outgoing: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
            time = self._times[where]
            self._times[where] += 1
            for kind, tensors in (("incoming", incoming), ("outgoing", outgoing)):
                for place, tensor in enumerate(tensors):
                    if tensor is not None:
                        self._see(Key(kind, module, call, name, number, time, place), tensor)

        return hook

    def _keep_gradient(self, name: str) -> Callable[[Tensor], None]:
        def hook(leaf: Tensor) -> None:
            if leaf.grad is not None:
                self.gradients[name] = copies(leaf.grad)

        return hook

    def _see(self, key: Key, tensor: Tensor) -> None:
        self.seen[key] = Observation(tuple(tensor.shape) if not tensor.is_nested else (), tensor.dtype, digest(tensor))
        if key == self.capture:
            self.captured = copies(tensor)


_running = local()  # .watch: of this thread


def _before(module: Module, _: Any) -> None:
    watch = _watch_of(module)
    if watch is not None:
        watch.begin(module)


def _after(module: Module, _: Any, output: Any) -> None:
    watch = _watch_of(module)
    if watch is not None:
        watch.end(module, output)


_HOOKS = GlobalHook(register_module_forward_pre_hook, _before), GlobalHook(register_module_forward_hook, _after)


def _watch_of(module: Module) -> RunWatch | None:
    """Return the watch of this call; None where the call is not watched."""
    if torch.compiler.is_compiling() or checking.get():
        return None
    watch: RunWatch | None = getattr(_running, "watch", None)
    return watch if watch is not None and module in watch.names and _current_graph_task_id() == -1 else None


def _first_after_accumulation(leaf: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook that runs before those of optimizers that step in backward and then release the gradient."""
    handle = leaf.register_post_accumulate_grad_hook(hook)
    hooks: dict[int, Any] = leaf._post_accumulate_grad_hooks  # run in insertion order
    for other in [number for number in hooks if number != handle.id]:
        hooks[other] = hooks.pop(other)
    return handle


def first_difference(expected: RunWatch, found: RunWatch) -> Key | None:
    """Return the first tensor that differs: in forward order of the outputs, else in the order of backward."""
    for outputs in (True, False):
        for key, seen in expected.seen.items():
            other = found.seen.get(key)
            if (key.kind == "output") is outputs and other is not None and seen.differs(other):
                return key
    return None


Leaves = dict[str, Tensor]


def read_leaves(
    caller: str, store: ActivationStore, inputs: Mapping[str, Tensor] | Iterable[Tensor]
) -> tuple[Leaves, Leaves]:
    """Return the inputs by name, and the same together with the parameters of the store's model.

    Raises
    ------
    ConfigError : `store` is not an ActivationStore, or the model has uninitialized parameters
    StateError : a store is active on this thread
    """
    if not isinstance(store, ActivationStore):
        raise ConfigError(f"store={store!r}: must be an ActivationStore, as ActivationStore(model, 'int8 @ host').")
    if is_active():
        raise StateError(f"{caller} was called inside a store's context. Call it outside, it enters the store.")
    require_initialized(store.model)
    named = dict(inputs) if isinstance(inputs, Mapping) else {f"inputs[{i}]": x for i, x in enumerate(inputs)}
    return named, {**(dict(store.model.named_parameters()) if store.model is not None else {}), **named}


Copies = dict[str, list[Tensor]]  # parts of tensors in host memory, by name


@dataclass
class Outcome:
    """Results of a run: copies in host memory."""

    watch: RunWatch
    loss: float | None
    gradients: Copies
    outputs: Copies
    buffers: Copies


class Runner:
    """Runner of a step, each time from the same state."""

    def __init__(
        self,
        step: Callable[..., Any],
        store: ActivationStore,
        leaves: dict[str, Tensor],
        state: ModelState,
    ) -> None:
        self._step, self._store, self._state, self._leaves = step, store, state, leaves
        self._takes_store = takes_store(step)
        self._model = store.model

    def plain(self, capture: Key | None = None) -> Outcome:
        """Run without the store."""
        return self._run(None, capture)

    def stored(self, capture: Key | None = None) -> Outcome:
        """Run with the store: around the step, or passed to it."""
        try:
            return self._run(self._store, capture)
        except Exception as error:
            error.add_note("This was raised with the store; the same step without it ran to its end.")
            raise

    def _run(self, store: ActivationStore | None, capture: Key | None) -> Outcome:
        self._state.restore()
        model = self._model
        names = {module: name for name, module in named_modules(model)} if model is not None else {}
        refuse = _refuse_store if store is None else _allow
        with RunWatch(names, self._leaves, refuse, capture) as watch:
            if self._takes_store:
                returned = self._step(store or nullcontext())
            else:
                with store or nullcontext():
                    returned = self._step()
            outputs = dict(leaves_of(returned))
            if not watch.ran_backward:
                run_backward(outputs)
            watch.read()
            return Outcome(
                watch,
                next((_number(value) for value in outputs.values() if is_number(value)), None),
                self._gradients(watch),
                {name: _copied(value) for name, value in outputs.items()},
                {name: copies(buffer) for name, buffer in model.named_buffers()} if model is not None else {},
            )

    def _gradients(self, watch: RunWatch) -> Copies:
        """Return the gradients as autograd accumulated them, or, without these, as the step left them."""
        return {
            name: found
            for name, leaf in self._leaves.items()
            if (found := watch.gradients.get(name) or (copies(leaf.grad) if leaf.grad is not None else []))
        }


def rows(expected: Copies, found: Copies) -> tuple[TensorComparison, ...]:
    """Compare every tensor of two runs. A tensor that one run lacks differs."""
    made = []
    for name, wanted in expected.items():
        made.append(_row(name, wanted, compare(found.get(name, []), wanted)))
    made += [_row(name, extra, compare(extra, [])) for name, extra in found.items() if name not in expected]
    return tuple(made)


def _row(name: str, parts: list[Tensor], error: Error) -> TensorComparison:
    shape, dtype = (tuple(parts[0].shape), str(parts[0].dtype).removeprefix("torch.")) if parts else ((), "none")
    return TensorComparison(name, shape, dtype, error.equal, error.norm, error.off, error.max_abs)


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _copied(value: Any) -> list[Tensor]:
    return copies(value) if isinstance(value, Tensor) else [torch.tensor(value)]


def _allow() -> None:
    pass


def _refuse_store() -> None:
    if is_active():
        raise StateError(
            "the step entered a store in the plain run. Make the step take the store as its argument and enter it: "
            "def step(store): with store: ..."
        )
