"""Stores of the models that a script trains, entered around their forwards by global module hooks."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from actstore.autograd import modules
from actstore.base.units import format_nbytes
from actstore.errors import ActstoreError, ConfigError
from actstore.integrations.callbacks import disable_checkpointing, is_checkpointing, refuse_checkpointing
from actstore.run.settings import Settings
from actstore.session.activation_store import ActivationStore
from actstore.session.entries import is_active
from actstore.session.report import Report

Say = Callable[[str], None]

FIRST_LOOKS = 4  # steps at whose start a run that changes nothing enters the store, to count
LOOK_INTERVAL = 10  # steps from one such step to the next afterwards


class _Graph:
    """Graph of the last forward: alive while autograd holds it, `done` once backward has come to the model's output."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False

    def reach(self, _gradients: Any) -> None:
        self.done = True


class TrainedModel:
    """One model that the script trains, with its store.

    Attributes
    ----------
    name : name of the model's class
    steps : number of steps so far; forwards without a backward between them are one step
    counted : the step whose bytes a report has
    report : the report of the last step, while there is no store
    """

    def __init__(self, whole: Module, settings: Settings) -> None:
        self.name = type(whole).__name__
        self.steps = self.counted = 0
        self.report: Report | None = None
        self._settings = settings
        self._model = ref(whole)
        self._state: dict[str, Any] | None = None
        self._graph: ref[_Graph] | None = None
        self._called: Module | None = None
        self._told = perf_counter()
        self.store: ActivationStore | None = self._make(whole)

    def _make(self, whole: Module) -> ActivationStore:
        chosen = self._settings
        store = ActivationStore(whole, chosen.policy, tiers=chosen.tiers(), min_bytes=chosen.min_bytes)
        if self._state is not None:
            store.load_state_dict(self._state)
        return store

    def enter(self, called: Module, say: Say) -> None:
        """Enter the store for a forward of the model or of a part of it. Where a step begins, tell of the last one.

        Under ``keep`` most steps are not counted, as that alone would cost them time.

        Raises
        ------
        ConfigError : the store plans steps, and the script calls two parts of the model one after the other
        """
        if self.store is None:
            whole = self._model()
            assert whole is not None, "its part runs"
            self.store = self._make(whole)
        graph = None if self._graph is None else self._graph()
        goes_on = graph is not None and not graph.done
        if self.store._chooser is not None:
            if self._called not in (None, called):
                raise ConfigError(
                    f"policy={self._settings.policy}: the script calls parts of {self.name} one after the other, and a "
                    "plan needs the forward of a step in one call. Give rules, such as '@blocks : recompute'."
                )
            self._called, goes_on = called, False
        if not goes_on:
            every = self._settings.every
            if every and self.steps and self.steps % every == 0:
                say(self._figures(self.store.report(), every))
            self.steps += 1
            looks = self.steps <= FIRST_LOOKS or self.steps % (every or LOOK_INTERVAL) == 0
            if looks or self._settings.policy != "keep":
                self.counted = self.steps
        if self.counted == self.steps:
            self.store._continues = goes_on
            self.store.__enter__()

    def _figures(self, report: Report, steps: int) -> str:
        now = perf_counter()
        seconds, self._told = now - self._told, now
        held, peak = format_nbytes(report.held_bytes), format_nbytes(report.peak_held_bytes)
        text = f"{self.name}, step {self.steps}: held {held}, peak {peak}, {steps / seconds:.3g} steps/s"
        return f"{text}, waited {report.stall_ms:.1f} ms" if report.media else text

    def leave(self, error: BaseException | None, trace: TracebackType | None, output: Any) -> None:
        """Leave the store after the forward, which has failed where `error` is given."""
        assert self.store is not None
        if self.counted == self.steps:
            self.store.__exit__(None if error is None else type(error), error, trace)
        if error is None:
            self._watch(output)

    def _watch(self, output: Any) -> None:
        """Note when backward comes to the output."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                graph = _Graph()
                leaf.grad_fn.register_prehook(graph.reach)
                self._graph = ref(graph)
                return
        self._graph = None

    def is_of(self, whole: Module) -> bool:
        return self._model() is whole

    def release(self) -> None:
        """Close the store where nothing waits in it, so that a model which the script has dropped is freed."""
        if self.store is None or (report := self.store.report()).live_bytes:
            return
        self.report, self._state = report, self.store.state_dict()
        self.store.close()
        self.store = self._called = None

    def close(self) -> None:
        """Close the store, and return all memory and files."""
        if self.store is not None:
            self.report = self.store.report()
            self.store.close()
            self.store = None


class ScriptStores:
    """Stores around the forwards of a script: one for each model that it trains.

    A model is the outermost module whose forward runs in training mode with gradients, or the outermost module that
    contains it. No store is entered for evaluation, frozen models, modules that a checkpoint runs again in backward,
    what `torch.compile` traces, and code inside of a store of the script's own.

    Parameters
    ----------
    say : called with each line for the user
    first : called once, after the first forward: with the store and a function that runs this forward again

    Attributes
    ----------
    trained : the models so far
    refusal : the error with which a model got no store; None for none
    """

    def __init__(
        self,
        settings: Settings,
        say: Say,
        first: Callable[[ActivationStore, Callable[[], Any]], None] | None = None,
    ) -> None:
        self.trained: list[TrainedModel] = []
        self.refusal: ActstoreError | None = None
        self._settings = settings
        self._say = say
        self._first = first
        self._of = WeakKeyDictionary[Module, TrainedModel]()  # by the called module
        self._inside = _Inside()
        self._handles: list[Any] = []

    def start(self) -> None:
        """Register the hooks of all modules, around those of entered stores: `_before` runs first, `_after` last."""
        before = register_module_forward_pre_hook(self._before)
        modules.keep_hooks(self)  # PyTorch runs its hooks in a loop, which must not change
        self._handles = [before, register_module_forward_hook(self._after, with_kwargs=True, always_call=True)]
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks", UserWarning)
        os.register_at_fork(after_in_child=self._forget)

    def stop(self) -> None:
        """Remove the hooks, and close the stores. A backward afterwards has no stored tensors."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        modules.drop_hooks(self)
        if self._inside.model is not None:
            self._leave_interrupted()
        for each in self.trained:
            each.close()

    def _forget(self) -> None:
        """Begin without stores in a forked process, which has none of their threads, and so must not close them."""
        self._of_parent = self.trained, self._of
        self.trained, self._of, self._inside = [], WeakKeyDictionary(), _Inside()

    def _before(self, module: Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        inside = self._inside
        if inside.model is not None:
            if inside.module is not module:
                return
            if _is_running(module, sys._getframe(1).f_back):
                inside.depth += 1
                return
            self._leave_interrupted()
        if not (module.training and torch.is_grad_enabled()) or inside.is_paused or not _may_be_stored():
            return
        try:
            trained = self._of.get(module) or self._found(module)
            if trained is None:
                return
            trained.enter(module, self._say)
        except ActstoreError as error:
            self.refusal = error
            raise
        inside.model, inside.module, inside.outer = trained, module, sys.exception()

    def _after(self, module: Module, args: tuple[Any, ...], *rest: Any) -> None:
        """Leave the store. `rest` is (kwargs, output), but PyTorch leaves kwargs out after an error."""
        if torch.compiler.is_compiling():
            return
        inside = self._inside
        if inside.module is not module or inside.model is None:
            return
        if inside.depth:
            inside.depth -= 1
            return
        error, trained = sys.exception(), inside.model
        if error is inside.outer:  # the script calls the model while it handles an error
            error = None
        inside.clear()
        trained.leave(error, None if error is None else error.__traceback__, rest[-1])
        if self._first is not None and error is None and trained.store is not None:
            first, self._first, inside.is_paused = self._first, None, True
            try:
                first(trained.store, partial(module, *args, **rest[0]))
            except ActstoreError as failure:
                self.refusal = failure
                raise
            finally:
                inside.is_paused = False

    def _leave_interrupted(self) -> None:
        """Leave a store whose forward ended by an interrupt, after which PyTorch calls no hook."""
        trained = self._inside.model
        self._inside.clear()
        assert trained is not None
        trained.leave(KeyboardInterrupt(), None, None)

    def _found(self, module: Module) -> TrainedModel | None:
        """Return the model of a module that runs for the first time; None where it gets no store.

        Raises
        ------
        ActstoreError : the policy does not fit the model, or its gradient checkpointing hides what it saves
        """
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return None
        if isinstance(module, DataParallel) and len(module.device_ids) > 1:
            raise ConfigError(
                f"DataParallel runs the model on {len(module.device_ids)} devices by threads, which enter no store. "
                f"Start a process for each device: torchrun --nproc-per-node {len(module.device_ids)}."
            )
        whole = _whole(module)
        if self._settings.models and type(whole).__name__ not in self._settings.models:
            return None
        found = next((each for each in self.trained if each.is_of(whole)), None)
        if found is None:
            for each in self.trained:
                each.release()
            self._read_checkpointing(whole)
            self.trained.append(found := TrainedModel(whole, self._settings))
            self._say(f"{found.name}: the policy is {' '.join(self._settings.policy.split())}")
        self._of[module] = found
        return found

    def _read_checkpointing(self, model: Module) -> None:
        """Print that the model checkpoints by itself, or switch that off as the settings ask."""
        if not is_checkpointing(model):
            return
        name = type(model).__name__
        if self._settings.replace_checkpointing:
            disable_checkpointing(model)
            self._say(f"{name}: its own gradient checkpointing is off now")
            return
        if self._settings.policy != "keep":
            refuse_checkpointing(model)
        self._say(f"{name}: its own gradient checkpointing stays on. --replace-checkpointing leaves it to the policy.")


class _Inside(threading.local):
    """The forward that this thread runs inside of a store.

    Attributes
    ----------
    model, module : whose forward it is; None outside of one
    depth : number of calls of this module inside of itself
    outer : the error that the caller handled when the forward began
    is_paused : whether no store is to be entered
    """

    model: TrainedModel | None = None
    module: Module | None = None
    depth = 0
    outer: BaseException | None = None
    is_paused = False

    def clear(self) -> None:
        self.model = self.module = self.outer = None
        self.depth = 0


def _may_be_stored() -> bool:
    """Return whether a forward that runs now is a training step's own: no rerun in backward, trace or transform."""
    return (
        torch._C._current_graph_task_id() == -1
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not is_active()
    )


def _is_running(module: Module, frame: FrameType | None) -> bool:
    """Return whether `frame` or one of its callers is a call of the module."""
    while frame is not None:
        if frame.f_code is Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def _whole(module: Module) -> Module:
    """Return the outermost module that contains `module`; itself where several do, or where its weights are elsewhere.

    Names in a policy are those of the whole, also where a script calls its parts.
    """
    parents = dict[Module, list[Module]]()
    for each in gc.get_objects():
        if issubclass(type(each), Module):
            for child in each.__dict__.get("_modules", {}).values():
                parents.setdefault(child, []).append(each)
    whole = module
    while (above := parents.get(whole)) is not None:
        if len(above) > 1:
            return module
        [whole] = above
    return whole if len({parameter.device for parameter in whole.parameters()}) == 1 else module
