"""Rules: the policy that decides by module name and tag, by the first rule that matches, and what it recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from actstore.base.spec import Site, Spec
from actstore.codecs.base import Codec
from actstore.errors import PolicyError
from actstore.policy.decision import Decision, Derive, Encode, Keep, Offload, Policy, Recompute, waits_as
from actstore.policy.grammar import parse_rules
from actstore.policy.pattern import EVERYTHING, Pattern, ancestry, near_modules, shapes

Rule = tuple[Pattern, Decision]


_MAX_NAMES_SHOWN = 8  # names of the model in an error


@dataclass(frozen=True, init=False)
class Rules:
    """Policy of rules: the first rule whose pattern covers the site decides, else `default`.

    A pattern is a glob over dotted module names and covers the modules that it matches and all inside them:
    ``blocks.*.attn`` covers ``blocks.0.attn.proj``. ``*`` crosses dots, ``[0-15]`` is a number from 0 to 15.
    ``blocks.*/qkv`` covers only the tensors there that were tagged ``qkv``, and ``blocks.*/@matmul`` those that a
    matrix product made; a pattern without such a part covers all tensors. A last rule for ``*`` is the default.

    Parameters
    ----------
    rules : pairs of a pattern and a decision
    default : the decision for everything that no rule covers, tensors saved outside of any module included

    Raises
    ------
    PolicyError : not pairs, an invalid pattern, a pattern twice, Recompute for a tag or an operator, or a rule that can
        never apply because earlier rules cover all that it covers

    Notes
    -----
    A value: equality, hash and repr depend on `rules` and `default` alone, and its text parses back to an equal value.
    Thread-safe.
    """

    rules: tuple[tuple[str, Decision], ...]
    default: Decision
    _ordered: tuple[tuple[Pattern, Decision], ...] = field(init=False, compare=False, repr=False)  # default last
    _decided: dict[tuple[str, str, str], Decision] = field(init=False, compare=False, repr=False)

    def __init__(self, rules: Sequence[tuple[str, Decision]] = (), default: Decision | None = None) -> None:
        ordered = _read_rules(rules)
        if default is not None:
            ordered.append((EVERYTHING, _read_decision("the default", default)))
        _require_reachable(ordered)
        if not ordered or ordered[-1][0] != EVERYTHING:
            ordered.append((EVERYTHING, Keep()))
        object.__setattr__(self, "rules", tuple((str(pattern), decision) for pattern, decision in ordered[:-1]))
        object.__setattr__(self, "default", ordered[-1][1])
        object.__setattr__(self, "_ordered", tuple(ordered))
        object.__setattr__(self, "_decided", {})

    @classmethod
    def parse(cls, text: str) -> Rules:
        """Read a policy text: ``pattern : decision`` on each line or between semicolons, or a decision alone.

        Raises
        ------
        PolicyError, ChainError, UnknownCodecError : with `line` and `column`, both counted from 1
        """
        parsed = parse_rules(text)
        try:
            return cls([(rule.pattern, rule.decision) for rule in parsed])
        except PolicyError as error:
            source = parsed[error.facts["number"] - 1].source
            raise source.locate(error, source.start, len(source.text)) from None

    def __str__(self) -> str:
        return "\n".join(f"{pattern} : {decision}" for pattern, decision in self._ordered)

    def __call__(self, site: Site, spec: Spec) -> Decision:
        return self.decide(site.name, site.tag, site.operator)

    def __add__(self, other: Rules) -> Rules:
        """Return the rules of this policy, then those of `other`, with the default of `other`.

        Raises
        ------
        PolicyError : the default of this policy is not keep, so that no rule of `other` could apply; or a rule of
            `other` can never apply because earlier rules cover all that it covers
        """
        if not isinstance(other, Rules):
            return NotImplemented
        own = self.rules if self.default == Keep() else (*self.rules, (str(EVERYTHING), self.default))
        return Rules((*own, *other.rules), other.default)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the rules in their order, the default last."""
        return tuple(decision for _, decision in self._ordered)

    @property
    def names_tags(self) -> bool:
        """True if a rule has a tag."""
        return any(pattern.tag for pattern, _ in self._ordered)

    @property
    def names_operators(self) -> bool:
        """True if a rule has an operator."""
        return any(pattern.operator for pattern, _ in self._ordered)

    @property
    def recomputes(self) -> bool:
        """True if a rule recomputes."""
        return any(isinstance(decision, Recompute) for decision in self.decisions)

    @property
    def codecs(self) -> list[Codec]:
        """Codecs of payloads in rules."""
        return [inner.codec for inner in map(waits_as, self.decisions) if isinstance(inner, Encode | Offload)]

    @property
    def tiers(self) -> set[str]:
        """Names of the tiers in rules."""
        ladders = [inner.tiers for inner in map(waits_as, self.decisions) if isinstance(inner, Offload)]
        return {tier for ladder in ladders for tier in ladder}

    def decide(self, name: str, tag: str = "", operator: str = "") -> Decision:
        """Return the decision for a tensor with this tag that `operator` made, saved in the module `name`; cached."""
        decision = self._decided.get((name, tag, operator))
        if decision is None:
            _, decision = self._rule_of(name, tag, operator)
            self._decided[name, tag, operator] = decision
        return decision

    def pattern_of(self, name: str, tag: str = "", operator: str = "") -> str:
        """Return the pattern of the rule that decides for such a tensor."""
        return str(self._rule_of(name, tag, operator)[0])

    def _rule_of(self, name: str, tag: str, operator: str) -> tuple[Pattern, Decision]:
        return next(rule for rule in self._ordered if rule[0].covers(name, tag, operator))

    def tensor_rules(self, name: str) -> list[tuple[Pattern, Decision]]:
        """Return the rules with a tag or an operator that may decide for tensors of the module `name`."""
        found = []
        for pattern, decision in self._ordered:
            if pattern.tensors and pattern.covers_module(name):
                found.append((pattern, decision))
            elif pattern.covers(name):
                break
        return found

    def tensor_decision(self, name: str, tag: str, operator: str) -> Decision | None:
        """Return the decision for a tensor of the module `name`; None where no rule with a tag or operator decides."""
        pattern, decision = self._rule_of(name, tag, operator)
        return decision if pattern.tensors else None

    def check(self, names: Iterable[str]) -> None:
        """Check that every pattern matches a module of a model with these module names.

        Raises
        ------
        PolicyError : one or more match none; `patterns` holds them, and the message suggests similar names
        """
        names = [name for name in names if name]
        patterns = [pattern for pattern, _ in self._ordered if not pattern.any_module]
        idle = [pattern for pattern in patterns if not any(map(pattern.matches, names))]
        if idle:
            lines = [f"pattern '{pattern}' matches no module of the model{_meant(pattern, names)}" for pattern in idle]
            raise PolicyError("\n".join([*lines, _listed(names)]), patterns=tuple(map(str, idle)))

    def regions(self, names: Sequence[str], blocks: Sequence[str]) -> Regions:
        """Return the modules of a model to wrap for recomputation, and those inside that do not run again.

        The first are the outermost modules that the pattern of a Recompute rule matches itself, unless an earlier rule
        decides on them. Under the default they are the model's repeated blocks. Modules that a decision covers outside
        of these are not recomputed. A module inside one of them on which another rule decides does not run again, and
        may itself hold modules to recompute. Where that rule is `recompute(tiles=n)`, it runs again slice by slice.

        Parameters
        ----------
        names : all module names of the model
        blocks : module names of its repeated blocks

        Raises
        ------
        PolicyError : another rule recomputes a module inside one of these, without tiles or with other options; one
            decides inside of such a module; or the default is Recompute and the model has no blocks
        """
        return regions_of(self._ordered, names, blocks)


def derives(policy: Policy) -> bool:
    """Return whether the policy may derive a tensor."""
    return not isinstance(policy, Rules) or any(isinstance(decision, Derive) for decision in policy.decisions)


def asks_operators(policy: Policy) -> bool:
    """Return whether the policy may depend on the operator that made a tensor."""
    return bool(getattr(policy, "names_operators", False))


def may_be_lossy(policy: Policy) -> bool:
    """Return whether the policy may have a lossy payload."""
    if not isinstance(policy, Rules):
        return True
    return not all(codec.lossless for codec in policy.codecs)


def _read_rules(rules: object) -> list[tuple[Pattern, Decision]]:
    if isinstance(rules, str):
        raise PolicyError(f"Rules takes pairs of a pattern and a decision. Write Rules.parse({rules!r}) for text.")
    if not isinstance(rules, Iterable) or isinstance(rules, Mapping):
        raise PolicyError(f"Rules takes a list of pairs (pattern, decision), whose order counts, not {rules!r}.")
    return [_read_rule(number, rule) for number, rule in enumerate(rules, 1)]


def _read_rule(number: int, rule: object) -> tuple[Pattern, Decision]:
    if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
        raise PolicyError(
            f"rule {number} is {rule!r}. Give a pair of a pattern and a decision: ('blocks.*.attn', Encode(Int8())).",
            number=number,
        )
    pattern = Pattern.parse(rule[0])
    decision = _read_decision(f"the decision of rule {number}, '{pattern}',", rule[1])
    if pattern.tensors and isinstance(decision, Recompute):
        what, names = ("an operator", "an operator makes") if pattern.operator else ("a tag", "a tag names")
        raise PolicyError(
            f"rule '{pattern} : {decision}' recomputes {what}, but {names} tensors and recompute wraps modules. "
            f"Write '{pattern.module} : {decision}'.",
            number=number,
        )
    return (EVERYTHING if pattern.any_module and not pattern.tensors else pattern), decision


def _read_decision(what: str, decision: object) -> Decision:
    if not isinstance(decision, Decision):
        raise PolicyError(
            f"{what} is {decision!r}. Give Keep(), Derive(), Encode(codec), Offload(codec, tiers) or "
            "Recompute(inputs), or write the whole policy as text for Rules.parse."
        )
    return decision


def _require_reachable(ordered: Sequence[tuple[Pattern, Decision]]) -> None:
    """Refuse a rule that can never apply, because the first rule that matches wins."""
    for number, (pattern, decision) in enumerate(ordered, 1):
        for earlier, (wider, other) in enumerate(ordered[: number - 1], 1):
            if not wider.includes(pattern):
                continue
            if wider == pattern:
                advice = "the same pattern. Leave one of them out."
            else:
                advice = f"which covers all that this one does. The first match wins: put '{pattern}' before it."
            raise PolicyError(
                f"rule '{pattern} : {decision}' can never apply: rule {earlier} is '{wider} : {other}', {advice}",
                number=number,
            )


def _meant(pattern: Pattern, names: Sequence[str]) -> str:
    near = [str(pattern._replace(module=module)) for module in near_modules(pattern.module, names)]
    return f". Did you mean {' or '.join(map(repr, near))}?" if near else "."


def _listed(names: Sequence[str]) -> str:
    known = shapes(names)
    more = f" and {len(known) - _MAX_NAMES_SHOWN} more" if len(known) > _MAX_NAMES_SHOWN else ""
    return (
        f"The model has {', '.join(known[:_MAX_NAMES_SHOWN])}{more}." if known else "The model has no modules inside."
    )


class Regions(NamedTuple):
    """Modules of a model that a policy recomputes, and modules inside of them that do not run again.

    Attributes
    ----------
    roots : the recomputed modules, each with its decision
    parts : the outermost modules in them that another rule decides
    tiled : those in them that run in slices, in the first run and in later ones, each with its decision
    """

    roots: dict[str, Recompute]
    parts: list[str]
    tiled: dict[str, Recompute]


def regions_of(ordered: Sequence[Rule], names: Sequence[str], blocks: Sequence[str]) -> Regions:
    """Return the regions of a model; see `Rules.regions`.

    Parameters
    ----------
    ordered : the rules, in the order of matching; the last covers everything
    """
    if isinstance(ordered[-1][1], Recompute) and not blocks:
        raise PolicyError(
            f"'{ordered[-1][0]} : {ordered[-1][1]}' recomputes the repeated blocks of the model, and it has none. Name "
            f"the modules to recompute instead, such as 'encoder : {ordered[-1][1]}'."
        )
    names = [name for name in names if name]
    owners = {name: next(rule for rule in ordered if rule[0].covers(name)) for name in names}  # without rules for tags
    matched = {
        name
        for name, (pattern, decision) in owners.items()
        if isinstance(decision, Recompute) and (name in blocks if pattern == EVERYTHING else pattern.matches(name))
    }
    regions = Regions({}, [], {})
    for name in names:
        root, part, tiled = _around(name, owners, matched)
        decision = owners[name][1]
        if tiled:
            _require_no_tensor_rules(name, tiled, ordered, owners)
        if name == root and isinstance(decision, Recompute):
            regions.roots[name] = decision
        elif name == part:
            regions.parts.append(name)
        elif name == tiled and isinstance(decision, Recompute):
            regions.tiled[name] = decision
    return regions


def _around(name: str, owners: dict[str, Rule], matched: set[str]) -> tuple[str, str, str]:
    """Return the region that a module is in, and the part of it that does not run again, or runs in tiles."""
    root = part = tiled = ""
    for outer in reversed([*ancestry(name)]):
        if outer not in owners:
            continue
        if outer in matched and (part or not root):
            root, part = outer, ""
        elif tiled and owners[outer] is not owners[tiled]:
            raise _conflict(outer, tiled, owners, "runs in tiles as a whole. Leave that rule out")
        elif root and not (part or tiled) and owners[outer] is not owners[root]:
            if isinstance(decision := owners[outer][1], Recompute):
                _require_tiles(outer, root, owners, decision)
                tiled = outer
            else:
                part = outer
    return root, part, tiled


def _require_tiles(inner: str, root: str, owners: dict[str, Rule], decision: Recompute) -> None:
    """Check that a recomputed module inside a region runs in tiles, and stores nothing."""
    plain = Recompute(tiles=decision.tiles)
    if decision.tiles is None:
        why = "runs again as a whole. Leave that rule out, or write patterns for the other parts instead of the whole"
    elif getattr(owners[root][1], "tiles", None) is not None:
        why = "runs in tiles as a whole. Leave that rule out"
    elif decision != plain:
        why = f"computes the inputs of {inner} again, and so none is stored. Write {plain}"
    else:
        return
    raise _conflict(inner, root, owners, why)


def _require_no_tensor_rules(name: str, tiled: str, ordered: Sequence[Rule], owners: dict[str, Rule]) -> None:
    """Refuse a rule by tag or operator for what runs in tiles inside a region, and drops all that it saves."""
    for pattern, decision in ordered:
        if (pattern, decision) == owners[name]:
            return
        if pattern.tensors and pattern.covers_module(name):
            rule = f"{owners[tiled][0]} : {owners[tiled][1]}"
            raise PolicyError(
                f"rule '{pattern} : {decision}' is also for {name}, which runs in tiles inside a recomputed region "
                f"and saves only its inputs. Put '{rule}' before it."
            )


def _conflict(inner: str, outer: str, owners: dict[str, Rule], why: str) -> PolicyError:
    (pattern, decision), (around, region) = owners[inner], owners[outer]
    return PolicyError(
        f"rule '{pattern} : {decision}' lies inside the recomputed region of rule '{around} : {region}' "
        f"({outer} holds {inner}): the region {why}."
    )
