"""A training step of a compiled region: its operators, and what each choice of saved tensors makes of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import add, sub

from actstore.compiled.budget.lane import Moved, Payloads, TierLane
from actstore.compiled.budget.operator import Operator
from actstore.compiled.budget.order import LoopReaders, ordered


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


@dataclass(frozen=True)
class RegionEvaluation:
    """A step with one choice of saved tensors.

    Attributes
    ----------
    saved : indices of the tensors that backward gets from forward, inputs included
    again : indices of the operators that both graphs run
    held : bytes by owner of the memory that forward leaves for backward on the device
    encoded : the bytes of payloads among them, which stand for a tensor with a loss
    away : bytes by owner of what it leaves in a tier
    times : ms of each of `forward`, and of each of `backward`
    forward, backward : operators in the order in which they run
    live : bytes while each of `forward` runs, and each of `backward`
    window : of the copies to the tier, in bytes; 0 where nothing leaves the device
    on_device : the same choice where nothing leaves the device; None for this one
    exact : the same choice where nothing leaves, and nothing is encoded; None for this one
    """

    saved: frozenset[int]
    again: frozenset[int]
    held: dict[int, int]
    encoded: dict[int, int]
    away: dict[int, int]
    times: tuple[list[float], list[float]]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    live: tuple[list[int], list[int]]
    window: int = 0
    on_device: RegionEvaluation | None = None
    exact: RegionEvaluation | None = None

    @cached_property
    def ms(self) -> float:
        """Time of all operators."""
        return sum(map(sum, self.times))

    def with_masks(self, nbytes: int) -> RegionEvaluation:
        """Return the same, where forward also saves masks of `nbytes`."""
        forward, backward = ([now + nbytes for now in live] for live in self.live)
        return replace(self, live=(forward, backward)) if nbytes else self

    @property
    def moved(self) -> int:
        """Bytes that forward leaves in a tier."""
        return sum(self.away.values())

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return max(max(live, default=0) for live in self.live)


@dataclass(frozen=True)
class RegionStep:
    """A step of one region, as its joint graph has it: forward first, then backward.

    Its bytes are those that the region allocates: what forward saves and returns, temporary results of both graphs, and
    gradients. What the caller brings is not among them, except for gradients of what forward returned.

    Attributes
    ----------
    operators : in the order of the joint graph
    returned : indices of what forward returns
    gradients : indices of what backward returns
    ordered : whether a plan orders backward anew, and loops take the memory of what they are the last to read
    lane : the way to the tier that saved tensors may wait in; None for none
    encodes : whether saved tensors may wait as payloads with a loss
    """

    operators: Sequence[Operator]
    returned: tuple[int, ...]
    gradients: tuple[int, ...]
    ordered: bool = False
    lane: TierLane | None = None
    encodes: bool = False

    @cached_property
    def forward(self) -> tuple[int, ...]:
        """Operators that make what forward returns."""
        return self.sources(self.returned, frozenset())

    def evaluate(self, wanted: Set[int], *, loops: bool = False) -> RegionEvaluation:
        """Evaluate a choice of saved tensors. Those that backward does not read are not saved.

        loops : whether the compiler runs operators in one loop because they read one tensor
        """
        operators = self.operators
        saved, backward = self._backward(wanted)
        if self.ordered and not loops:
            stays = set(self.gradients)
            backward = tuple(ordered(operators, backward, self._readers(backward, stays)[1], stays))
        own = {index for index in saved if not operators[index].given}
        forward = self.sources((*self.returned, *own), frozenset())
        held = {owner: operators[owner].nbytes for owner in sorted({operators[index].owner for index in own})}
        first = self._graph(forward, {*self.returned, *own}, {}, (), loops=loops)
        kept = {operators[index].owner: operators[operators[index].owner].nbytes for index in self.returned}
        second = self._graph(
            backward, set(self.gradients), held | kept, saved | kept.keys(), lasting=kept.keys(), loops=loops
        )
        return RegionEvaluation(
            frozenset(saved),
            frozenset(backward).intersection(forward),
            held,
            {},
            {},
            (first[0], second[0]),
            forward,
            backward,
            (first[1], second[1]),
        )

    def leaving(self, found: RegionEvaluation, away: Set[int], window: int = 0) -> RegionEvaluation:
        """Evaluate a choice anew, where what it saves of the owners `away` waits in the tier, if it can.

        window : of the copies, in bytes; 0 for the smallest
        """
        found = found.on_device or found
        lane, operators = self.lane, self.operators
        gone = {owner: found.held[owner] for owner in self.movable(found) if owner in away}
        if lane is None or not gone:
            return found
        last, begin = self._around(found)
        window = window or lane.windows[0]

        def payloads(graph: int, run: Sequence[int], places: dict[int, int]) -> Payloads:
            opens = [not (lane.on_host and operators[index].fused) for index in run]
            order = sorted((places[owner], nbytes) for owner, nbytes in gone.items())
            return Payloads(order, found.times[graph], opens)

        out = lane.leave(payloads(0, found.forward, last), window)
        back = lane.come(payloads(1, found.backward, begin), window, out.after_ms)
        absent = [0] * (len(found.forward) + 1), [0] * (len(found.backward) + 1)  # changes after each operator
        absent[1][0] = sum(gone.values())
        for owner, nbytes in gone.items():
            absent[0][last[owner] + 1] += nbytes
            absent[1][begin[owner]] -= nbytes

        def changed(graph: int, moved: Moved) -> tuple[list[float], list[int]]:
            there = map(sub, moved.waiting, accumulate(absent[graph]))
            return list(map(add, found.times[graph], moved.ms)), list(map(add, found.live[graph], there))

        forward, backward = changed(0, out), changed(1, back)
        return replace(
            found,
            held={owner: nbytes for owner, nbytes in found.held.items() if owner not in gone},
            away=gone,
            times=(forward[0], backward[0]),
            live=(forward[1], backward[1]),
            window=window,
            on_device=found,
        )

    def encoding(self, found: RegionEvaluation, owners: Set[int]) -> RegionEvaluation:
        """Evaluate a choice anew, where payloads stand for what it saves of `owners`, if they may; nothing leaves."""
        found = found.on_device or found
        found, operators = found.exact or found, self.operators
        payloads = {owner: operators[owner].encoded for owner in self.encodable(found) if owner in owners}
        if not payloads:
            return found
        last, begin = self._around(found)
        times = list(found.times[0]), list(found.times[1])
        changes = [0] * (len(found.forward) + 1), [0] * (len(found.backward) + 1)
        for owner, nbytes in payloads.items():
            held, workspace = found.held[owner], operators[owner].code_workspace
            changes[1][0] += nbytes - held
            for graph, at, here, behind in ((0, last[owner], nbytes, -held), (1, begin[owner], held, -nbytes)):
                times[graph][at] += operators[owner].code_ms
                changes[graph][at] += here + workspace
                changes[graph][at + 1] += behind - workspace
        forward, backward = (
            list(map(add, live, accumulate(change))) for live, change in zip(found.live, changes, strict=True)
        )
        return replace(
            found,
            held=found.held | payloads,
            encoded=payloads,
            times=times,
            live=(forward, backward),
            exact=found,
        )

    def movable(self, found: RegionEvaluation) -> list[int]:
        """Return the owners whose memory can wait in the tier: what is saved of each is all of it, once or in parts."""
        operators = self.operators
        parts = {owner: [operators[index].movable for index in members] for owner, members in self._own(found).items()}
        return [
            owner
            for owner, nbytes in parts.items()
            if owner not in found.encoded and all(nbytes) and operators[owner].movable in (sum(nbytes), min(nbytes))
        ]

    def encodable(self, found: RegionEvaluation) -> list[int]:
        """Return the owners for whose memory payloads may stand."""
        return [owner for owner in self._own(found) if self.operators[owner].encoded] if self.encodes else []

    def _own(self, found: RegionEvaluation) -> dict[int, list[int]]:
        """Return the saved tensors by the owner of their memory, where neither graph returns that."""
        returned = {self.operators[index].owner for index in (*self.returned, *self.gradients)}
        return {owner: members for owner, members in self.members(found).items() if owner not in returned}

    def _around(self, found: RegionEvaluation) -> tuple[dict[int, int], dict[int, int]]:
        """Return the place of the last reader in forward of each saved owner, and that of the first one in backward."""
        operators, last, begin = self.operators, dict[int, int](), dict[int, int]()
        for at, index in enumerate(found.forward):
            last |= {operators[each].owner: at for each in (index, *operators[index].inputs)}
        for at, index in enumerate(found.backward):
            for source in found.saved.intersection(operators[index].inputs):
                begin.setdefault(operators[source].owner, at)
        return last, begin

    def members(self, found: RegionEvaluation) -> dict[int, list[int]]:
        """Return the saved tensors that the caller does not bring, by the owner of their memory."""
        members: dict[int, list[int]] = {}
        for index in sorted(found.saved):
            if not self.operators[index].given:
                members.setdefault(self.operators[index].owner, []).append(index)
        return members

    def loops_of(self, found: RegionEvaluation) -> list[int]:
        """Return the operators of backward that write a result in a loop."""
        unwritten = self._readers(found.backward, set(self.gradients))[1]
        return [index for index in found.backward if self.operators[index].inlined and index not in unwritten]

    def sources(self, targets: Iterable[int], stop: Set[int]) -> tuple[int, ...]:
        """Return the operators that `targets` need, in their order, where nodes in `stop` are known."""
        todo, found = [index for index in targets if index not in stop], set[int]()
        while todo:
            index = todo.pop()
            if index not in found and not self.operators[index].given:
                found.add(index)
                todo.extend(source for source in self.operators[index].inputs if source not in stop)
        return tuple(sorted(found))

    def _backward(self, wanted: Set[int]) -> tuple[set[int], tuple[int, ...]]:
        """Return what backward gets from forward, and its operators in the order of PyTorch's partitioner.

        It runs an operator of forward again right before the first operator of backward that needs it.
        """
        operators = self.operators
        saved, needed, todo = set[int](), set[int](), list(self.gradients)
        while todo:
            index = todo.pop()
            operator = operators[index]
            if index in needed or index in saved:
                continue
            if operator.given or (not operator.late and (index in wanted or operator.barred)):
                saved.add(index)
                continue
            needed.add(index)
            todo.extend(operator.inputs)
        saved = {index for index in saved if not (operators[index].given and operators[index].late)}
        late = [index for index in needed if operators[index].late]
        start = min(late, default=0)
        placed, order = set[int](), list[int]()
        for target in sorted(index for index in needed if index >= start):
            missing, todo = set[int](), [target]
            while todo:
                index = todo.pop()
                if index in needed and index not in placed and index not in missing:
                    missing.add(index)
                    todo.extend(operators[index].inputs)
            placed |= missing
            order += sorted(missing)
        rest = self.sources(self.gradients, placed | saved)  # gradients that depend on no gradient of an output
        return saved, (*order, *rest)

    def _graph(
        self,
        run: Sequence[int],
        stays: Set[int],
        begin: dict[int, int],
        members: Collection[int],
        lasting: Collection[int] = (),
        *,
        loops: bool,
    ) -> tuple[list[float], list[int]]:
        """Return the ms of each operator of a graph, and the bytes while it runs.

        A loop takes no time to write what it does not write. Where loops may run at either place, the bytes are the
        most of both.

        Parameters
        ----------
        stays : what the graph returns
        begin : bytes by owner that exist at the beginning
        members : nodes from before the graph: owners, and views of them
        lasting : owners that exist to the end
        """
        readers = self._readers(run, stays)
        unwritten = readers[1]
        every = [(index, self.operators[index]) for index in run]
        times = [each.ms if index in unwritten else each.ms + each.write_ms for index, each in every]
        live = self._placed(run, range(len(run)), readers, begin, members, lasting)
        if not loops or not any(each.inlined for _, each in every):
            return times, live
        joined = Loops(self.operators, run, unwritten)
        readers = self._readers(joined.order, stays)
        other = self._placed(joined.order, joined.last, readers, begin, members, lasting)
        later = dict(zip(joined.order, other, strict=True))
        return times, [max(nbytes, later[index]) for index, nbytes in zip(run, live, strict=True)]

    def _placed(
        self,
        run: Sequence[int],
        places: Sequence[int],
        readers: tuple[dict[int, int], set[int]],
        begin: dict[int, int],
        members: Collection[int],
        lasting: Collection[int],
    ) -> list[int]:
        """Return the bytes while each operator of a graph runs, where those up to the same place run at once."""
        operators, end = self.operators, len(run)
        last, unwritten = readers
        ends = [0] * (end + 1)
        until = dict.fromkeys(begin, 0) | dict.fromkeys(lasting, end)
        for index in members:
            owner = operators[index].owner
            if owner in until:
                until[owner] = max(until[owner], last.get(index, 0))
        for index in (index for index in last if operators[index].given and operators[index].late):
            begin = begin | {index: operators[index].nbytes}
            until[index] = last[index]
        for owner, nbytes in begin.items():
            ends[until[owner]] += nbytes
        made = [0 if index in unwritten else operators[index].nbytes for index in run]
        for position, index in enumerate(run):
            ends[last.get(index, position)] += made[position]
        for source in self._overwritten(run, places, last, unwritten):
            position, nbytes = last[source], operators[source].nbytes
            made[position] -= nbytes
            ends[position] -= nbytes
        live, now, start = list[int](), sum(begin.values()), 0
        while start < end:
            stop = places[start] + 1
            now += sum(made[start:stop])
            live += [now + operators[index].workspace for index in run[start:stop]]
            now -= sum(ends[start:stop])
            start = stop
        return live

    def _overwritten(
        self, run: Sequence[int], places: Sequence[int], last: dict[int, int], unwritten: Set[int]
    ) -> Iterator[int]:
        """Yield results whose memory the last operator that reads each takes, where each runs at a place of its own."""
        if not self.ordered or not isinstance(places, range):
            return
        readers, gone = LoopReaders(self.operators, run, unwritten), set[int]()
        for position, index in enumerate(run):
            free = [source for source in readers.overwritten(index) if last[source] == position and source not in gone]
            if free:
                gone.add(free[0])
                yield free[0]

    def _readers(self, run: Sequence[int], stays: Set[int]) -> tuple[dict[int, int], set[int]]:
        """Return the position of the last operator that reads each one's result, and those that write nothing."""
        operators, end = self.operators, len(run)
        written, last = set(stays), dict.fromkeys(stays, end)
        unwritten = set[int]()
        for position in range(end - 1, -1, -1):
            index = run[position]
            operator = operators[index]
            read = position
            inlined = operator.inlined and index not in written
            if inlined:
                unwritten.add(index)
            if inlined or operator.view:
                read = last.get(index, position)
            through = not operator.fused or (operator.view and index in written)
            for source in operator.inputs:
                last[source] = max(last.get(source, -1), read)
                if through:
                    written.add(source)
        return last, unwritten
