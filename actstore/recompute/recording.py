"""The first run of a region: a mode that records what operators decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

from actstore.base.checkpoints import innermost_pack
from actstore.base.redispatch import redispatch
from actstore.base.tracing import is_traced
from actstore.recompute.choices import Packed, choice_of
from actstore.recompute.decisions import Decision
from actstore.recompute.gates import gate_of
from actstore.recompute.modes import Mode, has_floats, is_choice, shape_of, takes_floats
from actstore.recompute.operators import DecisionKind, base_name, index_bound, kind_of, peak_of, points_of
from actstore.recompute.windows import places_of

_CHECKPOINT = "torch.utils.checkpoint"


class Recording(Mode):
    """Mode of a first run, which records what operators decide."""

    def call(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.paused:
            return redispatch(operator, args, kwargs)
        kind = kind_of(operator)
        if kind is DecisionKind.RESULT:
            result = redispatch(operator, args, kwargs)
            if is_choice(result) and takes_floats((*args, *kwargs.values())) and not is_traced():
                self._keep(operator, args, [choice_of(result, index_bound(operator, args, kwargs))])
            return result
        if kind is DecisionKind.NEVER or not has_floats(args) or is_traced():
            return redispatch(operator, args, kwargs)
        x = args[0]
        if kind is DecisionKind.RELU:
            result = redispatch(operator, args, kwargs)
            if x.requires_grad:
                choice = gate_of(result)
                if isinstance(choice, Packed):  # ReLU in place increments the version after this call has returned
                    version = result._version + operator._schema.is_mutable
                    self._decisions.results.append((len(self._kept), ref(result), version))
                self._keep(operator, args, [choice])
            return result
        if kind is DecisionKind.SIDE:
            points = points_of(operator, args, kwargs)
            if points:
                self._keep(operator, args, [choice_of(point.is_below(x)) for point in points])
            return redispatch(operator, args, kwargs)
        result = redispatch(operator, args, kwargs)
        if kind is DecisionKind.PEAK:
            if x.requires_grad:
                self._keep(operator, args, [choice_of(x == peak_of(operator, args, result))])
        elif kind is DecisionKind.INDEX:
            places = places_of(operator, args, kwargs, result[1]) if "pool" in operator._schema.name else None
            self._keep(operator, args, [places or choice_of(result[1], index_bound(operator, args, kwargs))])
        elif kind is DecisionKind.DRAW:
            self._keep(operator, args, [choice_of(result != 0)])
        else:
            bound = index_bound(operator, args, kwargs)
            results = result if isinstance(result, tuple) else (result,)
            self._keep(operator, args, [choice_of(part, bound) for part in results])
        return result

    def _keep(self, operator: Any, args: Sequence[Any], choices: Iterable[Any]) -> None:
        if getattr(innermost_pack(), "__module__", "") == _CHECKPOINT:
            self._decisions.anew = "checkpoints of the model's own"
        self._kept.append(Decision(base_name(operator), shape_of(args), tuple(choices)))
