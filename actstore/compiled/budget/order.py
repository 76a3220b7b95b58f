"""The order of a backward graph: results that are large and not yet needed wait, those that free their inputs do not.

No moment of the step needs more bytes than in the order before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

from actstore.compiled.budget.operator import Operator


class LoopReaders:
    """The operators of one order that read each result, through views and through what its readers compute.

    Parameters
    ----------
    unwritten : operators that write nothing
    """

    def __init__(self, operators: Sequence[Operator], run: Sequence[int], unwritten: Set[int]) -> None:
        self._operators = operators
        self._unwritten = unwritten
        self.run = frozenset(run)
        self.of: dict[int, set[int]] = defaultdict(set)
        for index in reversed(run):
            found = self.of[index] if self.passes(index) else {index}
            for source in operators[index].inputs:
                self.of[source] |= found

    def passes(self, index: int) -> bool:
        """Return whether an operator writes nothing: its readers read its inputs."""
        operator = self._operators[index]
        return (operator.view and operator.owner != index) or index in self._unwritten

    def overwritten(self, index: int) -> list[int]:
        """Return the results whose memory an operator may take, if it is the last to read them.

        A loop of the compiler takes the memory of an equal tensor that no other loop may read at its side.
        """
        operators = self._operators
        layout = operators[index].layout
        if layout is None or not operators[index].inlined or self.passes(index):
            return []
        todo = [(source, True) for source in operators[index].inputs]
        sources, elsewhere = dict[int, None](), set[int]()
        while todo:
            source, same = todo.pop()
            same = same and operators[source].layout == layout
            if self.passes(source):
                todo += [(each, same) for each in operators[source].inputs]
            elif not same:
                elsewhere.add(source)
            elif source in self.run:
                sources[source] = None
        apart = {*sources, *elsewhere}
        return [
            source
            for source in sources
            if source not in elsewhere
            and all(
                operators[each].layout == layout and each not in apart
                for each in self.of[source] - {index}
                if operators[each].fused
            )
        ]


def ordered(operators: Sequence[Operator], run: Sequence[int], unwritten: Set[int], stays: Set[int]) -> list[int]:
    """Return the operators of backward in an order that needs no more bytes at any moment.

    A product waits for its first reader where its inputs exist until then anyway. An operator that takes the memory of
    an input runs as soon as it can.

    Parameters
    ----------
    run : in the order of PyTorch's partitioner
    unwritten : those that write nothing
    stays : what the graph returns
    """
    readers = LoopReaders(operators, run, unwritten)
    return _together(operators, _early(operators, _late(operators, run, readers, stays), readers, stays))


def _together(operators: Sequence[Operator], run: Sequence[int]) -> list[int]:
    """Return the order with all results of an operator taken out right after it: until then it holds each of them."""
    results = defaultdict[int, list[int]](list)
    for index in run:
        if (source := _taken_from(operators, index)) is not None:
            results[source].append(index)
    placed = {index for group in results.values() for index in group}
    return [each for index in run if index not in placed for each in (index, *results[index])]


def _taken_from(operators: Sequence[Operator], index: int) -> int | None:
    """Return the operator that returns result `index` among several; None for an operator of one result."""
    for source in operators[index].inputs:
        if operators[source].view and operators[source].owner == source:
            return source
    return None


def _late(operators: Sequence[Operator], run: Sequence[int], readers: LoopReaders, stays: Set[int]) -> list[int]:
    keys = {index: place for place, index in enumerate(run)}

    def exists_until(source: int, place: int) -> bool:
        owner = operators[source].owner
        if operators[owner].given and not operators[owner].late:
            return True  # the caller's, such as a weight
        others = readers.of[owner if owner in readers.run else source] - {index}
        return max((keys[other] for other in others), default=-1) >= place

    for index in reversed(run):
        operator = operators[index]
        first = min((keys[each] for each in readers.of[index]), default=keys[index])
        if readers.passes(index):
            keys[index] = max(first, keys[index])
        elif operator.fused or operator.barred or index in stays or not (operator.late and operator.nbytes):
            continue
        elif all(exists_until(source, first) for source in operator.inputs):
            keys[index] = first
    return _by(keys, run)


def _early(operators: Sequence[Operator], run: Sequence[int], readers: LoopReaders, stays: Set[int]) -> list[int]:
    places = {index: place for place, index in enumerate(run)}
    lasting = {operators[index].owner for index in stays}
    keys: dict[int, int] = {}
    direct = defaultdict[int, list[int]](list)
    for index in run:
        for source in operators[index].inputs:
            direct[source].append(index)
        latest = max((keys[source] for source in operators[index].inputs if source in keys), default=-1)
        if readers.passes(index):
            keys[index] = latest
            continue
        keys[index] = places[index]
        for source in readers.overwritten(index) if operators[index].late else ():
            others = readers.of[source] - {index}
            if source not in lasting and all(places[each] < places[index] for each in others):
                keys[index] = min(keys[index], max((keys[each] for each in others), default=latest))
        keys[index] = max(keys[index], latest)
    for index in reversed(run):  # what the compiler may write after all should not exist early
        if readers.passes(index):
            keys[index] = max(keys[index], min((keys[each] for each in direct[index]), default=places[index]))
    return _by(keys, run)


def _by(keys: dict[int, int], run: Sequence[int]) -> list[int]:
    """Return operators by their keys; those of equal keys stay in their order."""
    places = {index: place for place, index in enumerate(run)}
    return sorted(run, key=lambda index: (keys[index], places[index]))
