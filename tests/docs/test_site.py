"""The documentation site builds without a warning, fetches nothing, and has a place for every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("material")  # mkdocs-material
pytest.importorskip("mkdocstrings")
pytest.importorskip("typer")

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import actstore
from actstore import codecs, results, tiers
from docs import site as builder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Targets(HTMLParser):
    """What a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("img", "script", "source", "iframe"):
            self.found.append(values.get("src") or "")
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.found.append(values.get("href") or "")


def targets(page: Path) -> list[str]:
    parser = Targets()
    parser.feed(page.read_text(encoding="utf-8"))
    return [target for target in parser.found if target]


def test_a_page_fetches_only_what_the_site_has(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for target in targets(page):
            path = target.partition("?")[0]
            place = site / path.lstrip("/") if page.name == "404.html" else page.parent / path
            assert "//" not in target, f"{page.name}: {target}"
            assert place.exists(), f"{page.name}: {target}"


def test_every_public_name_is_in_the_reference(site):
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    named = set(re.findall(r'id="actstore\.(?:\w+\.)*(\w+)"', pages))
    public = {*actstore.__all__, *codecs.__all__, *tiers.__all__, *results.__all__} - {"__version__"}
    assert sorted(public - named) == []


def test_docstrings_are_lists_not_headings(site):
    page = (site / "reference" / "store.html").read_text(encoding="utf-8")
    assert "<li>\n<p><code>min_bytes</code>" in page or "<li><code>min_bytes</code>" in page
    assert "----" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_every_command_is_in_the_reference(site):
    page = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    for command in ("bench", "bench codecs", "bench compare", "plan", "show", "verify"):
        assert f">actstore {command}<" in page, command
    assert "--tolerance" in page


def test_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    assert len(text.split()) <= 1600


def test_links_of_readme_lead_to_files():
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))
def test_a_page_owns_its_text(page):
    """A page takes commands and evidence, which are made from code and from figures, and nothing from README."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "README.md#" not in text.replace("benchmarks/README.md#", "")
    assert re.findall(r"<!-- *part:.*", text) == []
    assert "<!-- evidence: " not in text or page == "docs/guide/convergence.md"


def test_the_site_takes_nothing_from_readme():
    assert re.findall(r"(?<!benchmarks/)README", (ROOT / "docs" / "site.py").read_text(encoding="utf-8")) == []


def test_evidence_of_several_machines_stands_below_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "ROOT", tmp_path)
    monkeypatch.setattr(builder, "EVIDENCE", "*/evidence.md")
    for name, figure in (("one", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "evidence.md").write_text(f"# A\n\n## Tasks\n\n![x](x.png) {figure}\n\n## Results\n\n3\n")
        (tmp_path / name / "x.png").touch()
    files = Files([File(f"{name}/x.png", tmp_path, tmp_path, use_directory_urls=False) for name in ("one", "other")])
    found = builder._evidence("Tasks", "page.md", files)
    assert found == "**one**\n\n![x](one/x.png) 1\n\n**other**\n\n![x](other/x.png) 2"
    with pytest.raises(PluginError, match="must have the heading"):
        builder._evidence("Runs", "page.md", files)


def test_navigation_is_short():
    """Six sections of at most twelve entries; commands for a step of one's own lie side by side, without formats."""
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].splitlines()
    sections: list[list[str]] = []
    for line in lines:
        if not line:
            break
        if line.startswith("  - "):
            sections.append([])
        elif line.startswith("      - "):
            sections[-1].append(line)
    assert len(sections) == 6
    assert max(len(section) for section in sections) <= 12
    assert [line.split('"')[1].partition(":")[0] for line in sections[1]] == ["inspect", "fit", "verify", "plan"]
    assert not any("csrc" in line for section in sections for line in section)


def test_every_format_has_its_page(site):
    index = (site / "formats.html").read_text(encoding="utf-8")
    for source in (ROOT / "csrc").glob("*.md"):
        assert f'href="csrc/{source.stem}.html"' in index, source.name
