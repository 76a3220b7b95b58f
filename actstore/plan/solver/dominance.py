"""Dominated options, which no best plan needs."""

from __future__ import annotations

from dataclasses import fields

from actstore.plan.solver.chain import Layer, LayerOption

_NUMBERS = tuple(field.name for field in fields(LayerOption) if field.name != "decision")


def useful(layer: Layer) -> list[int]:
    """Return the indices of a layer's options, without those that another option equals or betters in every number.

    A smaller compute time counts as better: bytes that flow beside it flow as well beside a stall of the same length.
    Of equal options the first stays.
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
