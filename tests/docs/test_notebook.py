"""What objects show of themselves in a notebook: HTML that is whole and escaped, and pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Auto, Plan, check_gradients
from actstore.display import html
from actstore.errors import StateError
from actstore.results import GradientCheck
from docs import notebook as tutorial
from tests.plan.profiles import MIB, profile

ROOT = Path(__file__).parents[2]
VOID = ("br", "img", "meta")


class Cells(HTMLParser):
    """The texts of the cells of each row, and whether every tag is closed in its order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert self.open == []
        assert self.fetched == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def trained(policy: str = "0 : int8; 1 : recompute; 2 : keep", **options) -> ActivationStore:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))
    store = ActivationStore(model, policy, min_bytes=0, **options)
    with store:
        loss = model(torch.randn(64, 32)).sum()
    loss.backward()
    return store


def planned() -> Plan:
    pytest.importorskip("scipy")
    from actstore.session.planning import replan

    return replan(profile(4), Auto(300 * MIB))


def test_text_is_escaped():
    shown = html.section(
        "<b>", html.table(["a<b"], [["<script>alert('1')</script>"]]), html.line("x & y"), html.items(["<"])
    )
    assert "<script>" not in shown
    assert Cells(shown).rows == [["a<b"], ["<script>alert('1')</script>"]]
    assert "x &amp; y" in shown
    assert "<li>&lt;</li>" in shown


def test_a_bar_is_as_long_as_its_part():
    shown = html.table(["", "n"], [["a", "1"], ["b", "2"], ["c", "0"]], bar=1, bars=[0.5, 7.0, 0.0])
    assert [part for part in ("50.0%", "100.0%", "0.0% 100%") if f"size:{part}" in shown] == ["50.0%", "100.0%"]
    assert shown.count('class="number bar"') == 2


def test_a_report_shows_the_rows_of_its_text(one_thread):
    report = trained().report()
    rows = Cells(report._repr_html_()).rows
    assert rows[0] == ["layers", "tensors", "saved", "stored", "held", "live", "error", "decision"]
    lines = str(report).splitlines()[: len(rows)]
    assert [" ".join(cells).split() for cells in rows] == [line.split() for line in lines]
    assert rows[-1][0] == "total"


def test_modules_of_a_report_add_up(one_thread):
    report = trained().report()
    assert sum(module.saved for module in report.modules) == report.saved_bytes
    assert sum(module.held for module in report.modules) == report.held_bytes


def test_a_report_says_its_advice(one_thread):
    report = trained("keep").report()
    assert report.advice
    assert f"<li>{report.advice[0]}</li>" in report._repr_html_()


def test_a_report_of_nothing():
    report = ActivationStore(policy="int8").report()
    assert Cells(report._repr_html_()).rows[-1][0] == "total"
    with pytest.raises(StateError, match="nothing to draw"):
        report.plot()


def test_a_check_shows_its_table(one_thread):
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(16, 32)
    result = check_gradients(lambda: model(x).square().mean(), ActivationStore(model, "int8", min_bytes=0))
    assert isinstance(result, GradientCheck)
    shown = result._repr_html_()
    assert any(row[0] == "gradient of 0.weight" for row in Cells(shown).rows)
    assert result.verdict == "different"
    assert "<b>Different: plain and with the store" in shown


def test_a_plan_shows_what_it_explains():
    plan = planned()
    shown = Cells(plan._repr_html_()).rows
    assert shown[0][0] == "unit"
    text = plan.explain()
    assert all(cell in text for row in shown for cell in row)
    assert any("this plan" in row for row in shown)


def test_a_store_draws_what_it_holds(one_thread):
    pytest.importorskip("matplotlib")
    store = trained()
    axes = store.plot().axes[0]
    layers = store.report().layers
    assert [label.get_text() for label in axes.get_yticklabels()] == [layer.label for layer in layers]
    held = [bar.get_width() for bar in axes.patches[: len(layers)]]
    assert held == pytest.approx([layer.held / 2**10 for layer in layers])
    assert {text.get_text() for text in axes.get_legend().get_texts()} >= {"int8", "recompute", "keep"}


def test_a_picture_shows_itself_in_a_notebook(one_thread):
    pytest.importorskip("matplotlib")
    assert trained().plot()._repr_png_().startswith(b"\x89PNG")


def test_a_plan_draws_itself(monkeypatch):
    pytest.importorskip("matplotlib")
    plan = planned()
    from actstore.plan import plot

    monkeypatch.setattr(plot, "FRONT_POINTS", 3)
    above, below = plan.plot().axes
    assert above.get_title(loc="left") == "What memory buys"
    assert below.get_yticklabels()[0].get_text() == plan.rows[0].unit


def test_without_matplotlib_the_error_says_what_to_install():
    code = """
import sys
sys.modules["matplotlib"] = None
import torch, actstore
from actstore.session.planning import replan
from docs import notebook as tutorial
from tests.plan.profiles import MIB, profile
model = torch.nn.Linear(8, 8)
store = actstore.ActivationStore(model, "int8", min_bytes=0)
with store:
    loss = model(torch.ones(4, 8)).sum()
for draws in (store, replan(profile(4), actstore.Auto(600 * MIB))):
    try:
        draws.plot()
    except actstore.errors.ConfigError as error:
        print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("pip install 'actstore[bench]'") == 2, done.stderr


def test_the_notebook_is_that_of_the_tutorial():
    assert tutorial.NOTEBOOK.read_text(encoding="utf-8") == tutorial.notebook(tutorial.PAGE.read_text(encoding="utf-8"))
    cells = json.loads(tutorial.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert not any("```" in text for text in code)
    for text in code:
        compile(text, "cell", "exec")
