"""Every block of code in README and docs/ runs, or, where it is a shell command, names what exists.

The Python blocks of a page run in order in one namespace; what a page takes for granted stands in it as a comment,
`<!-- invisible-code-block: python`. A block that is not to be run has `<!-- skip: next "reason" -->` before it.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from contextlib import suppress
from pathlib import Path
from unittest import SkipTest

import pytest

pytest.importorskip("sybil", reason="sybil, which reads the blocks, is not installed")
pytest.importorskip("typer")

import typer
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from actstore.cli.commands import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
LANGUAGES = {"python", "sh", "text", "toml", "yaml"}
NEEDS = {
    "docs/guide/trainers.md": ("transformers", "accelerate", "peft", "lightning"),
}
YOURS = ("train.py", "my_module.py")  # scripts of the reader
SYBIL = Sybil([PythonCodeBlockParser(), SkipParser()])


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of every block of a page."""
    return FENCE.findall((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")  # of workers and devices of this machine
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # what peft asks for
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # lightning's
@pytest.mark.parametrize("page", [page for page in PAGES if any(language == "python" for language, _ in blocks(page))])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, one_thread):
    for name in NEEDS.get(page, ()):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    examples = list(SYBIL.parse(ROOT / page).examples())
    assert examples
    for example in examples:
        with suppress(SkipTest):
            example.evaluate()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language(page):
    assert [(language, text) for language, text in blocks(page) if language not in LANGUAGES] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_left_out_without_a_reason(page):
    assert re.findall(r"<!--+ *skip: *(?!next \"\w).*", (ROOT / page).read_text(encoding="utf-8")) == []


COMMANDS = [(page, line) for page in PAGES for language, text in blocks(page) if language == "sh"
            for line in text.replace("\\\n", " ").splitlines()]  # fmt: skip


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_is_one_that_exists(page, line):
    words = shlex.split(line, comments=True)
    if words:
        check(words)


@pytest.mark.parametrize(
    "line",
    [
        "make unheard",
        "actstore unheard",
        "actstore bench --unheard",
        "actstore show",
        "pip install 'actstore[unheard]'",
        "python -m unheard.module",
        "python unheard.py",
        "unheard",
    ],
)
def test_a_command_that_does_not_exist_is_found(line):
    with pytest.raises(Refused):
        check(shlex.split(line))


class Refused(AssertionError):
    """A command that does not exist, or not so."""


def check(words: list[str]) -> None:
    """Refuse what the Makefile, the command line, the extras or the files have nothing of."""
    command, *rest = words
    if command == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        unknown = [word for word in rest if "=" not in word and word not in targets]
    elif command == "actstore":
        unknown = parse(typer.main.get_command(app), "actstore", rest)
    elif command == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        named = {name for word in rest for found in re.findall(r"\[(.+)\]", word) for name in found.split(",")}
        unknown = sorted(named - set(extras))
    elif command in ("python", "torchrun"):
        script = next(word for word in rest if "." in word)
        path = script if script.endswith(".py") else script.replace(".", "/") + ".py"
        unknown = [] if path in YOURS or (ROOT / path).exists() else [path]
    else:
        unknown = [command]
    if unknown:
        raise Refused(f"{shlex.join(words)}: {', '.join(unknown)}")


def parse(command, name: str, words: list[str], parent=None) -> list[str]:
    """Read the words as the command line does, down to the last command, and run none. What it says against them."""
    try:
        with command.make_context(name, list(words), parent=parent) as context:
            if hasattr(command, "resolve_command") and (left := [*context._protected_args, *context.args]):
                found, inner, rest = command.resolve_command(context, left)
                return parse(inner, found, rest, context)
    except Exception as error:  # typer's own kinds, whose module is private to it
        return [f"{type(error).__name__}: {getattr(error, 'message', error)}"]
    return []
