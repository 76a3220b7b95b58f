"""Growth of errors on their way from a node to the weights, from the norms that one step has measured."""

from __future__ import annotations

from collections.abc import Mapping

from actstore.accuracy.influence.node_error import is_sum
from actstore.accuracy.influence.prediction import PredictedStep
from actstore.base.ledger import Account


def growth(
    step: PredictedStep, norms: Mapping[int, float], shares: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Return the energy at all weights for each unit of noise energy that comes to a node, by the node's number.

    norms : the norms of the step, on the host
    shares : the factor of the energy at a weight, by the weight's identity; by default 1
    """
    reach: dict[int, float] = {}
    for number in step.walk.first_weights_first():
        seen = step.seen.get(number)
        came = sum(norms[i] ** 2 for i in seen.incoming) if seen is not None else 0.0
        if seen is None or not came:
            reach[number] = 0.0
            continue
        point, total = step.walk.points[number], 0.0
        for k, i in seen.outgoing.items():
            gain, edge = norms[i] ** 2 / came, point.edges[k]
            if edge is None:
                continue
            if k not in point.weights:
                total += gain * reach.get(edge[0], 0.0)
                continue
            share = 1.0 if shares is None else shares.get(edge[1], 0.0)
            if k in seen.white:
                gain = norms[seen.white[k]] ** 2
            elif is_sum(point.name, k):
                gain = 1.0
            total += share * gain
        reach[number] = total
    return reach


def variances(
    step: PredictedStep,
    norms: Mapping[int, float],
    shares: Mapping[int, float] | None = None,
    level: float | None = None,
) -> dict[Account, float]:
    """Return the predicted variance of all weight gradients, summed, by the site that causes it; as `growth`.

    level : relative error of payloads, one of the step's levels; by default the measured one
    """
    reach = growth(step, norms, shares)
    found: dict[Account, float] = {}
    for number, seen in step.seen.items():
        point = step.walk.points[number]
        for account, size, sizes in seen.local:
            if size != level:
                continue
            for k, i in sizes.items():
                edge = point.edges[k]
                if edge is not None:
                    further = reach.get(edge[0], 0.0)
                    if k in point.weights:
                        further = 1.0 if shares is None else shares.get(edge[1], 0.0)
                    found[account] = found.get(account, 0.0) + norms[i] ** 2 * further
            found.setdefault(account, 0.0)
    return found
