"""Prediction of the effect of payload errors on weight gradients, during training and without an additional backward.

An error in a payload changes the gradients that the nodes reading it compute. From there it travels as the gradients
do, and is assumed to grow as they do: along an edge of the graph its energy grows by |g_out|^2 / |g_in|^2, and into the
weight of a linear layer by |x|^2 / rows, the sum of independent errors in each row. Errors are assumed to be noise with
mean zero. Rounding to nearest has a mean, which `actstore.measure_gradient_error` shows.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from actstore.accuracy.influence.batch_noise import odd
from actstore.accuracy.influence.node_error import (
    CONVOLUTION,
    OVERWRITING,
    POINTWISE,
    SIGN_ONLY,
    WEIGHT_EDGES,
    ElementRange,
    Noise,
    changes,
    convolution_change,
    fan_in,
    linear_change,
    norm,
    part_of,
    probe,
    saved_count,
    scratch_nbytes,
)
from actstore.accuracy.influence.scalars import Scalars
from actstore.autograd.protect import MAX_NODES_INSPECTED, TRANSPARENT
from actstore.autograd.readers import Reader, Readers
from actstore.base.layout import nbytes_of
from actstore.base.ledger import Account, Ledger
from actstore.base.operators import ACCUMULATE_GRAD

BUILT_IN_NODE = re.compile(r"\w+Backward\d+")  # PyTorch's own operators; other nodes may have side effects
WEIGHT = -1  # in an edge, in place of a node's number

# Number of the next node and index of its output, or WEIGHT and the weight's identity; None: no gradient is required.
Edge = tuple[int, int] | None


@dataclass
class GraphNode:
    """An autograd node.

    name : name of its class
    edges : destinations of the gradients that it computes
    once : whether it must not run twice: a custom function, in Python or in C++
    """

    name: str
    once: bool
    edges: list[Edge] = field(default_factory=list)

    @property
    def weights(self) -> list[int]:
        """Indices of the edges that lead to weights."""
        return [k for k, edge in enumerate(self.edges) if edge is not None and edge[0] == WEIGHT]


class Walk:
    """Nodes between outputs of a model and its weights, by sequence number. Leaves other than weights do not count.

    Attributes
    ----------
    points : the nodes by number
    full : whether the graph has more nodes than Python may look at
    """

    def __init__(self) -> None:
        self.points: dict[int, GraphNode] = {}
        self.full = False

    def add(self, roots: Iterable[Any], meet: Callable[[int, Any], None]) -> None:
        """Walk from these nodes, and call `meet` with each new one."""
        stack = list(roots)
        while stack:
            node = stack.pop()
            number = node._sequence_nr()
            if number in self.points or node.name() == ACCUMULATE_GRAD:
                continue
            if len(self.points) == MAX_NODES_INSPECTED:
                self.full = True
                return
            point = self.points[number] = GraphNode(node.name(), BUILT_IN_NODE.fullmatch(node.name()) is None)
            for following, output in node.next_functions:
                edge: Edge = None
                if following is not None and (weight := weight_behind(following)) is not None:
                    edge = (WEIGHT, id(weight))
                elif following is not None and following.name() != ACCUMULATE_GRAD:
                    edge = (following._sequence_nr(), output)
                    stack.append(following)
                point.edges.append(edge)
            meet(number, node)

    def first_weights_first(self) -> list[int]:
        """Return the numbers of all nodes, each after those that its edges lead to.

        A number stands for one node of each thread that ran forward; apparent cycles are cut.
        """
        entered, done = set[int](), dict[int, None]()
        for root in self.points:
            stack = [root]
            while stack:
                number = stack[-1]
                if number in entered:
                    done[stack.pop()] = None
                    continue
                entered.add(number)
                ahead = (edge[0] for edge in self.points[number].edges if edge is not None)
                stack += [n for n in ahead if n in self.points]
        return list(done)


def weight_behind(node: Any) -> Parameter | None:
    """Return the parameter that a gradient goes to from here, with no node between that changes its values."""
    while node is not None and node.name() in TRANSPARENT:
        node = node.next_functions[0][0]
    if node is None or node.name() != ACCUMULATE_GRAD or not isinstance(node.variable, Parameter):
        return None
    return node.variable


def is_compiled(name: str) -> bool:
    """Return whether a node of this name is a region of torch.compile."""
    return name.startswith("CompiledFunction")


def roots_of(leaves: Iterable[Any]) -> list[Any]:
    """Return the nodes that computed these outputs."""
    return [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


SPARE_SHARE = 0.02  # of the peak at the start of backward: bytes by which an observed step may exceed it,
SPARE_NBYTES = 2**19  # or this, if more

Relative = Callable[[Account], Tensor | None]  # the relative L2 error of an account's payloads, on their device

UNREACHED = "no gradient came from the model's outputs to what read it"


@dataclass
class _NodeNorms:
    """Indices of norms in `PredictedStep.norms`: of a node's incoming and outgoing gradients, by edge.

    white : growth of white noise on its way to weights
    local : change of the node's gradients by an account's errors, of the measured size (None) or of a given one
    """

    incoming: list[int] = field(default_factory=list)
    outgoing: dict[int, int] = field(default_factory=dict)
    white: dict[int, int] = field(default_factory=dict)
    local: list[tuple[Account, float | None, dict[int, int]]] = field(default_factory=list)


class PredictedStep:
    """An observed step. Its hooks are on nodes of its graph, and end with these. It holds no tensors of the graph.

    Parameters
    ----------
    levels : more relative errors to predict the effect of
    whole : whether to run every node on all of its elements, with any memory within the budget; otherwise the step
        needs little more memory than any other, and leaves out nodes for which that is too little
    """

    def __init__(
        self, ledger: Ledger, relative: Relative, levels: tuple[float, ...] = (), *, whole: bool = False
    ) -> None:
        self.levels = levels
        self.readers = Readers()
        self.walk = Walk()
        self.seen: dict[int, _NodeNorms] = {}
        self.trouble = ""  # the reason why no prediction is possible
        self.reasons: dict[Account, str] = {}  # by lossy site: the reason why it has no prediction, or ""
        self.norms = Scalars()
        self.relatives: dict[Account, int] = {}
        self.nodes: dict[Account, set[str]] = {}  # names of the nodes that read an account's payloads
        self._ledger = ledger
        self._relative = relative
        self._noise = Noise(ledger)
        self._whole = whole
        self._most: float | None = None  # most held bytes, those of the observation included
        self._closed = False

    def put_out(self, output: Any) -> None:
        """Walk the graph of an output of the outermost module."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.walk.add(roots_of(tree_leaves(output)), self._meet)

    def note(self) -> None:
        """Note the lossy sites after forward, when all payloads have been encoded."""
        met = sorted(self.walk.points)

        def why_not(number: int) -> str:
            """Return the reason for the saver: a node, or the nodes of a Python function with an earlier number."""
            last = met[max(0, bisect_right(met, number) - 1)] if met else number + 1
            point = self.walk.points[last] if last <= number else None
            return _not_twice(point) if point is not None and (point.once or last == number) else ""

        for account, reason in self.readers.lossy(why_not).items():
            self.reasons[account] = self.reasons.get(account) or reason

    def close(self) -> None:
        """End the observation as the next step begins: later results do not count, and earlier ones go to the host."""
        self._closed = True
        self._noise = Noise(self._ledger)
        self.norms.send()

    def _meet(self, number: int, node: Any) -> None:
        readers = self.readers.of(number)
        point = self.walk.points[number]
        for reader in [] if _not_twice(point) else readers:
            reader.capture = True
        node.register_hook(_Hook(self, number))

    def ran(self, number: int, outgoing: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
        """Observe a node that has run in backward, while its saved tensors can still be read."""
        readers = self.readers.of(number)
        try:
            if self._closed:
                return
            if torch.is_grad_enabled():
                self._leave_out(readers, "its backward is itself differentiated")
            elif number not in self.seen:
                self._measure(number, readers, outgoing, incoming)
        except Exception as error:  # an observer must not end the user's backward
            self.trouble = f"a node could not be observed: {error}"
        finally:
            for reader in readers:
                reader.forget()

    # -- in backward --------------------------------------------------------------------------------------------------

    def _measure(
        self,
        number: int,
        readers: list[Reader],
        outgoing: tuple[Tensor | None, ...],
        incoming: tuple[Tensor | None, ...],
    ) -> None:
        gradients = [grad for grad in (*outgoing, *incoming) if grad is not None]
        node: Any = torch._C._current_autograd_node()
        self.trouble = self.trouble or next(filter(None, map(odd, gradients)), "")
        if node is None:
            self.trouble = "backward is compiled"
        if self.trouble:
            return
        point, seen = self.walk.points[number], _NodeNorms()
        self.seen[number] = seen
        put = self.norms.put
        seen.incoming = [put(norm(grad)) for grad in incoming if grad is not None]
        seen.outgoing = {k: put(norm(g)) for k, g in enumerate(outgoing) if g is not None and point.edges[k]}
        why = self._why_not(number, point, readers)
        if why or not seen.incoming:
            self._leave_out(readers, why or UNREACHED)
            return
        for reader in readers:
            reader.shown = reader.captured
        lossy: dict[Account, list[Reader]] = {}
        for reader in readers:
            if (account := reader.lossy) is not None:
                lossy.setdefault(account, []).append(reader)
        try:
            seen.white = self._white(node, number, point, outgoing, incoming)
            for account, its in lossy.items():
                only = its[0] if len(readers) == 1 else None
                self._local(node, point, seen, only, readers, its, account, outgoing, incoming)
        except torch.OutOfMemoryError:
            self._leave_out(readers, "no memory to run its reader once more")

    def _why_not(self, number: int, point: GraphNode, readers: list[Reader]) -> str:
        """Return the reason why a node must not run again, nor its saved tensors be read again; empty without one."""
        if why := _not_twice(point):
            return why
        if number in self.readers.wrapped:
            return "read with tensors that consist of other tensors"
        if any(reader.captured is None for reader in readers):
            return "read by another backward, too"
        return ""

    def _white(
        self,
        node: Any,
        number: int,
        point: GraphNode,
        outgoing: tuple[Tensor | None, ...],
        incoming: tuple[Tensor | None, ...],
    ) -> dict[int, int]:
        """Return the growth of noise on its way to weights, by edge, where it can be computed."""
        edges = [k for k in point.weights if outgoing[k] is not None]
        if not edges or number not in self.readers.seen:
            return {}
        factors = {k: fan_in(node, point.name, k, weight) for k in edges if (weight := outgoing[k]) is not None}
        found = {k: factor for k, factor in factors.items() if factor is not None}
        edges = [k for k in edges if k not in found]
        given = [grad for grad in (*outgoing, *incoming) if grad is not None]
        read = [reader.captured for reader in self.readers.of(number) if reader.captured is not None]
        if edges and self._book(
            None, read, sum(map(nbytes_of, given)) + self._expanded(point, incoming) + scratch_nbytes(given[-1])
        ):
            found |= probe(node, self._noise, incoming, edges)
        return {k: self.norms.put(factor) for k, factor in found.items()}

    def _local(
        self,
        node: Any,
        point: GraphNode,
        seen: _NodeNorms,
        only: Reader | None,
        every: list[Reader],
        readers: list[Reader],
        account: Account,
        outgoing: tuple[Tensor | None, ...],
        incoming: tuple[Tensor | None, ...],
    ) -> None:
        """Record the change of a node's gradients by the errors of a site's payloads that `readers` give it.

        every : all readers of the node
        only : the reader, where the node has no other, of exact payloads included
        """
        relative = self._relative(account)
        if relative is None:
            self._leave_out(readers, "its error was not measured")
            return
        grad, edge = incoming[0], WEIGHT_EDGES.get(point.name, -1)
        linear = edge in point.weights and only is not None and grad is not None
        if linear and point.name == CONVOLUTION:
            linear = not node._saved_transposed
        by_sign = point.name in SIGN_ONLY and all(reader.keeps_signs for reader in readers)
        part = linear or by_sign or self._part(node, point, every, readers, account, outgoing, incoming)
        if part is False:
            self._leave_out(readers, "no room to run its reader once more")
            return
        for level in (None, *self.levels):
            size = relative if level is None else relative.new_full((), level)
            if by_sign:
                sizes = {}
            elif not linear:
                sizes = self._run(node, every, readers, size, part, outgoing, incoming)
            elif only is not None and only.captured is not None and grad is not None and outgoing[edge] is not None:
                change = convolution_change if point.name == CONVOLUTION else linear_change
                sizes = {edge: change(node, only.captured, grad, size)}
            else:
                sizes = {}
            seen.local.append((account, level, {k: self.norms.put(size) for k, size in sizes.items()}))
        if account not in self.relatives:
            self.relatives[account] = self.norms.put(relative)
        self.reasons.setdefault(account, "")
        self.nodes.setdefault(account, set()).add(point.name)

    def _run(
        self,
        node: Any,
        every: list[Reader],
        lossy: list[Reader],
        size: Tensor,
        part: ElementRange | bool,
        outgoing: tuple[Tensor | None, ...],
        incoming: tuple[Tensor | None, ...],
    ) -> dict[int, Tensor]:
        """Return the norms of the changes of a node's gradients by errors of `size` in the payloads of `lossy`.

        part : the elements to run on; True for all
        """
        shown = {reader: reader.captured for reader in every if reader.captured is not None}
        scale, expected = 1.0, outgoing
        try:
            if isinstance(part, ElementRange):
                shown = {reader: part.of(tensor) for reader, tensor in shown.items()}
                incoming = tuple(None if grad is None else part.of(grad) for grad in incoming)
                for reader, tensor in shown.items():
                    reader.shown = tensor
                found = node(*incoming)
                scale, expected = part.scale, found if isinstance(found, tuple) else (found,)
            for reader in lossy:
                reader.shown = self._noise.perturb(shown[reader], size, signs=reader.keeps_signs)
            return {k: size * scale for k, size in changes(expected, node(*incoming)).items()}
        finally:
            for reader in every:
                reader.shown = reader.captured

    def _part(
        self,
        node: Any,
        point: GraphNode,
        every: list[Reader],
        lossy: list[Reader],
        account: Account,
        outgoing: tuple[Tensor | None, ...],
        incoming: tuple[Tensor | None, ...],
    ) -> ElementRange | bool:
        """Return the elements that a node can run on again in the available memory: True for all, False for none."""
        read = [reader.captured for reader in every if reader.captured is not None]
        changed = sum(reader.captured.nbytes for reader in lossy if reader.captured is not None)
        computed = [grad for grad in outgoing if grad is not None]
        given = [grad for grad in incoming if grad is not None]
        scratch = scratch_nbytes(given[0])
        if self._book(account, read, changed + sum(map(nbytes_of, computed)) + scratch):
            return True
        if len(every) != saved_count(node):  # a saved tensor without a reader cannot be cut
            return False
        of_one = (changed + 2 * sum(map(nbytes_of, computed))) / max(1, given[0].numel())
        part = part_of(point.name, [*given, *read, *computed], int((self._spare(read) - scratch) / of_one))
        return part if part is not None and self._book(account, read, int(of_one * part.count) + scratch) else False

    def _expanded(self, point: GraphNode, incoming: tuple[Tensor | None, ...]) -> int:
        """Return the bytes that a pointwise node computes for a weight before it sums them to the weight's shape."""
        return max(nbytes_of(g) for g in incoming if g is not None) if point.name in POINTWISE else 0

    def _spare(self, read: Sequence[Tensor]) -> float:
        """Return the bytes that the observation may take, beside these tensors held for it."""
        ledger = self._ledger
        if self._most is None:
            self._most = inf if self._whole else ledger.peak + max(SPARE_NBYTES, SPARE_SHARE * ledger.peak)
        return min(self._most, ledger.budget.limit) - ledger.held - sum(tensor.nbytes for tensor in read)

    def _book(self, account: Account | None, read: Sequence[Tensor], nbytes: int) -> bool:
        """Record `nbytes` on the ledger beside the tensors in `read`, if they fit, and return whether they do."""
        if nbytes > self._spare(read):
            return False
        self._ledger.touch_peak(account, nbytes + sum(tensor.nbytes for tensor in read), "sampling")
        return True

    def _leave_out(self, readers: list[Reader], reason: str) -> None:
        for reader in readers:
            if (account := reader.lossy) is not None:
                self.reasons[account] = self.reasons.get(account) or reason


class _Hook:
    """Hook on a node. It knows the node only by number, as a reference to a node keeps all that leads to it alive."""

    __slots__ = ("_number", "_step")

    def __init__(self, step: PredictedStep, number: int) -> None:
        self._step, self._number = step, number

    def __call__(self, outgoing: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
        self._step.ran(self._number, outgoing, incoming)


def _not_twice(point: GraphNode) -> str:
    """Return the reason why a node may not run twice; empty where it may."""
    if is_compiled(point.name):
        return "read by a compiled region"
    if point.name in OVERWRITING:
        return f"read by {point.name}, which may overwrite its saved tensors"
    return f"read by {point.name}, which may not run twice" if point.once else ""
