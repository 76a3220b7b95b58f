"""Measures a training step as it runs: the time of each unit in forward and in backward, and the bytes it saves.

Nothing is added to the graph but hooks on outputs of modules; a step that is measured has the gradients of any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.jit import ScriptModule
from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from actstore.codecs.base import Bound, Codec
from actstore.compiled import NamedCall
from actstore.devices import Device
from actstore.ledger import Account, Ledger
from actstore.modules import named_modules
from actstore.plan.profile import KEEP, Figures, Memory, Part
from actstore.recompute import repeated_blocks
from actstore.ticket import Ticket

END = "the end of backward"
FORWARD, BACKWARD = "forward", "backward"
FIRST = re.compile(r"recompute\(first=(\d+)\)")
PLAIN = re.compile(r"[\w.-]+")  # names that a rule can write


@dataclass(frozen=True)
class Shape:
    """A unit as the model's structure tells: its modules, and whether it is one of the model's repeated blocks."""

    name: str
    module: Module
    parts: dict[str, Module]
    repeated: bool

    @property
    def named(self) -> bool:
        """Whether a rule can name it."""
        return PLAIN.fullmatch(self.name) is not None

    @property
    def recomputable(self) -> bool:
        return self.repeated and self.named and can_run_again(self.module)


@dataclass(frozen=True)
class Sample:
    """A step that was measured.

    Attributes
    ----------
    figures : of the units that ran, in the order of forward; several where calls of one unit were decided differently
    calls : of each unit
    total : milliseconds from the entry of this step to that of the next
    rest : the part of it that no unit takes
    backward : whether there was one
    """

    figures: dict[str, list[Figures]]
    calls: dict[str, int]
    total: float
    rest: float
    backward: bool

    @property
    def saved(self) -> int:
        """What plain autograd would hold of the step."""
        return sum(figures[0].total("saved") for figures in self.figures.values())


class Profiler:
    """Measures the steps of one store, one at a time: `begin`, `end_forward`, and at the next entry `finish`.

    Notes
    -----
    Not thread-safe: one thread enters the store while a step is measured. On an accelerator `finish` waits for the
    device. Hooks are on the model's modules from `begin` to `end_forward` only.

    Attributes
    ----------
    writers : names of units and parts that were seen to change their inputs in place: they cannot be run again
    """

    def __init__(self, model: Module, ledger: Ledger) -> None:
        self.writers = set[str]()
        self._model = model
        self._ledger = ledger
        self._hooks: list[Any] = []
        self._step: _Step | None = None
        self._held: dict[Account, int] = {}  # when backward began, if that was before the end of the context
        self.look()

    def look(self) -> None:
        """Look at the model's modules again: some are others now."""
        self.shapes = shapes_of(self._model)
        outer = {inner: module for module in self._model.modules() if (inner := _original(module)) is not None}
        self._modules = {name: outer.get(module, module) for name, module in _timed(self.shapes)}
        self._unit_of = {name: shape.name for shape in self.shapes for name in (shape.name, *_inner(shape))}

    def begin(self, device: Device, decisions: dict[str, str]) -> None:
        """A step begins, with these decisions for units, as policy text seen from each; others are kept."""
        step = self._step = _Step(device, decisions, self._turn, self.writers)
        self._held = {}
        self._hooks.append(self._model.register_forward_hook(step.ending))
        for name, module in self._modules.items():
            enter, leave = step.entering(name), step.leaving(name)
            call = module._compiled_call_impl
            if isinstance(module, ScriptModule):  # takes no hooks: its time counts as that of the rest
                continue
            if call is None:
                self._hooks.append(module.register_forward_pre_hook(enter))
                self._hooks.append(module.register_forward_hook(leave, always_call=True))
            elif isinstance(call, NamedCall):  # its own hooks would be compiled with it, anew in each step
                self._hooks.append(call.watch(enter, leave))

    def end_forward(self) -> None:
        """Forward has ended, or failed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def cancel(self) -> None:
        """Forget the step."""
        self.end_forward()
        self._step = None

    def codec(self, bound: Bound, codec: Codec, account: Account) -> Bound:
        """The same codec; what it takes is measured, and what it loses."""
        step = self._step
        if step is None:
            return bound

        def encode(src: Tensor, out: Tensor, key: int) -> int:
            done = step.work(account, FORWARD)
            used = bound.encode(src, out, key)
            done()
            if not codec.lossless:
                back = torch.empty_like(src)
                bound.decode(out, back, key)
                squares = (torch.linalg.vector_norm(x.float()).square() for x in (back - src, src))
                step.errors.append((account, *squares))
            return used

        def decode(buf: Tensor, out: Tensor, key: int) -> None:
            done = step.work(account, BACKWARD)
            bound.decode(buf, out, key)
            done()

        return bound._replace(encode=encode, decode=decode)

    def recomputing(self, account: Account) -> Callable[[], None]:
        """A recomputation begins; what this returns is called at its end."""
        return _nothing if self._step is None else self._step.work(account, BACKWARD)

    def finish(self) -> Sample | None:
        """The figures of the step that began last; None where it was forgotten, or ran nothing of the model."""
        step, self._step = self._step, None
        self.end_forward()
        if step is None:
            return None
        step.note("end", "")
        forward = step.forward()
        units = [name for name in forward if self._unit_of[name] == name]
        if not units and not step.turned:
            return None
        backward = step.backward()
        parts, transient = self._bytes()
        errors, work = self._errors(step), self._work(step)
        figures: dict[str, list[Figures]] = {}
        for name in [*units, ""]:
            inner = [other for other, unit in self._unit_of.items() if unit == name]
            whole = Figures(
                step.decisions.get(name, KEEP),
                sum(forward.get(name, [])),
                sum(ms for other in inner for ms in backward.get(other, {}).values()),
                parts.get(name, {}),
                transient.get(name, 0),
                errors.get(name, 0.0),
                work.get((name, FORWARD), 0.0),
                work.get((name, BACKWARD), 0.0),
            )
            figures[name] = (
                _split(whole, forward[name], backward.get(name, {})) if len(inner) == 1 and name else [whole]
            )
        busy = sum(sum(forward.get(name, [])) for name in units)
        busy += sum(ms for calls in backward.values() for ms in calls.values())
        calls = {name: len(forward.get(name, [0.0])) for name in figures}
        return Sample(figures, calls, step.total, max(0.0, step.total - busy), step.turned)

    # -----------------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Backward begins."""
        if self._hooks:  # inside the context, at whose end nothing is held any more
            self._held = {account: account.held for account in self._ledger.accounts()}

    def _find(self, site: str) -> tuple[str, str]:
        """The unit of a site, and the part of it."""
        name = site
        while name not in self._unit_of:
            if not name:
                return "", ""
            name = name.rpartition(".")[0]
        unit = self._unit_of[name]
        return unit, name[len(unit) + 1 :] if name != unit else ""

    def _bytes(self) -> tuple[dict[str, dict[str, Part]], dict[str, int]]:
        parts: dict[str, dict[str, Part]] = {}
        transient: dict[str, int] = {}
        for account in self._ledger.accounts():
            held = self._held.get(account, account.held_at_exit)
            if not (account.saved or account.stored or held):
                continue
            unit, part = self._find(account.site.name)
            moved = account.stored if "@" in account.where else 0
            old = parts.setdefault(unit, {}).get(part, Part())
            parts[unit][part] = Part(
                old.saved + account.saved,
                old.held + (0 if moved else held),
                old.host + (moved if "host" in account.where else 0),
                old.disk + (moved if "disk" in account.where else 0),
            )
            above = account.peak - held
            transient[unit] = max(transient.get(unit, 0), above)
        return parts, transient

    def _work(self, step: _Step) -> dict[tuple[str, str], float]:
        """Milliseconds of encoding, decoding and recomputation, by unit and direction."""
        sums: dict[tuple[str, str], float] = {}
        for account, direction, begin, end in step.works:
            key = self._find(account.site.name)[0], direction
            sums[key] = sums.get(key, 0.0) + (_ns(end) - _ns(begin)) / 1e6
        return sums

    def _errors(self, step: _Step) -> dict[str, float]:
        sums: dict[str, list[float]] = {}
        for account, wrong, whole in step.errors:
            unit, _ = self._find(account.site.name)
            total = sums.setdefault(unit, [0.0, 0.0])
            total[0] += float(wrong)
            total[1] += float(whole)
        ratios = {unit: wrong / whole if whole else 0.0 for unit, (wrong, whole) in sums.items()}
        return {unit: ratio if isfinite(ratio) else 1.0 for unit, ratio in ratios.items()}  # of NaN nothing is left


def _nothing() -> None:
    pass


class _Step:
    """The moments of one step."""

    def __init__(self, device: Device, decisions: dict[str, str], turn: Callable[[], None], writers: set[str]) -> None:
        self.decisions = decisions
        self.turned = False  # backward has begun
        self._turn = turn
        self._writers = writers
        self._versions: dict[str, list[list[int]]] = {}  # of the inputs of calls that run
        self.errors: list[tuple[Account, Tensor, Tensor]] = []
        self.works: list[tuple[Account, str, Ticket, Ticket]] = []  # of the store: encoding, decoding, recomputation
        self._device = device
        self._marks: list[tuple[str, str, Ticket]] = []
        self._calls: dict[str, int] = {}
        self._grads: dict[int, list[tuple[str, int, Ticket]]] = {}  # by backward: whose output's gradient came when
        self.note("begin", "")

    def note(self, kind: str, name: str) -> None:
        self._marks.append((kind, name, self._mark()))

    def _mark(self) -> Ticket:
        return self._device.mark(self._device.current())

    def work(self, account: Account, direction: str) -> Callable[[], None]:
        """Some work of the store begins; what this returns is called at its end."""
        begin = self._mark()
        return lambda: self.works.append((account, direction, begin, self._mark()))

    def entering(self, name: str) -> Callable[..., None]:
        def enter(_module: Module, args: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # otherwise it is recomputed
                self._versions.setdefault(name, []).append(_versions(args))
                self.note("enter", name)

        return enter

    def leaving(self, name: str) -> Callable[..., None]:
        def leave(_module: Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return
            self.note("leave", name)
            entered = self._versions.get(name)
            if entered and entered.pop() != _versions(args):
                self._writers.add(name)
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(self._arriving(name, call))

        return leave

    def ending(self, _module: Module, _args: Any, output: Any) -> None:
        """The model has run; if it computes the loss, backward begins at its output."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin)

    def _begin(self, _grad: Tensor | None = None) -> None:
        if not self.turned:
            self.turned = True
            self._turn()

    def _arriving(self, name: str, call: int) -> Callable[[Tensor], None]:
        def arrive(_grad: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            moments = self._grads.get(task)
            if moments is None:
                self._begin()
                moments = self._grads[task] = []
                engine: Any = Variable._execution_engine
                engine.queue_callback(lambda: moments.append((END, 0, self._mark())))
            moments.append((name, call, self._mark()))

        return arrive

    @property
    def total(self) -> float:
        """Milliseconds from the first mark to the last."""
        return (_ns(self._marks[-1][2]) - _ns(self._marks[0][2])) / 1e6

    def forward(self) -> dict[str, list[float]]:
        """Milliseconds of each call of each module, in the order of their first calls."""
        times: dict[str, list[float]] = {}
        entered: dict[str, list[int]] = {}
        for kind, name, ticket in self._marks:
            if kind == "enter":
                times.setdefault(name, [])
                entered.setdefault(name, []).append(_ns(ticket))
            elif kind == "leave" and entered.get(name):
                times[name].append((_ns(ticket) - entered[name].pop()) / 1e6)
        return times

    def backward(self) -> dict[str, dict[int, float]]:
        """Milliseconds from the moment when the gradient of a call's output is there to the next such moment."""
        times: dict[str, dict[int, float]] = {}
        for moments in self._grads.values():
            ordered = sorted((_ns(ticket), name, call) for name, call, ticket in moments)
            for (begin, name, call), (end, _, _) in pairwise(ordered):
                of_calls = times.setdefault(name, {})
                of_calls[call] = of_calls.get(call, 0.0) + (end - begin) / 1e6
        return times


def _versions(args: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _split(whole: Figures, forward: list[float], backward: dict[int, float]) -> list[Figures]:
    """The figures of calls that are recomputed and of calls that are not, each as if all were like them."""
    found = FIRST.fullmatch(whole.decision)
    calls = len(forward)
    if found is None or not 0 < (first := int(found[1])) < calls:
        return [whole]
    saved = whole.total("saved")
    kept = round(saved * (calls - first) / calls)  # all calls are alike
    held = max(0, whole.total("held") - kept) * calls // first
    halves = []
    for decision, chosen, nbytes in (
        ("recompute", range(first), held),
        (KEEP, range(first, calls), saved),
    ):
        scale = calls / len(chosen)
        halves.append(
            Figures(
                decision,
                scale * sum(forward[call] for call in chosen),
                scale * sum(backward.get(call, 0.0) for call in chosen),
                {"": Part(saved, nbytes)},
                whole.transient if decision == "recompute" else 0,
                work_forward=scale * whole.work_forward if decision == "recompute" else 0.0,
                work_backward=scale * whole.work_backward if decision == "recompute" else 0.0,
            )
        )
    return halves


def shapes_of(model: Module) -> list[Shape]:
    """The units of a model: its repeated blocks, the outermost modules that hold none of them, and the model itself.

    What has no forward of its own (a list of lists, a dict) is no unit; what it holds are units. What is compiled is
    one unit, without parts.
    """
    named = dict(named_modules(model))
    names = {module: name for name, module in named.items()}
    blocks = {named[name] for name in repeated_blocks(model)}
    whole = set(_compiled(model))
    found: list[Shape] = []

    def visit(module: Module, repeated: bool) -> None:
        for child in module.children():
            block = child in blocks or (repeated and next(child.parameters(), None) is not None)
            if not has_forward(child):
                visit(child, block)
            elif child in whole or block or not blocks.intersection(child.modules()):
                if child in names:
                    found.append(Shape(names[child], child, {} if child in whole else _parts(child), block))
            else:
                visit(child, False)

    if model not in whole and _original(model) is None:
        visit(model, False)
    return [*(shape for shape in found if shape.name), Shape("", model, {}, False)]


def _original(module: Module) -> Module | None:
    """What `torch.compile(module)` was given; None for another module."""
    inner: dict[str, Any] = dict(module._modules.items())  # which of TorchScript modules is no dict
    return inner.get("_orig_mod")


def _compiled(model: Module) -> Iterator[Module]:
    for module in model.modules():
        inner = _original(module)
        if inner is not None:
            yield inner
        elif module._compiled_call_impl is not None:
            yield module


def has_forward(module: Module) -> bool:
    return isinstance(module, ScriptModule) or type(module).forward is not Module.forward


def can_run_again(module: Module) -> bool:
    """Whether its forward can be run once more, as far as its structure tells."""
    if any(isinstance(inner, ScriptModule) for inner in module.modules()):
        return False
    while isinstance(module, Sequential) and len(module):
        module = module[0]
    return not getattr(module, "inplace", False)  # which changes the input that it would need again


def _parts(module: Module) -> dict[str, Module]:
    """The children of a unit that have a forward, also those in lists, by name as seen from the unit."""
    found = {}
    for name, child in module.named_children():
        if isinstance(child, ModuleList | ModuleDict):
            found.update({f"{name}.{inner}": part for inner, part in _parts(child).items()})
        elif has_forward(child) and PLAIN.fullmatch(name):
            found[name] = child
    return found


def _inner(shape: Shape) -> list[str]:
    return [f"{shape.name}.{part}" for part in shape.parts]


def _timed(shapes: list[Shape]) -> Iterator[tuple[str, Module]]:
    for shape in shapes:
        if shape.name:
            yield shape.name, shape.module
            yield from zip(_inner(shape), shape.parts.values(), strict=True)


def _ns(ticket: Ticket) -> int:
    ticket.result()
    span = ticket.span()
    assert span is not None
    return span[0]


def digest_of(model: Module) -> str:
    """Names a model's structure: its modules, their classes, and the shapes and dtypes of its parameters."""
    lines = [f"{name} {type(module).__qualname__}" for name, module in named_modules(model)]
    lines += [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def memory_of(model: Module, optimizers: list[Optimizer]) -> Memory:
    """Where the memory goes that is no activation."""
    parameters = list(model.parameters())
    mine = {id(parameter) for parameter in parameters}
    states = [
        value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if id(parameter) in mine
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return Memory(
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        sum(state.nbytes for state in states) if optimizers else None,
        sum(buffer.nbytes for buffer in model.buffers()),
    )
