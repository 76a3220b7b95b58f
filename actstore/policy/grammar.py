"""The text form of decisions, read by recursive descent.

policy    := rule (newline | ";") rule ... | decision        "#" starts a comment
rule      := pattern ":" decision
pattern   := module | module "/" tag | module "/@" operator
module    := glob | "@" alias ["[" slice "]"] ["." glob]
alias     := "blocks" | "attention" | "mlp" | "norm"
operator  := "sdpa" | "matmul" | "conv" | "norm" | "activation" | "collective" | "aten." glob
decision  := "keep"
           | "derive" ["(" decision ")"]
           | "recompute" ["(" inputs ")"]
           | ["unprotected"] codec ["@" tier (">" tier) ...]
inputs    := decision | option "=" value, ... | decision "," option "=" value, ...
codec     := name | name "(" argument "," ... ")"
argument  := flag | option "=" value | codec
tier      := "device" | "group" | "host" | "disk" | a tier of another package
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING
from typing import Any, NamedTuple, TypeVar

from actstore.codecs import registry
from actstore.codecs.base import Codec
from actstore.errors import ConfigError, PolicyError, UnknownCodecError
from actstore.policy.decision import (
    COUNT_UNITS,
    DECISIONS,
    SCHEDULES,
    TIERS,
    Decision,
    Derive,
    Encode,
    Keep,
    Offload,
    Recompute,
    known_tiers,
)
from actstore.policy.options import did_you_mean, near_words, options_of
from actstore.policy.pattern import Pattern

_TOKEN = re.compile(r"(?P<word>[A-Za-z_]\w*)|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<sign>[@>(),=])")
_BRACKETS = re.compile(r"\[[^\]]*\]")
_FORM = "A rule reads 'pattern : decision', such as 'blocks.*.attn : int8 @ host'."

E = TypeVar("E", bound=ConfigError)


class Token(NamedTuple):
    """A word, a number or a sign of a rule, with its offset in the line; the kind "end" follows the last token."""

    kind: str
    text: str
    offset: int

    def __str__(self) -> str:
        return "the end of the rule" if self.kind == "end" else repr(self.text)


class RuleText(NamedTuple):
    """One rule of a policy text: the characters `start` to `end` of line `number`, counted from 1."""

    number: int
    line: str
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.line[self.start : self.end]

    def split(self) -> tuple[str | None, RuleText]:
        """Return the pattern (None where the rule has no colon) and the text of the decision."""
        colon = _BRACKETS.sub(lambda found: "_" * len(found[0]), self.text).find(":")  # a slice has colons, too
        if colon < 0:
            return None, self
        rest = _trim(self.line, self.start + colon + 1, self.end)
        return self.text[:colon].rstrip(), self._replace(start=rest[0], end=rest[1])

    def tokens(self) -> list[Token]:
        """Cut the text of a decision into tokens.

        Raises
        ------
        PolicyError : an invalid character
        """
        tokens, at = [], self.start
        while at < self.end:
            match = _TOKEN.match(self.line, at, self.end)
            if match:
                tokens.append(Token(str(match.lastgroup), match.group(), at))
                at = match.end()
            elif self.line[at].isspace():
                at += 1
            else:
                raise self.error(at, 1, f"unexpected {self.line[at]!r}. Is a colon missing? {_FORM}")
        return [*tokens, Token("end", "", self.end)]

    def error(self, offset: int, width: int, message: str) -> PolicyError:
        """Return a PolicyError about `width` characters from `offset` of the line."""
        return self.locate(PolicyError(message), offset, width)

    def locate(self, error: E, offset: int, width: int) -> E:
        """Add to `error` the line, the column, and the text with carets under the wrong part."""
        shown = self.line.rstrip().expandtabs(1)
        margin = len(shown) - len(shown.lstrip())
        carets = " " * (offset - margin) + "^" * max(width, 1)
        error.args = (
            f"policy, line {self.number}, column {offset + 1}: {error.args[0]}\n    {shown[margin:]}\n    {carets}",
        )
        error.facts.update(line=self.number, column=offset + 1)
        error.__dict__.update(line=self.number, column=offset + 1)
        return error


def split_rules(text: str) -> list[RuleText]:
    """Cut a policy text at newlines and semicolons, without comments and empty rules."""
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        start, code = 0, line.split("#", 1)[0]
        for piece in code.split(";"):
            first, last = _trim(line, start, start + len(piece))
            if first < last:
                rules.append(RuleText(number, line, first, last))
            start += len(piece) + 1
    return rules


def _trim(line: str, start: int, end: int) -> tuple[int, int]:
    while start < end and line[start].isspace():
        start += 1
    while start < end and line[end - 1].isspace():
        end -= 1
    return start, end


_WORDS = ("keep", "derive", "recompute", "unprotected")
# what other libraries say
_OTHER_TIERS = {
    "cpu": "host", "ram": "host", "pinned": "host", "nvme": "disk", "ssd": "disk", "gpu": "device", "cuda": "device"
}  # fmt: skip
_OTHER_DECISIONS = {
    "offload": "'raw @ host'", "checkpoint": "'recompute'", "remat": "'recompute'", "save": "'keep'", "none": "'keep'"
}  # fmt: skip
_RECOMPUTE = {
    "segment": "4",
    "schedule": "auto",
    "slots": "10",
    "first": "100",
    "tiles": "8",
    "decisions": "anew",
}  # options, each with an example

T = TypeVar("T")


class ParsedRule(NamedTuple):
    """A rule and the text that it was read from."""

    pattern: str
    decision: Decision
    source: RuleText


def parse_rules(text: str) -> list[ParsedRule]:
    """Read a policy text: rules in their order, or a decision alone, which means ``* : decision``.

    Raises
    ------
    PolicyError, ChainError, UnknownCodecError : with `line` and `column`, both counted from 1
    """
    rules = split_rules(text)
    if not rules:
        raise PolicyError(
            "the policy text holds no rule. Write a decision such as 'int8' or 'raw @ host', or rules such as "
            "'blocks.*.attn : int8 @ host'."
        )
    parsed = []
    for rule in rules:
        pattern, rest = rule.split()
        if pattern is None and len(rules) > 1:
            raise rule.error(
                rule.start,
                len(rule.text),
                f"{rule.text!r} has no colon. Among several rules each reads 'pattern : decision', and '* : decision' "
                "comes last, for all that no other rule covers.",
            )
        if pattern is not None:
            try:
                Pattern.parse(pattern)
            except PolicyError as error:
                raise rule.locate(error, rule.start, len(pattern)) from None
        parsed.append(ParsedRule(pattern or "*", _Parser(rest).read(), rule))
    return parsed


def parse_decision(text: str) -> Decision:
    """Read one decision: ``keep``, ``int8 @ host > disk``, ``recompute(raw @ disk)``.

    Raises
    ------
    PolicyError, ChainError, UnknownCodecError : with `line` and `column`, both counted from 1
    """
    rules = parse_rules(text)
    if len(rules) > 1 or ":" in rules[0].source.text:
        raise PolicyError(f"{text!r} is a rule or several. Give one decision alone, such as 'int8 @ host'.")
    return rules[0].decision


class _Parser:
    """Parser of one decision; `at` is the index of the next token."""

    def __init__(self, source: RuleText) -> None:
        self.source = source
        self.tokens = source.tokens()
        self.at = 0

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def skip(self, sign: str) -> bool:
        """Skip `sign` if it is next. Returns whether it was."""
        found = self.next.text == sign
        self.at += found
        return found

    def fail(self, token: Token, message: str) -> PolicyError:
        return self.source.error(token.offset, len(token.text), message)

    def read(self) -> Decision:
        decision = self.decision()
        if self.next.kind != "end":
            raise self.fail(self.next, f"{self.next} is unexpected after '{decision}'. {_continuation(decision)}")
        return decision

    def decision(self) -> Decision:
        start = self.next
        if start.text == "keep":
            self.take()
            return Keep()
        if start.text == "derive":
            self.take()
            if not self.skip("("):
                return Derive()
            rest: Any = self.decision()
            self.close(start)
            return self.build(start, lambda: Derive(rest))
        if start.text == "recompute":
            self.take()
            values = self.recomputation() if self.next.text == "(" else {}
            return self.build(start, lambda: Recompute(**values))
        protected = not self.skip("unprotected")
        codec = self.codec()
        if not self.skip("@"):
            return Encode(codec, protected)
        tiers = [self.tier()]
        while self.skip(">"):
            tiers.append(self.tier())
        if tiers == ["device"]:
            return Encode(codec, protected)
        return self.build(start, lambda: Offload(codec, tiers, protected))

    def recomputation(self) -> dict[str, Any]:
        """Read the arguments of a recompute."""
        start = self.tokens[self.at - 1]
        self.take()
        values: dict[str, Any] = {}
        if not self.names_option():
            values["inputs"] = self.decision()
            if not self.skip(","):
                self.close(start)
                return values
        while True:
            token = self.take()
            if token.text not in _RECOMPUTE:
                near = did_you_mean(token.text, _RECOMPUTE)
                options = ", ".join(f"{name}={shown}" for name, shown in _RECOMPUTE.items())
                raise self.fail(token, f"recompute has no option {token}{near} Its options are {options}.")
            if token.text in values:
                raise self.fail(token, f"recompute is given {token.text!r} twice. Leave one out.")
            if not self.skip("="):
                raise self.fail(token, f"{token} must have a value: write '{token.text}={_RECOMPUTE[token.text]}'.")
            values[token.text] = self.setting(token)
            if not self.skip(","):
                self.close(start)
                return values

    def names_option(self) -> bool:
        return self.next.kind == "word" and (self.next.text in _RECOMPUTE or self.tokens[self.at + 1].text == "=")

    def setting(self, option: Token) -> Any:
        """Read the value of an option of recompute."""
        token = self.take()
        if option.text == "schedule":
            if token.text in SCHEDULES:
                return token.text
            near = did_you_mean(token.text, SCHEDULES)
            raise self.fail(token, f"{token} is not a schedule{near} The schedules are {', '.join(SCHEDULES)}.")
        if option.text == "decisions":
            if token.text in DECISIONS:
                return token.text
            raise self.fail(token, f"recompute's decisions must be {' or '.join(DECISIONS)}, not {token}.")
        if option.text == "tiles" and token.text == "auto":
            return token.text
        if not token.text.isdecimal():
            raise self.fail(
                token, f"recompute takes a number of {COUNT_UNITS[option.text]} for '{option.text}', not {token}."
            )
        return int(token.text)

    def tier(self) -> str:
        token = self.take()
        if token.text not in TIERS and token.text not in (known := known_tiers()):
            near = did_you_mean(_OTHER_TIERS.get(token.text, token.text), known)
            raise self.fail(token, f"expected a tier, found {token}{near} The tiers are {', '.join(known)}.")
        return token.text

    def codec(self) -> Codec:
        token = self.take()
        kind = self.codec_class(token)
        values: dict[str, Any] = {}
        if self.skip("("):
            while not self.skip(")"):
                self.argument(kind, values)
                if self.next.text != ")" and not self.skip(","):
                    raise self.fail(self.next, f"expected ',' or ')' in the options of {kind.name}, found {self.next}.")
        missing = [
            name for name, option in options_of(kind).items() if option.default is MISSING and name not in values
        ]
        if missing:
            raise self.fail(token, f"{kind.name} needs its option {missing[0]!r}. {self.usage(kind)}")
        return self.build(token, lambda: kind(**values))

    def codec_class(self, token: Token) -> type[Codec]:
        if token.kind != "word":
            raise self.fail(token, f"expected a codec, 'keep', 'derive' or 'recompute', found {token}.")
        if (tier := _OTHER_TIERS.get(token.text, token.text)) in TIERS:
            raise self.fail(token, f"{token} is a tier, not a codec. For the bytes as they are, write 'raw @ {tier}'.")
        if token.text in _WORDS:
            raise self.fail(
                token, f"{token} cannot stand inside another decision. Write a codec such as 'int8' or 'raw'."
            )
        try:
            return registry.get(token.text)
        except UnknownCodecError as error:
            hint = ""
            if self.next.kind == "word":
                hint = f" If {token} is a module, a colon is missing: '{token.text} : {self.next.text}'."
            elif near := _OTHER_DECISIONS.get(token.text) or near_words(token.text, _WORDS):
                hint = f" Did you mean {near}?"
            if hint:
                error.args = (error.args[0] + hint,)
            raise self.source.locate(error, token.offset, len(token.text)) from None
        except ConfigError as error:  # of the package that registers it
            raise self.source.locate(error, token.offset, len(token.text)) from error.__cause__

    def argument(self, kind: type[Codec], values: dict[str, Any]) -> None:
        """Read ``option=value``, a flag, or the inner codec of `kind` into `values`."""
        token, options = self.next, options_of(kind)
        if token.kind == "word" and self.tokens[self.at + 1].text == "=":
            if token.text not in options:
                near = did_you_mean(token.text, options)
                raise self.fail(token, f"{kind.name} has no option {token}{near} {self.usage(kind)}")
            name, value = self.take().text, self.skip("=") and self.value(kind, token.text)
        elif token.text in options:
            name, value = self.take().text, True
            if options[name].type is not bool:
                raise self.fail(token, f"{token} must have a value: write '{name}=' and {options[name].expected}.")
        else:
            inner = [name for name, option in options.items() if option.takes_codec and name not in values]
            if not inner:
                near = did_you_mean(token.text, options)
                raise self.fail(token, f"{token} is not a flag of {kind.name}{near} {self.usage(kind)}")
            name, value = inner[0], self.codec()
        if name in values:
            raise self.fail(token, f"{kind.name} is given {name!r} twice. Leave one out.")
        values[name] = value

    def value(self, kind: type[Codec], name: str) -> Any:
        option = options_of(kind)[name]
        if option.takes_codec:
            return self.codec()
        token = self.take()
        wrong = self.fail(token, f"{kind.name} takes {option.expected} for {name!r}, not {token}.")
        if token.kind not in ("word", "number"):
            raise wrong
        try:
            return option.read(token.text)
        except ValueError:
            raise wrong from None

    @staticmethod
    def usage(kind: type[Codec]) -> str:
        listed = ", ".join(map(str, options_of(kind).values()))
        return f"Its options, with their defaults, are {listed}." if listed else "It has no options."

    def close(self, start: Token) -> None:
        if not self.skip(")"):
            raise self.fail(self.next, f"expected ')' to close '{start.text}(', found {self.next}.")

    def build(self, start: Token, make: Callable[[], T]) -> T:
        """Call `make`. Adds the position in the text to its error."""
        try:
            return make()
        except ConfigError as error:
            last = self.tokens[self.at - 1]
            raise self.source.locate(error, start.offset, last.offset + len(last.text) - start.offset) from None


def _continuation(decision: Decision) -> str:
    """Return the text that may follow a decision, for an error about other text there."""
    if isinstance(decision, Keep):
        return "Keep takes nothing more: to move tensors away, write 'raw @ host'."
    if isinstance(decision, Derive):
        return "What happens to all other tensors stands in parentheses: 'derive(raw @ host)'."
    if isinstance(decision, Recompute):
        return "What happens to the inputs stands in parentheses: 'recompute(raw @ host)'."
    if isinstance(decision, Encode):
        return f"A tier stands after '@': '{decision} @ host'."
    return f"A further tier stands after '>': '{decision.codec.name} @ host > disk'."
