"""The rules for words of CONTRIBUTING that a program can check: ``python -m tests.release.words actstore/store``."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
READ = ("actstore", "csrc", "docs", "benchmarks", "examples")  # and the pages beside them
SUFFIXES = (".py", ".md", ".cu", ".cuh", ".hpp", ".cpp")

VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text(encoding="utf-8").split())
QUESTIONS = frozenset(["what", "which", "how", "where", "when", "who", "whose", "whether", "why"])
NOUN = re.compile(r"\w+(?:,| (?:of|is|are)\b)")  # "Order of ..." is the noun
PRONOUNS = re.compile(r"(?<![\w.`])(?:somebody|nobody|whoever)\b", re.IGNORECASE)
NEGATIONS = re.compile(r"(?<![Tt]here )\b(?:is no|is none|are no)\b(?! longer| more\b)")
PHRASES = {  # the words to write in their place; a word of PyTorch's documentation is never among the keys
    "re-?materiali[sz]": "recompute", "recalculat": "recompute", "stash": "store", "storage tier": "tier",
    "(?:main|system) memory|host RAM": "host memory", "VRAM|video memory": "device memory",
    "behind": "after", "(?:the|its|their|each|every) begin|begin of": "start, or beginning",
    "(?:the )?most bytes|the most that|least and the most": "peak, upper bound, at most, or range",
    "so many": "the number's name, or n", "what (?:it|they|he|each) ha(?:s|ve)|what has been": "the noun",
    "of which": "a sentence of its own", "is news to": "requires",
    r"\w*(?:optimi|quanti|initiali|normali|seriali|recogni|synchroni|summari|organi|minimi|maximi|speciali|generali|"
    r"materiali|utili|factori|tokeni|visuali)s(?:e[ds]?|ing|ation|ations)": "American spelling, -ize",
    r"(?:behavi|col|neighb|hon|fav)our\w*|grey\w*|licence|modelling|cancelled|labelled|analys(?:e|ed|es|ing)|fulfil|"
    "catalogue|towards|artefact": "American spelling",
}  # fmt: skip
PHRASE = re.compile("|".join(rf"(?P<s{i}>\b(?:{phrase})\b)" for i, phrase in enumerate(PHRASES)), re.IGNORECASE)
RIGHT = re.compile(  # code, and idiomatic uses of these words
    r"`[^`]*`|\b(?:leav\w+|left)\b(?: [\w`]+){0,4} behind\b(?! the)|\b(?:drawn|grid|one interface|figures?|samples|"
    r"measurements|pairs|medians|storages?|tensors?|falls?|fell) behind\b|\bbehind one interface\b"
)
UNBOUND = re.compile(r"# ?-{2}|#!|# (?:type|ruff|mypy|fmt|noqa)\b")  # comments that belong to no line of code
VAGUE = frozenset(["Made", "Seen", "Last", "Place", "Row", "Part"])
# calls that begin with a message, but for two kinds that have Python's own words
RAISES = re.compile(r"^(?!Type|Attribute)\w*(?:Error|Unavailable)$|^warn$")
FAILS = frozenset(["error", "fail", "_refuse", "_wrong"])  # calls that end with one
SENTENCES = re.compile(  # a value at the end that is one or several sentences
    r"\{(?:self\.)?(?:advice|call|error|hint|near|next_step|what|why|EXAMPLE|_FORM|_advice|_continuation|_?usage)"
    r"(?:\(\w+\))?\}$"
)
QUOTED = re.compile(r"(?<!\w)'[^']*'(?!\w)|`[^`]*`|\"[^\"]*\"|\([^()]*\)")
GOES_ON = re.compile(r";\s+(?!expected version)[a-z]")  # these two words are PyTorch's
SENTENCE_END = re.compile(r"(?<=[.?:])\s+|\n")  # what follows a colon is a list or an example
MAX_WORDS = 25
PROSE = re.compile(r"(?![#|<!\-:*\d>])\S")  # the begin of a paragraph: no heading, table, list or HTML
CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
DOCS_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\[*\"\d])")
MAX_SENTENCES = 3


def _text(source: str) -> Iterator[tuple[int, str]]:
    """The comments and strings of a Python file, line by line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            yield from enumerate(token.string.splitlines(), token.start[0])


def _of_docstrings(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        text = ast.get_docstring(node)
        first = re.match(r"[\W_]*(\w+)", text or "")
        if text is None or first is None:
            continue
        word, line = first[1].lower(), getattr(node, "lineno", 1)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and any("property" in ast.unparse(each) for each in node.decorator_list):
            is_function = False
        if word in QUESTIONS:
            yield f"{path}:{line}: rule 1: a docstring begins with {first[1]!r}: {text.splitlines()[0]}"
        elif is_function and (word not in VERBS or NOUN.match(text)):
            yield f"{path}:{line}: rule 1: a function's docstring begins without a verb: {text.splitlines()[0]}"


def _message(node: ast.AST) -> str:
    """The text of a message, with the expression of each value in it; empty for another expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_message, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp):
        left, right = _message(node.left), _message(node.right)
        return left + right if left and right else ""
    return ""


def _of_errors(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if not RAISES.search(name) and name not in FAILS:
            continue
        text = _message(node.args[-1 if name in FAILS else 0])
        if " " not in text:
            continue
        if not text.endswith((".", "?")) and not SENTENCES.search(text):
            yield f"{path}:{node.lineno}: rule 6: an error ends without a full stop: {text}"
        if GOES_ON.search(QUOTED.sub("", text)):
            yield f"{path}:{node.lineno}: rule 6: a sentence of an error goes on after a semicolon: {text}"
        longest = max(SENTENCE_END.split(QUOTED.sub("...", text)), key=lambda sentence: len(sentence.split()))
        if len(longest.split()) > MAX_WORDS:
            yield f"{path}:{node.lineno}: rule 5: a sentence of more than {MAX_WORDS} words: {longest}"


def _of_comments(path: Path, source: str) -> Iterator[str]:
    """The comments with a line of their own, and a blank line after them."""
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in (tokenize.INDENT, tokenize.DEDENT)
    ]
    for token, _, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        alone = token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
        if alone and after.type in (tokenize.NL, tokenize.ENDMARKER) and not UNBOUND.match(token.string):
            yield f"{path}:{token.start[0]}: rule 7: a comment that belongs to no line of code: {token.string}"


def _of_paragraphs(path: Path, text: str) -> Iterator[str]:
    """The paragraphs of a page with too many sentences."""
    text = CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if PROSE.match(paragraph):
            number = len(DOCS_SENTENCE_END.split(QUOTED.sub("`x`", paragraph)))
            if number > MAX_SENTENCES:
                start = paragraph.partition("\n")[0]
                yield f"{path}:{line}: rule 9: a paragraph of {number} sentences, more than {MAX_SENTENCES}: {start}"
        line += paragraph.count("\n")


def _is_in(path: Path, folder: str) -> bool:
    return not folder or str(path).startswith((folder.rstrip("/") + "/", folder + ":")) or str(path) == folder


def findings(folder: str = "") -> Iterator[str]:
    """One line for each place in `folder` that breaks a rule that a program can check."""
    classes = defaultdict[str, list[str]](list)
    pages = list(ROOT.glob("*.md"))
    for path in sorted(pages + [p for room in READ for p in (ROOT / room).rglob("*") if p.suffix in SUFFIXES]):
        name = path.relative_to(ROOT)
        source = path.read_text(encoding="utf-8")
        lines = list(enumerate(source.splitlines(), 1))
        if path.suffix == ".py":
            tree, lines = ast.parse(source), list(_text(source))
            if name.parts[0] == "actstore":
                if _is_in(name, folder):
                    yield from _of_docstrings(name, tree)
                    yield from _of_errors(name, tree)
                if name.parts[1] not in ("bench", "cli", "integrations"):
                    for node in ast.walk(tree):
                        if isinstance(node, ast.ClassDef):
                            classes[node.name.lstrip("_")].append(f"{name}:{node.lineno}")
        if not _is_in(name, folder) or "results" in name.parts:
            continue
        if path.suffix == ".py":
            yield from _of_comments(name, source)
        elif name.parts[0] == "docs" or name == Path("README.md"):
            yield from _of_paragraphs(name, source)
        for number, line in lines:
            if found := PRONOUNS.search(line):
                yield f"{name}:{number}: rule 2: {found[0]!r} names no actor: {line.strip()}"
            if found := PHRASE.search(RIGHT.sub("", line)):
                word = list(PHRASES.values())[int(str(found.lastgroup)[1:])]
                yield f"{name}:{number}: rule 3: {found[0]!r}: write {word}: {line.strip()}"
            if found := NEGATIONS.search(line):
                yield f"{name}:{number}: rule 4: {found[0]!r}: {line.strip()}"
    for name, places in classes.items():
        if not any(_is_in(Path(place), folder) for place in places):
            continue
        if name in VAGUE:
            yield f"{', '.join(places)}: rule 8: {name} names no thing"
        elif len(places) > 1:
            yield f"{', '.join(places)}: rule 8: several classes are named {name}"


if __name__ == "__main__":
    found = list(findings(*sys.argv[1:]))
    print(*found, f"{len(found)} findings", sep="\n")
