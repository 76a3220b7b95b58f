"""The text of a policy: its rules, their tokens, and the position of each."""

from __future__ import annotations

import re
from typing import NamedTuple, TypeVar

from actstore.errors import ConfigError, PolicyError

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
                raise self.error(at, 1, f"{self.line[at]!r} has no meaning in a decision. {_FORM}")
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
