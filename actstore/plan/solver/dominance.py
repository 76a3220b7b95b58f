"""Options that no best plan needs."""

from __future__ import annotations

from dataclasses import fields

from actstore.plan.solver.chain import Layer, LayerOption

_NUMBERS = tuple(field.name for field in fields(LayerOption) if field.name != "decision")


def useful(layer: Layer) -> list[int]:
    """Indices of a layer's options without those that another one equals or betters in every number.

    Compute counts as a number to be small: what flows beside it flows as well beside a stall of its length. Of equals
    the first stays.
    """
    numbers = [tuple(getattr(option, name) for name in _NUMBERS) for option in layer.options]
    return [
        index
        for index, mine in enumerate(numbers)
        if not any(
            all(a <= b for a, b in zip(other, mine, strict=True)) and (other != mine or at < index)
            for at, other in enumerate(numbers)
        )
    ]
