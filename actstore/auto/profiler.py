"""Profiler of a training step: the time of each unit in forward and in backward, and the bytes it saves.

Hooks on module outputs are the only change to the graph: a measured step has the same gradients as any other.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isfinite
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.jit import ScriptModule
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.accuracy import Total, measure
from actstore.auto.excepted import Separability
from actstore.auto.sample import Sample, calls_at_turns
from actstore.autograd.compiled import NamedCall
from actstore.base.ledger import Account, Ledger
from actstore.base.storage import SharedStorage
from actstore.base.ticket import Ticket
from actstore.codecs.base import Bound, Codec
from actstore.devices import Device
from actstore.model.units import original, shapes_of
from actstore.plan.decisions import KEEP, RECOMPUTE, has_tiles, recomputed_calls
from actstore.plan.profile import SharedBytes, UnitBytes, UnitFigures
from actstore.policy import Offload

BACKWARD_END = "the end of backward"
FORWARD, BACKWARD = "forward", "backward"

Mark = tuple[Ticket, int]  # a moment, and the number of full garbage collections by then
_Time = tuple[float, bool]  # milliseconds, and whether a full garbage collection ran in them


class Moments:
    """Moments of one step.

    Where the device is the host, a full garbage collection counts for no call if further calls of the same module show
    their usual time. A collection is rare, and may take longer than hundreds of calls.

    Parameters
    ----------
    turn : called when a backward has begun
    """

    def __init__(
        self, device: Device, decisions: dict[str, str], writers: set[str], turn: Callable[[], None] = lambda: None
    ) -> None:
        self.decisions = decisions
        self._turn = turn
        self.turned = False  # backward has begun
        self._writers = writers
        self._versions: dict[str, list[list[int]]] = {}  # versions of the inputs of running calls
        self.errors: list[tuple[Account, Tensor]] = []  # rows of `accuracy.measure`
        self._works: list[tuple[Account, str, Mark, Mark]] = []  # of the store: encode, decode, recompute
        self._device = device
        self._marks: list[tuple[str, str, Mark]] = []
        self._calls: dict[str, int] = {}
        self._calls_at_turn: dict[str, int] = {}  # when the first backward began
        self._grads: dict[int, list[tuple[str, int, Mark]]] = {}  # by backward: arrivals of output gradients
        self.note("begin", "")

    def note(self, kind: str, name: str) -> None:
        self._marks.append((kind, name, self._mark()))

    def _mark(self) -> Mark:
        collections: int = gc.get_stats()[2]["collections"] if self._device.on_host else 0
        return self._device.mark(self._device.current()), collections

    def work(self, account: Account, direction: str) -> Callable[[], None]:
        """Note that work of the store begins, and return the function to call at its end."""
        begin = self._mark()
        return lambda: self._works.append((account, direction, begin, self._mark()))

    def entering(self, name: str) -> Callable[..., None]:
        def enter(_module: Module, args: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # not inside backward, where it is recomputed
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
            for tensor in _leaves(output):
                if isinstance(tensor, Tensor) and not tensor.is_leaf:
                    tensor.register_hook(self._arriving(name, call))

        return leave

    def ending(self, _module: Module, _args: Any, output: Any) -> None:
        """Watch the model's outputs: if the model computes the loss, backward begins there."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin)

    def _begin(self, _grad: Tensor | None = None) -> None:
        self.turned = True

    def _arriving(self, name: str, call: int) -> Callable[[Tensor], None]:
        def arrive(_grad: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            moments = self._grads.get(task)
            if moments is None:
                self._begin()
                self._calls_at_turn = self._calls_at_turn or dict(self._calls)
                self._turn()
                moments = self._grads[task] = []
                engine: Any = Variable._execution_engine
                engine.queue_callback(lambda: moments.append((BACKWARD_END, 0, self._mark())))
            moments.append((name, call, self._mark()))

        return arrive

    def worked(self) -> Iterator[tuple[Account, str, float]]:
        """Yield the store's work in this step: the account, the direction, and the milliseconds."""
        times: dict[tuple[Account, str], list[_Time]] = {}
        for account, direction, begin, end in self._works:
            times.setdefault((account, direction), []).append(_between(begin, end))
        for (account, direction), of_works in times.items():
            yield account, direction, sum(_without_collections(of_works))

    @property
    def total(self) -> float:
        """Milliseconds from the first mark to the last."""
        return _between(self._marks[0][2], self._marks[-1][2])[0]

    def forward(self) -> dict[str, list[float]]:
        """Return the milliseconds of each call of each module, in the order of their first calls."""
        times: dict[str, list[_Time]] = {}
        entered: dict[str, list[Mark]] = {}
        for kind, name, mark in self._marks:
            if kind == "enter":
                times.setdefault(name, [])
                entered.setdefault(name, []).append(mark)
            elif kind == "leave" and entered.get(name):
                times[name].append(_between(entered[name].pop(), mark))
        return {name: _without_collections(of_calls) for name, of_calls in times.items()}

    def waiting(self) -> dict[str, int]:
        """Return how many calls of a module waited when the first backward began, where each call has its own backward.

        Such calls are those of micro-batches. A module that runs once, or several times before one backward, has none.
        """
        calls = [Counter(name for name, _ in {moment[:2] for moment in task}) for task in self._grads.values()]
        several = {name for task in calls for name, count in task.items() if name != BACKWARD_END and count > 1}
        names = {name for task in calls for name in task} - several
        return {name: self._calls_at_turn.get(name, 0) for name in names if self._calls.get(name, 0) > 1}

    def backward(self) -> dict[str, dict[int, float]]:
        """Return the milliseconds of each call: from the gradient of its output to the next such gradient."""
        times: dict[str, dict[int, _Time]] = {}
        for moments in self._grads.values():
            ordered = sorted(moments, key=lambda moment: begin_ns(moment[2][0]))
            for (name, call, begin), (_, _, end) in pairwise(ordered):
                of_calls = times.setdefault(name, {})
                ms, collected = _between(begin, end)
                before, earlier = of_calls.get(call, (0.0, False))
                of_calls[call] = before + ms, earlier or collected
        return {
            name: dict(zip(of_calls, _without_collections(list(of_calls.values())), strict=True))
            for name, of_calls in times.items()
        }


def _between(begin: Mark, end: Mark) -> _Time:
    return (begin_ns(end[0]) - begin_ns(begin[0])) / 1e6, begin[1] != end[1]


def _without_collections(times: Sequence[_Time]) -> list[float]:
    """Return the milliseconds, with calls that met a garbage collection limited to the median of the rest."""
    typical = median([ms for ms, collected in times if not collected] or [inf])
    return [min(ms, typical) if collected else ms for ms, collected in times]


def _versions(args: Any) -> list[int]:
    return [leaf._version for leaf in _leaves(args) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _leaves(value: Any) -> Sequence[Any]:
    """Return `tree_leaves(value)`, with a fast path for tensors and tuples of these: RNN cells run a thousand times."""
    if isinstance(value, Tensor):
        return (value,)
    if type(value) is tuple and all(isinstance(leaf, Tensor) for leaf in value):
        return value
    return tree_leaves(value)


def begin_ns(ticket: Ticket) -> int:
    ticket.result()
    span = ticket.span()
    assert span is not None
    return span[0]


class Profiler:
    """Profiler of the steps of one store, one at a time: `begin`, `end_forward`, and at the next entry `finish`.

    Notes
    -----
    Not thread-safe: one thread enters the store while a step is measured. On an accelerator `finish` waits for the
    device. Hooks are on the model's modules from `begin` to `end_forward` only.

    Attributes
    ----------
    writers : names of units and parts that change their inputs in place: they cannot be recomputed
    separability : which parts can be excepted from a recomputation
    """

    def __init__(self, model: Module, ledger: Ledger) -> None:
        self.writers = set[str]()
        self.separability = Separability()
        self._model = model
        self._ledger = ledger
        self._hooks: list[Any] = []
        self._step: Moments | None = None
        self._storages: list[SharedStorage] = []
        self.look()

    def look(self) -> None:
        """Read the model's modules again after they have changed."""
        self.shapes = shapes_of(self._model)
        outer = {inner: module for module in self._model.modules() if (inner := original(module)) is not None}
        timed: dict[str, Module] = {}
        for shape in self.shapes:
            if shape.name:
                timed |= {shape.name: shape.module, **shape.inner}
        self._modules = {name: outer.get(module, module) for name, module in timed.items()}
        recomputable = [shape for shape in self.shapes if shape.recomputable]
        self._separable = {name for shape in recomputable for name in (shape.name, *shape.inner)}
        self._unit_of = {name: shape.name for shape in self.shapes for name in (shape.name, *shape.inner)}

    def begin(self, device: Device, decisions: dict[str, str]) -> None:
        """Begin a step. `decisions` are policy text by unit, with names relative to it; the remaining units keep."""
        step = self._step = Moments(device, decisions, self.writers, self._turn)
        self._hooks.append(self._model.register_forward_hook(step.ending))
        for name, module in self._modules.items():
            enter, leave = step.entering(name), step.leaving(name)
            call = module._compiled_call_impl
            if isinstance(module, ScriptModule):  # takes no hooks: its time goes to `rest`
                continue
            if call is None:
                self._hooks.append(module.register_forward_pre_hook(enter))
                self._hooks.append(module.register_forward_hook(leave, always_call=True))
                if name in self._separable:
                    self._hooks.extend(self.separability.watch(name, module))
            elif isinstance(call, NamedCall):  # hooks of the module itself would recompile it in each step
                self._hooks.append(call.watch(enter, leave))
        for name in self.separability.sought.keys() - self._separable:
            self._hooks.extend(self.separability.watch(name, self.separability.sought[name]))

    def end_forward(self) -> None:
        """Remove the hooks, after forward has ended or failed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _turn(self) -> None:
        if self._hooks:  # backward begins inside of the context: in a pipeline more may be held than at the first turn
            self._ledger.mark_turn()

    def cancel(self) -> None:
        """Discard the measurements of the step."""
        self.end_forward()
        self._step = None

    @property
    def measures(self) -> bool:
        """True while a step is measured."""
        return self._step is not None

    def codec(self, bound: Bound, codec: Codec, account: Account) -> Bound:
        """Return the codec, wrapped so that its time and its error are measured."""
        step = self._step
        if step is None:
            return bound

        def encode(src: Tensor, out: Tensor, key: int) -> int | None:
            done = step.work(account, FORWARD)
            used = bound.encode(src, out, key)
            done()
            if not (codec.lossless or codec.decides):
                back = torch.empty_like(src)
                bound.decode(out, back, key)
                step.errors.append((account, measure(src, back)))
            return used

        def decode(buf: Tensor, out: Tensor, key: int) -> None:
            done = step.work(account, BACKWARD)
            bound.decode(buf, out, key)
            done()

        return bound._replace(encode=encode, decode=decode)

    def recomputing(self, account: Account) -> Callable[[], None]:
        """Note that a recompute begins, and return the function to call at its end."""
        return _nothing if self._step is None else self._step.work(account, BACKWARD)

    def share(self, storages: Iterable[SharedStorage]) -> None:
        """Take the storages that several modules save, at the end of forward."""
        self._storages = list(storages)

    def finish(self) -> Sample | None:
        """Return the figures of the last step; None where it was canceled or ran no unit of the model."""
        step, self._step = self._step, None
        self.end_forward()
        if step is None:
            return None
        step.note("end", "")
        forward = step.forward()
        ran = dict.fromkeys(map(self._unit_of.__getitem__, forward))
        uncalled = dict.fromkeys(self.find(each.site.name)[0] for each in self._ledger.accounts() if each.saved)
        units = [name for name in {**dict.fromkeys(uncalled.keys() - ran), **ran} if name]  # first, where no hook ran
        if not units and not step.turned:
            return None
        backward = step.backward()
        calls = {name: len(forward.get(name, [0.0])) for name in [*units, ""]}
        held = self._held_at_turns()
        turns = calls_at_turns(step.waiting(), calls, held)
        if turns:  # and what the model and the loss save waits as long
            of_most = max(turns, key=lambda name: (max(turns[name]), calls[name]))
            turns |= calls_at_turns({"": turns[of_most][0]}, {"": calls[of_most]}, held)
            calls[""] = calls[of_most]
        storages, self._storages = self._storages, []
        reached = set(map(self._unit_of.__getitem__, backward.keys() - {BACKWARD_END}))
        unread = [name for name in ran if name and step.turned and name not in reached]
        fullest = {name: held[name].index(max(held[name])) for name in turns if name in held}
        parts, transient = self._bytes(fullest, unread)
        shared = [] if turns else self._sharing(storages, [*units, ""], step.decisions, parts)
        errors, work = self._errors(step), self._work(step)
        figures: dict[str, list[UnitFigures]] = {}
        for name in [*units, ""]:
            inner = [other for other, unit in self._unit_of.items() if unit == name]
            whole = UnitFigures(
                step.decisions.get(name, KEEP),
                sum(forward.get(name, [])),
                sum(ms for other in inner for ms in backward.get(other, {}).values()),
                parts.get(name, {}),
                transient.get(name, 0),
                errors.get(name, 0.0),
                work.get((name, FORWARD), 0.0),
                work.get((name, BACKWARD), 0.0),
            )
            alone = len(inner) == 1 and name
            figures[name] = _split(whole, forward[name], backward.get(name, {})) if alone else [whole]
        busy = sum(sum(forward.get(name, [])) for name in units)
        busy += sum(ms for calls in backward.values() for ms in calls.values())
        return Sample(figures, calls, step.total, max(0.0, step.total - busy), step.turned, turns, shared, unread)

    # -----------------------------------------------------------------------------------------------------------------

    def find(self, site: str) -> tuple[str, str]:
        """Return the unit of a site, and its part in this unit."""
        name = site
        while name not in self._unit_of:
            if not name:
                return "", ""
            name = name.rpartition(".")[0]
        unit = self._unit_of[name]
        return unit, name[len(unit) + 1 :] if name != unit else ""

    def _held_at_turns(self) -> dict[str, list[int]]:
        """Return the bytes of each unit at each turn; at the end of forward, where backward came after it."""
        found: dict[str, list[int]] = {}
        turns = self._ledger.turns or [{account: account.held_at_exit for account in self._ledger.accounts()}]
        for i, held in enumerate(turns):
            for account, nbytes in held.items():
                found.setdefault(self.find(account.site.name)[0], [0] * len(turns))[i] += nbytes
        return found

    def _bytes(
        self, fullest: dict[str, int], unread: Sequence[str] = ()
    ) -> tuple[dict[str, dict[str, UnitBytes]], dict[str, int]]:
        """Return the bytes of the parts of units, and the most beside them. `fullest` are the turns that count.

        What `unread` units hold is freed once the model drops their results: until then, all of it counts.
        """
        parts: dict[str, dict[str, UnitBytes]] = {}
        transient: dict[str, int] = {}
        turns = self._ledger.turns
        for account in self._ledger.accounts():
            unit, part = self.find(account.site.name)
            held = turns[fullest[unit]].get(account, 0) if turns and unit in fullest else account.held_at_exit
            held = account.peak if unit in unread else held
            if not (account.saved or account.stored or held):
                continue
            decision = account.decision
            tier = decision.tiers[0] if isinstance(decision, Offload) else ""  # "auto" plans no ladders
            old = parts.setdefault(unit, {}).get(part, UnitBytes())
            parts[unit][part] = UnitBytes(
                old.saved + account.saved,
                old.held + (0 if tier and account.stored else held),
                old.host + (account.stored if tier == "host" else 0),
                old.disk + (account.stored if tier == "disk" else 0),
            )
            above = account.peak - held
            transient[unit] = max(transient.get(unit, 0), above)
        return parts, transient

    def _sharing(
        self,
        storages: list[SharedStorage],
        order: list[str],
        decisions: Mapping[str, str],
        parts: dict[str, dict[str, UnitBytes]],
    ) -> list[SharedBytes]:
        """Return the bytes that several units save. In `parts` they move to the first unit, or go where it has none."""
        merged: dict[tuple[Any, ...], SharedBytes] = {}
        for nbytes, savers, holder in storages:
            found = [(*self.find(name), is_input) for name, is_input in savers]
            units = [unit for unit in order if any(unit == name for name, _, _ in found)]
            if len(units) == 1 and not has_tiles(decisions.get(units[0], KEEP)):
                within = tuple(sorted({part for _, part, is_input in found if not is_input}))
                if len(within) > 1:
                    nbytes += merged[units[0], within].nbytes if (units[0], within) in merged else 0
                    merged[units[0], within] = SharedBytes((units[0],), (within,), (False,), nbytes)
            if len(units) < 2:
                continue
            inner = tuple(
                tuple(dict.fromkeys(part for name, part, is_input in found if name == unit and not is_input))
                for unit in units
            )
            inputs = tuple(any(name == unit and is_input for name, _, is_input in found) for unit in units)
            counted = next(((unit, part) for unit, part, is_input in found if not is_input), None)
            owner = next(((unit, names[0]) for unit, names in zip(units, inner, strict=True) if names), None)
            if counted is not None and owner is not None:
                _move(parts, nbytes, "saved", counted, owner)
            number = last = len(units)
            if holder is not None and (at := self.find(holder))[0] in units:
                last = units.index(at[0])
                kept = (i for i in range(last) if inner[i] and decisions.get(units[i], KEEP) == KEEP)
                number = next(kept, last)  # it kept them, too, if not first
                if last:
                    _move(parts, nbytes, "held", at, (units[0], inner[0][0]) if not number else None)
            holds = [{decisions.get(unit, KEEP): i == number} if i <= number else {} for i, unit in enumerate(units)]
            each = SharedBytes(tuple(units), inner, inputs, nbytes, tuple(holds))
            key = each.units, inner, inputs
            merged[key] = each.plus(merged[key]) if key in merged else each
        return list(merged.values())

    def _work(self, step: Moments) -> dict[tuple[str, str], float]:
        """Return the milliseconds of encode, decode and recompute, by unit and direction."""
        sums: dict[tuple[str, str], float] = {}
        for account, direction, ms in step.worked():
            key = self.find(account.site.name)[0], direction
            sums[key] = sums.get(key, 0.0) + ms
        return sums

    def _errors(self, step: Moments) -> dict[str, float]:
        totals: dict[str, Total] = {}
        for account, row in step.errors:
            totals.setdefault(self.find(account.site.name)[0], Total()).add(row.tolist())
        squares = {unit: 1.0 if total.lost else total.relative**2 for unit, total in totals.items()}
        return {unit: square if isfinite(square) else 1.0 for unit, square in squares.items()}


def _move(
    parts: dict[str, dict[str, UnitBytes]], nbytes: int, what: str, source: tuple[str, str], to: tuple[str, str] | None
) -> None:
    """Move bytes "saved" or "held" from a part of a unit to another; to none, they go."""
    for sign, at in ((-1, source), (1, to)):
        if at is not None and source != to:
            old = parts.setdefault(at[0], {}).get(at[1], UnitBytes())
            parts[at[0]][at[1]] = replace(old, **{what: max(0, getattr(old, what) + sign * nbytes)})


def _nothing() -> None:
    pass


def _split(whole: UnitFigures, forward: list[float], backward: dict[int, float]) -> list[UnitFigures]:
    """Split figures into those of recomputed calls and of kept calls, each as if all calls were of that kind."""
    first, calls = recomputed_calls(whole.decision) or 0, len(forward)
    if not 0 < first < calls:
        return [whole]
    saved = whole.total("saved")
    kept = round(saved * (calls - first) / calls)  # all calls are alike
    held = max(0, whole.total("held") - kept) * calls // first
    halves = []
    for decision, chosen, nbytes in (
        (RECOMPUTE, range(first), held),
        (KEEP, range(first, calls), saved),
    ):
        scale = calls / len(chosen)
        halves.append(
            UnitFigures(
                decision,
                scale * sum(forward[call] for call in chosen),
                scale * sum(backward.get(call, 0.0) for call in chosen),
                {"": UnitBytes(saved, nbytes)},
                whole.transient if decision == RECOMPUTE else 0,
                work_forward=scale * whole.work_forward if decision == RECOMPUTE else 0.0,
                work_backward=scale * whole.work_backward if decision == RECOMPUTE else 0.0,
            )
        )
    return halves
