"""The page of an inspection: one file, and what a browser makes of it."""

import re
import shutil
import subprocess

import pytest

from actstore.base.units import format_nbytes
from actstore.devices import cpu_memory
from actstore.inspection import InspectedTensor, MemoryPoint, Timeline
from actstore.inspection.beside import BesideActivations
from actstore.inspection.result import page
from tests.inspection.test_inspect import inspected

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NOTHING = BesideActivations(0, 0, 0)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
ACTIONS = """<script>
const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
const middle = {clientX: box.left + box.width * charts[0].line.backward_ms / end, clientY: box.top + 20, bubbles: true};
canvas.dispatchEvent(new MouseEvent("mousemove", middle));
document.body.dataset.tip = document.getElementById("tip").textContent;
canvas.dispatchEvent(new MouseEvent("mousedown", middle));
canvas.dispatchEvent(new MouseEvent("mouseup", {...middle, clientX: box.left + box.width}));
document.body.dataset.zoomed = view.map(ms => ms.toFixed(2)).join(" ");
canvas.dispatchEvent(new MouseEvent("dblclick", middle));
document.body.dataset.whole = view[0];
const filter = document.getElementById("filter");
filter.value = "gelu"; filter.dispatchEvent(new Event("input"));
document.body.dataset.gelu = document.getElementById("count").textContent;
document.querySelector("#bands span").click();
document.body.dataset.band = filter.value + "; " + document.getElementById("count").textContent;
document.querySelectorAll("#modes button")[2].click();
document.body.dataset.shown = [...document.querySelectorAll("#charts > div")].map(part => !part.hidden).join(" ");
document.body.dataset.drawn = canvas.width > 0;
const legend_texts = [...document.querySelectorAll("#bands span")].map(span => span.textContent);
document.body.dataset.legend = legend_texts.slice(data.bands.length).join(", ");
const chart = charts[1], pixels = chart.canvas.getContext("2d"), lowest = chart.canvas.height - 2;
document.body.dataset.lowest = pixels.getImageData(4, lowest, 1, 1).data.slice(0, 3).join(" ");
</script>"""


def test_the_page_is_one_file_and_its_text_is_escaped():
    text = inspected("int8").to_html()
    assert not re.search(r"(src|href)=|https?://|__[A-Z]+__", text)
    evil = InspectedTensor("</script><b>", "op", "", (1,), "float32", "dense", 4, "", 0, "", 0.0, None)
    line = Timeline("p", (MemoryPoint(0.0, False, {"</script><b>": 4}, None),))
    made = page([evil], (line, line), [], ["</script><b>"], NOTHING)
    assert "</script><b>" not in made
    assert made.count("</script>") == 2


def test_a_page_of_10_000_tensors_is_small():
    found = inspected("int8", layers=2)
    many = tuple(found.tensors[i % len(found.tensors)] for i in range(10_000))
    assert len(page(many, (found.plain, found.store), [], [], NOTHING)) < 5_000_000


@pytest.mark.skipif(BROWSER is None or not cpu_memory.count(), reason="needs Chromium, and the bytes of CPU tensors")
def test_a_browser_hovers_zooms_and_filters(tmp_path):
    found = inspected("int8", layers=4)
    file = tmp_path / "page.html"
    file.write_text(found.to_html().replace("</html>", ACTIONS + "</html>"))
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    marks = dict(re.findall(r'data-(\w+)="([^"]*)"', dom))
    assert re.match(r"[\d.]+ ms, (forward|backward)\nactivations .*B", marks["tip"])
    assert "layers.0" in marks["tip"]
    weights = format_nbytes(found.beside.weights_bytes)
    assert f"\nbeside: weights {weights}, optimizer 0 B, gradients " in marks["tip"]
    assert marks["legend"] == "weights, optimizer, gradients, line: all tensors"
    assert marks["lowest"] == "111 111 111"  # the grey of weights
    begin, end = map(float, marks["zoomed"].split())
    whole = max(found.plain.points[-1].ms, found.store.points[-1].ms)
    assert begin == pytest.approx(found.plain.backward_ms, abs=0.02 * whole)
    assert end == pytest.approx(whole, abs=0.02 * whole)
    assert marks["whole"] == "0"
    gelus = [tensor for tensor in found.tensors if "gelu" in tensor.operator or "gelu" in tensor.code]
    assert marks["gelu"].startswith(f"{len(gelus)} tensors, ")
    assert marks["band"].startswith("band:layers.0")
    assert marks["shown"] == "false true"
    assert marks["drawn"] == "true"
