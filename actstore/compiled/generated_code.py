"""Peak memory of a graph that Inductor has compiled, counted in the code that it wrote."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils._pytree import tree_leaves

from actstore.compiled.formats.sizes import hint
from actstore.compiled.graph import IMAGES

_ALLOCATES = "empty_strided_"  # and the kind of device
_CHECK = "assert_size_stride"
_VIEW, _VIEW_OF_TYPE = "reinterpret_tensor", "torch.ops.aten.view.dtype"
_PUT, _READ = "torch.ops.actstore.put.default", "torch.ops.actstore.read.default"
_TOKEN = re.compile(r"(.+)_payload_put(_\d+)?")  # as `Editor` names the placeholders of the backward graph


class GraphFacts(NamedTuple):
    """Facts of a graph that are absent from its generated code.

    Attributes
    ----------
    kept : bytes that exist all the time
    lasting : names of inputs that exist after the graph, too
    owners : names and bytes of the tensors whose memory inputs are, by name
    nbytes_of : returns the bytes that the allocator takes for a number of bytes
    itemsizes : of results whose code says a shape alone, by their shapes
    workspaces : bytes that an operator needs beside its results, by its name and the bytes of its inputs
    away : bytes of what waits in a tier, by the name of its node
    buffers : returns the bytes in buffers while a number of bytes is on its way, or about to be
    """

    kept: int
    lasting: Set[str]
    owners: Mapping[str, tuple[str, int]]
    nbytes_of: Callable[[int], int]
    itemsizes: Mapping[tuple[int, ...], int]
    workspaces: Mapping[tuple[str, int], int]
    away: Mapping[str, int]
    buffers: Callable[[int], int]

    def of_graph(self, itemsizes: Mapping[tuple[int, ...], int], copies: Set[str]) -> GraphFacts:
        """Return the same of a graph as it is compiled.

        itemsizes : of its results, by their shapes
        copies : names of inputs that are copies of what the caller has brought
        """
        owners = {name: owner for name, owner in self.owners.items() if name not in copies}
        return self._replace(itemsizes=itemsizes, owners=owners)

    def of_forward(self) -> GraphFacts:
        """Return the same of the forward graph, whose inputs belong to the caller."""
        return self._replace(kept=0, lasting=frozenset())


def itemsizes_of(graph: Graph) -> dict[tuple[int, ...], int]:
    """Return the largest itemsize of the results of a graph, by their shapes."""
    found: dict[tuple[int, ...], int] = {}
    for value in (value for node in graph.nodes for value in tree_leaves(node.meta.get("val"))):
        if isinstance(value, Tensor):
            shape = tuple(map(hint, value.shape))
            found[shape] = max(found.get(shape, 0), value.itemsize)
    return found


def peak_of(source: str, inputs: Mapping[str, int], facts: GraphFacts) -> int | None:
    """Return the peak of the bytes that exist while the code of a graph runs; None for code of another form.

    inputs : bytes of those that the graph is the last to hold, by name
    """
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if len(calls) != 1:
        return None
    try:
        statements = list(_statements(calls[0].body))
        count = _Count(inputs, facts, statements)
        for statement in statements:
            count.run(statement)
    except _OtherForm:
        return None
    return count.peak


class _OtherForm(Exception):
    pass


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


class _Count:
    """The tensors that exist, by the names that refer to them."""

    def __init__(self, inputs: Mapping[str, int], facts: GraphFacts, statements: Sequence[ast.stmt]) -> None:
        self._facts = facts
        self._nbytes: dict[int, int] = {}
        owners: dict[str, int] = {}
        self._memory: dict[str, set[int]] = {}
        for name, nbytes in inputs.items():
            owner, whole = facts.owners.get(name, (name, nbytes))
            number = owners.setdefault(owner, len(owners))
            self._nbytes[number] = whole
            self._memory[name] = {number}
        self._shapes: dict[str, tuple[int, ...] | None] = {}  # what checks tell of results; None: the run alone knows
        self._parts: dict[str, list[str]] = {}  # results of one operator
        self._others: dict[str, str] = {}  # later names
        for statement in statements:
            if isinstance(statement, ast.Expr) and _name_of(statement.value) == _CHECK:
                assert isinstance(statement.value, ast.Call)
                self._shapes[_name(statement.value.args[0])] = _numbers_or_none(statement.value.args[1])
            elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript):
                self._parts.setdefault(_name(statement.value.value), []).append(_name(statement.targets[0]))
            elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
                self._others[statement.value.id] = _name(statement.targets[0])
        self._workspace = 0
        reads = [each.value for each in statements if isinstance(each, ast.Assign) and _name_of(each.value) == _READ]
        self._moving = sum(map(self._payload, reads))  # bytes that have left, or are to come back
        self.peak = facts.kept + sum(self._nbytes.values()) + facts.buffers(self._moving)

    def run(self, statement: ast.stmt) -> None:
        self._workspace = 0
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._forget(_name(target))
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Name):
                self._assign(target.id, statement.value)
        if isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.Call):
            self._workspace = max(self._workspace, self._workspace_of(statement.value))
        now = self._facts.kept + sum(self._nbytes[number] for number in set().union(*self._memory.values()))
        self.peak = max(self.peak, now + self._workspace + self._facts.buffers(self._moving))

    def _assign(self, name: str, value: ast.expr) -> None:
        called = _name_of(value)
        if called.startswith(_ALLOCATES):
            assert isinstance(value, ast.Call)
            sizes, strides, dtype = value.args[:3]
            shape, steps = _numbers(sizes), _numbers(strides)
            elements = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True)) if all(shape) else 0
            self._memory[name] = {self._new(elements * _itemsize(dtype))}
        elif isinstance(value, ast.Name) or called in (_VIEW, _VIEW_OF_TYPE):
            source = value if isinstance(value, ast.Name) else value.args[0] if isinstance(value, ast.Call) else None
            self._memory[name] = self._memory.get(_name(source), set())
        elif called == _READ:
            nbytes = self._payload(value)
            self._moving -= nbytes
            number = len(self._nbytes)
            self._nbytes[number] = nbytes
            self._memory[name] = {number}
        elif isinstance(value, ast.Call):
            if called == _PUT:
                self._moving += sum(self._nbytes[number] for number in self._numbers_in(value.args[0]))
            # an operator holds all of its results until it goes
            parts = self._parts.get(name, [name])
            self._memory |= {part: {self._new(self._size(part))} for part in parts}
            self._memory[name] = set[int]().union(*(self._memory[part] for part in parts))

    def _size(self, name: str) -> int:
        name = name if name in self._shapes else self._others.get(name, "")
        if name not in self._shapes:
            return 0
        shape = self._shapes[name]
        if shape is None:
            raise _OtherForm
        return prod(shape) * self._facts.itemsizes.get(shape, 8)

    def _new(self, nbytes: int) -> int:
        number = len(self._nbytes)
        self._nbytes[number] = self._facts.nbytes_of(nbytes) if nbytes else 0
        return number

    def _forget(self, name: str) -> None:
        if name not in self._facts.lasting:
            self._memory.pop(name, None)

    def _workspace_of(self, call: ast.Call) -> int:
        """Return the bytes that a call needs while it runs. The weight of a convolution may be a copy."""
        called = [part for part in _name_of(call).split(".") if part not in ("default", "out")][-1]
        arguments = [call.args[at] for at in IMAGES[called]] if called in IMAGES else call.args
        numbers = set[int]().union(*map(self._numbers_in, arguments))
        known = {each: nbytes for (name, each), nbytes in self._facts.workspaces.items() if name == called}
        return known.get(sum(self._nbytes[number] for number in numbers), max(known.values(), default=0))

    def _payload(self, read: ast.expr) -> int:
        """Return the bytes of what waits under the token of a read."""
        assert isinstance(read, ast.Call)
        found = _TOKEN.fullmatch(_name(read.args[0]))
        if found is None or found[1] not in self._facts.away:
            raise _OtherForm
        return self._facts.away[found[1]]

    def _numbers_in(self, argument: ast.expr) -> set[int]:
        """Return the memory that an argument refers to."""
        names = {node.id for node in ast.walk(argument) if isinstance(node, ast.Name)}
        return set[int]().union(*(self._memory.get(name, set()) for name in names))


def _name(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _name_of(value: ast.expr) -> str:
    """Return the dotted name of what is called; empty for no call."""
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


def _numbers(node: ast.expr) -> tuple[int, ...]:
    found = _numbers_or_none(node)
    if found is None:
        raise _OtherForm
    return found


def _numbers_or_none(node: ast.expr) -> tuple[int, ...] | None:
    try:
        found: tuple[int, ...] = ast.literal_eval(node)
    except ValueError:
        return None
    return found


def _itemsize(node: ast.expr) -> int:
    dtype: Any = getattr(torch, ast.unparse(node).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise _OtherForm
    return dtype.itemsize
