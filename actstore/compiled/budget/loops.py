"""Loops of a graph: operators that a compiler runs in one loop, because they read one tensor."""

from __future__ import annotations

from collections.abc import Sequence, Set

from actstore.compiled.budget.operator import Operator


class Loops:
    """The loops of one graph, each at the place of its last operator: what earlier ones read exists until then.

    Parameters
    ----------
    operators : of the step
    run : those of the graph, in the order of the partitioner
    unwritten : those that write nothing

    Attributes
    ----------
    order : of the operators, where those of a loop stand together
    last : of each position of `order`, that of the last operator of its loop
    """

    def __init__(self, operators: Sequence[Operator], run: Sequence[int], unwritten: Set[int]) -> None:
        self._operators = operators
        self._loop = {index: index for index in run}  # the first operator of the loop
        self._members = {index: [index] for index in run}
        self._before: dict[int, int] = {}  # bits of all operators that each one needs, itself included
        self._apart: dict[int, int] = {}  # bits of those that it needs by way of an operator outside of loops
        places = {index: place for place, index in enumerate(run)}
        readers: dict[int, list[int]] = {}  # written operators of loops, by what they read
        reads: dict[int, set[int]] = {}
        for index in run:
            operator = operators[index]
            known = [source for source in operator.inputs if source in places]
            above = self._union(self._before, known)
            inside = operator.inlined or operator.view
            self._before[index] = above | 1 << places[index]
            self._apart[index] = self._union(self._apart, known) if inside else above
            hidden = [source for source in operator.inputs if source in unwritten or operators[source].view]
            owners = {operators[source].owner for source in operator.inputs if source not in unwritten}
            reads[index] = owners.union(*(reads.get(source, set()) for source in hidden))
            if not operator.inlined or index in unwritten or not operator.nbytes:
                continue
            for owner in reads[index]:
                if operators[owner].nbytes < operator.nbytes:
                    continue  # such as a weight
                for other in readers.setdefault(owner, []):
                    self._join(self._loop[other], self._loop[index], places)
                readers[owner].append(index)
            readers.setdefault(index, []).append(index)
        self._sort(run, places)

    def _union(self, bits: dict[int, int], sources: Sequence[int]) -> int:
        found = 0
        for source in sources:
            found |= bits[source]
        return found

    def _join(self, one: int, other: int, places: dict[int, int]) -> None:
        """Join two loops where none needs the other by way of an operator outside."""
        if one == other:
            return
        first, second = self._members[one], self._members[other]
        for these, those in ((first, second), (second, first)):
            bits = sum(1 << places[index] for index in these)
            if any(self._apart[index] & bits for index in those):
                return
        for index in second:
            self._loop[index] = one
        first += self._members.pop(other)

    def _sort(self, run: Sequence[int], places: dict[int, int]) -> None:
        at = dict[int, int]()
        for index in run:
            members = self._members[self._loop[index]]
            above = [at[source] for source in self._operators[index].inputs if source in at]
            at[index] = max(places[index], *(places[member] for member in members), *above)
        alone = {index: len(self._members[self._loop[index]]) == 1 for index in run}
        self.order = sorted(run, key=lambda index: (at[index], alone[index], places[index]))
        ends = {self._loop[index]: position for position, index in enumerate(self.order)}
        self.last = [ends[self._loop[index]] for index in self.order]
