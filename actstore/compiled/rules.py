"""A policy for the tensors of compiled regions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from uuid import uuid4

import torch
from torch.fx import Graph
from torch.nn import Module

from actstore.base.spec import Site, Spec
from actstore.compiled.budget.plan import RegionBudget
from actstore.compiled.names import NodeNames
from actstore.devices import cpu_memory
from actstore.policy import Decision, Keep, Policy, Rules

AMBIGUOUS = "its code runs for several modules whose rules differ; compile these one by one"
ANY = Spec((), (), torch.float32, torch.device("cpu"))
_ROOMS = ("codecs", "compiled", "policy")  # their sources decide what a graph becomes


@dataclass(frozen=True)
class GraphRules:
    """A policy with what a compiled module needs of its store.

    Attributes
    ----------
    policy : the store's
    named : returns the names of the store's model and its modules
    target : name of the module that is compiled
    min_nbytes : smaller tensors are kept
    roots, parts : names of modules that run again in backward, and of modules inside of them that do not
    budget : of the region, which then chooses what it saves; None for none
    samples : whether graphs measure the errors of their payloads in some steps
    """

    policy: Policy
    named: Callable[[], Iterable[tuple[str, Module]]]
    target: str
    min_nbytes: int
    roots: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    budget: RegionBudget | None = None
    samples: bool = False

    def relative(self, name: str) -> str:
        """Return a module's name relative to the compiled module."""
        return name.removeprefix(self.target).removeprefix(".") if self.target else name

    def decide(
        self, names: NodeNames, name: str, index: int, spec: Spec, operator: str = "", tag: str = ""
    ) -> tuple[Decision, str]:
        """Return the decision on a tensor of the module `name`, and the reason where rules contradict each other."""
        same = [name]
        if name == names.base or name.startswith(f"{names.base}."):
            same = [twin + name.removeprefix(names.base) for twin in names.twins()]
        decisions = [self.policy(Site(each, index, tag, operator), spec) for each in same]
        if any(decision != decisions[0] for decision in decisions):
            return Keep(), AMBIGUOUS
        return decisions[0], ""

    def digest(self, names: NodeNames, graph: Graph, tags: Sequence[tuple[int, str]]) -> str:
        """Return the digest of all that decides about a region: regions of one digest may share compiled code."""
        if not isinstance(self.policy, Rules):
            return uuid4().hex  # other processes do not know the function
        modules = [names.of(node) for node in graph.nodes]
        known = sorted({name for name in modules if name is not None} | {names.base})
        decisions = {self.relative(name): list(map(str, self.decide(names, name, 0, ANY))) for name in known}
        relative = [None if name is None else self.relative(name) for name in modules]
        again = [sorted(map(self.relative, each)) for each in (self.roots, self.parts)]
        calls = [[call for call, _ in names.calls(node)] for node in graph.nodes] if self.roots else []
        order = {call: number for number, call in enumerate(dict.fromkeys(chain.from_iterable(calls)))}
        regions = [[order[call] for call in each] for each in calls]
        settings = [_source_digest(), self.min_nbytes, self.samples, names.has_outside]
        parts = [*settings, decisions, relative, again, regions]
        if self.budget is not None:
            status = cpu_memory.status()  # whose blocks a plan counts
            parts += [
                self.budget.nbytes,
                self.budget.tier,
                self.budget.windows,
                None if self.budget.lossy is None else self.budget.lossy.identity,
                "" if status is None else status.choice,
            ]
        parts += [str(self.policy), tags] if self.policy.names_operators or tags else []
        return sha256(json.dumps(parts).encode()).hexdigest()


@cache
def _source_digest() -> str:
    package = Path(__file__).parents[1]
    files = sorted(path for room in _ROOMS for path in (package / room).rglob("*.py"))
    whole = sha256()
    for path in files:
        whole.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()
