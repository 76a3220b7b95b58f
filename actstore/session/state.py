"""The state of a store between two steps, as plain data: another process goes on from it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch.nn import Module

from actstore.accuracy import Sampler
from actstore.accuracy.influence.influence import Influence
from actstore.display.text import short
from actstore.errors import MALFORMED, ActstoreError, StateError
from actstore.model.names import named_modules
from actstore.model.units import device_of
from actstore.plan.fields import MAX_NUMBER
from actstore.plan.plan import Plan
from actstore.policy import Auto, Rules
from actstore.session.controllers import StepPolicy
from actstore.store.store import Store

log = logging.getLogger("actstore")

FORMAT = "actstore state 1"
SHOWN = 200  # most characters of a text in an error
_TYPES: dict[str, type] = {
    "format": str, "model": list, "policy": str, "seed": int, "min_bytes": int, "steps": int, "sampled_step": int,
    "steps_of_rest": int, "plan": str, "controller": str,
}  # fmt: skip


@dataclass(frozen=True)
class StoreState:
    """Parts of a store whose state is saved.

    Attributes
    ----------
    given : the policy that the user gave
    policy : the one that is in force, as a value
    """

    model: Module | None
    given: Any
    policy: Any
    seed: int
    min_nbytes: int
    store: Store
    sampler: Sampler
    influence: Influence | None
    controller: StepPolicy | None

    def save(self) -> dict[str, Any]:
        """Return the state. Its keys are always the same, as torch.distributed.checkpoint needs them."""
        controller = None if self.controller is None else self.controller.state()
        plan = None if (each := self.controller) is None else each.plan or each.graph_plan or each.choice
        state = {
            "format": FORMAT,
            **self._identity(),
            "steps": self.store.steps,
            "sampled_step": self.sampler.step,
            "steps_of_rest": 0 if self.influence is None else self.influence.rest,
            "plan": "" if plan is None else plan.text if isinstance(plan, Plan) else plan.certificate,
            "controller": "" if controller is None else json.dumps(controller),
        }
        return {**state, "checksum": _checksum(state)}

    def load(self, state: Any) -> None:
        """Go on from a state.

        Raises
        ------
        StateError : the state is one of another model, policy or seed, was changed, or its contents are invalid
        """
        values = dict(state) if isinstance(state, Mapping) else {}
        checksum = values.pop("checksum", None)
        if values.get("format") != FORMAT:
            raise StateError(
                f"load_state_dict(state): its format is {values.get('format')!r}, not {FORMAT!r}. Load a state that "
                "this version of actstore saved, or train on without one."
            )
        if checksum != _checksum(values):
            raise StateError(
                f"load_state_dict(state): its checksum is {checksum!r}, that of its contents {_checksum(values)!r}: "
                "it was changed after it was saved. Load it as it was saved, or train on without it."
            )
        _check_types(values)
        for name, mine in self._identity().items():
            if state[name] != mine:
                raise StateError(
                    f"load_state_dict(state): {_difference(name, state[name], mine)}. Make the store as it was when "
                    "the state was saved, or train on without the state.",
                    field=name,
                )
        if self.controller is not None:
            place = self.store.place(device_of(self.model) or torch.device("cpu"))
            try:
                note = self.controller.resume(json.loads(state["controller"]), place)
            except ActstoreError:
                raise
            except MALFORMED as error:
                raise _invalid(f"controller: {short(error)}") from None
            if note:
                log.warning("%s: %s", self.controller.name, note)
        self.store.resume(state["steps"])
        self.sampler.resume(state["sampled_step"])
        if self.influence is not None:
            self.influence.resume(state["steps_of_rest"])

    def _identity(self) -> dict[str, Any]:
        """Return what a state and its store must have in common."""
        names = [] if self.model is None else sorted(name for name, _ in named_modules(self.model))
        return {"model": names, "policy": self._policy_text(), "seed": self.seed, "min_bytes": self.min_nbytes}

    def _policy_text(self) -> str:
        """Return the policy as text, without a budget: that of "auto" may change."""
        given = self.given
        if isinstance(given, Auto):
            tiles, group = ", tiles" if given.tiles else "", "" if given.group is None else ", group"
            return f"auto(max_noise={given.max_noise:g}{tiles}{group})"
        if isinstance(given, Plan):
            return given.text
        if self.controller is not None:
            return str(given)
        if isinstance(self.policy, Rules):
            return str(self.policy)
        named = given if hasattr(given, "__qualname__") else type(given)  # a function, or an object that is called
        return f"{named.__module__}.{named.__qualname__}"


def _check_types(values: Mapping[str, Any]) -> None:
    """Refuse a state from another program that has the right checksum.

    Raises
    ------
    StateError : a field is missing, unknown, or not of its type
    """
    if different := values.keys() ^ _TYPES.keys():
        raise _invalid(f"{min(different, key=str)} is missing or unknown")
    for name, kind in _TYPES.items():
        value: Any = values[name]
        fits = type(value) is kind and (not isinstance(value, int) or abs(value) <= MAX_NUMBER)
        if not fits or (isinstance(value, list) and not all(type(each) is str for each in value)):
            raise _invalid(f"{name}={short(value)}")


def _invalid(what: str) -> StateError:
    return StateError(
        f"load_state_dict(state): its contents are invalid ({what}). Load it as it was saved, or train on with a new "
        "store."
    )


def _difference(name: str, saved: Any, mine: Any) -> str:
    """Return in words how a field of a state differs from the store's."""
    if name == "model":
        saved, mine = (
            f"{len(names)} modules{_with(sorted({*names} - {*known}))}"
            for names, known in ((saved, mine), (mine, saved))
        )
        return f"the model of the state has {saved}, and that of the store {mine}"
    texts = repr(saved), repr(mine)
    differs = next((i for i, (one, other) in enumerate(zip(*texts, strict=False)) if one != other), 0)
    saved, mine = (_part(text, max(0, differs - SHOWN // 2)) for text in texts)
    return f"the state has {name}={saved}, and the store {name}={mine}"


def _part(text: str, begin: int) -> str:
    """Return a text from a character on, as much of it as an error shows."""
    return f"{'...' * (begin > 0)}{text[begin : begin + SHOWN]}{'...' * (len(text) > begin + SHOWN)}"


def _checksum(state: Mapping[str, Any]) -> str:
    return sha256(json.dumps(state, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _with(names: list[str]) -> str:
    return f", with {names[0]!r}" if names else ""
