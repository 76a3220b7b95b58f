"""Builder of the site from the repository: pages of other folders, and docstrings as Markdown.

Links and pictures of pages are written as seen from their own folder; here they get the addresses of the site.
``<!-- evidence: Tasks -->`` in a page stands for the text below that heading of each machine's page (`EVIDENCE`), which
is made from figures.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from actstore.cli.commands import app

ROOT = Path(__file__).parents[1]
# Pages whose source lies outside of docs/, with their addresses. FILES: more pages, and files that pages link to.
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "development.md"}
FOLDER_PAGES = {"csrc": "formats.md"}  # targets of links to a folder
EVIDENCE = "benchmarks/results/*/evidence.md"
FILES = (
    "csrc/*.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "benchmarks/results/**/*.png",
    "benchmarks/results/**/*.json",
    "examples/*.py",
)
PART = re.compile(r"^<!-- evidence: (.+) -->$", re.MULTILINE)
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#:\s]+)((?:#[^)]*)?\))")
SECTION = re.compile(r"^([A-Z][a-z]+)\n-{3,}$", re.MULTILINE)
ENTRY = re.compile(r"^([\w.*]+(?:, [\w.*]+)*) : ", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add files from outside of docs/, at their path in the repository."""
    for path in sorted({path for pattern in FILES for path in ROOT.glob(pattern)} | {ROOT / name for name in PAGES}):
        name = path.relative_to(ROOT).as_posix()
        address = PAGES.get(name, name)
        if files.get_file_from_path(address) is None:
            files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the commands and the evidence, and point links at the addresses of the site."""
    here = page.file.src_uri
    source = Path(page.file.abs_src_path or "").resolve().relative_to(ROOT).as_posix()
    markdown = _linked(markdown, source, here, files).replace("<!-- commands -->", commands())
    return PART.sub(lambda found: _evidence(found[1], here, files), markdown)


def _evidence(heading: str, here: str, files: Files) -> str:
    """Return what all machines measured below a heading; of several machines, each below its name."""
    pages = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(EVIDENCE))
    parts = {page: _linked(_below(page, heading), page, here, files) for page in pages}
    named = (f"**{posixpath.basename(posixpath.dirname(page))}**\n\n{part}" for page, part in parts.items())
    return "\n\n".join(named if len(pages) > 1 else parts.values())


def _below(page: str, heading: str) -> str:
    """Return the text below a heading of the second level, up to the next one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise PluginError(f"{page} must have the heading {heading!r}: a page of docs/ takes the text below it")
    return found[1].strip()


def _linked(markdown: str, source: str, here: str, files: Files) -> str:
    def lead(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        address = FOLDER_PAGES.get(path) or PAGES.get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(address) is None:
            if (ROOT / path).exists():  # a file of the repository that the site does not show
                return f"`{path}`"
            return found[0]  # mkdocs reports a wrong target
        return f"{before}{posixpath.relpath(address, posixpath.dirname(here) or '.')}{after}"

    return LINK.sub(lead, markdown)


def commands() -> str:
    """Return every command of the command line with its arguments and options, as they describe themselves."""
    lines = []
    for name, command in sorted(_walk("actstore", typer.main.get_command(app))):
        lines += [f"\n## {name}\n", command.help or "", "\n| argument | | default |\n|---|---|---|"]
        for option in command.params:
            names = ", ".join(
                f"`{text}`" for text in (option.opts if option.opts[0][0] == "-" else [option.name.upper()])
            )
            default = "" if option.default in (None, "") or callable(option.default) else f"`{option.default}`"
            shown = option.show_default if isinstance(option.show_default, str) else default
            lines.append(f"| {names} | {(option.help or '').replace('|', chr(92) + '|')} | {shown} |")
    return "\n".join(lines)


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield a command and its subcommands; groups that only hold subcommands are left out."""
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        yield name, command
    for word, child in inner.items():
        yield from _walk(f"{name} {word}", child)


class Docstrings(griffe.Extension):
    """Docstrings as Markdown: sections as bold words, "name : text" as an item of a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Convert one docstring, in this project's style, to Markdown."""
    text = SECTION.sub(r"\n**\1**\n", text)
    lines: list[str] = []
    for line in text.splitlines():
        entry = ENTRY.match(line)
        if entry:
            before = [""] if lines and lines[-1] and not lines[-1].startswith(("* ", "    ")) else []
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            lines += [*before, f"* {names}: {line[entry.end() :]}"]
        else:
            lines.append(line)
    return "\n".join(lines)
