"""The measurements of the transfer engine: what can be tested of them without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from actstore import Disk
from actstore.codecs import Raw
from actstore.devices import Cpu
from actstore.tiers.disk import DiskTier
from actstore.trace import Event, Trace
from actstore.transfer.buffers import Buffers
from benchmarks.gpu import (
    chain as gpu_chain,
)
from benchmarks.gpu import (
    page as gpu_page,
)
from benchmarks.gpu import (
    page_transfer as gpu_page_transfer,
)
from benchmarks.gpu import (
    run as gpu,
)
from benchmarks.gpu import (
    transfer as gpu_transfer,
)
from benchmarks.gpu.chain import Chain
from benchmarks.gpu.place import COMMIT, Place
from benchmarks.gpu.shuttle import Shuttle, shuttle_row

pytestmark = pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning")
KIB, MIB = 2**10, 2**20
CPU = Cpu(torch.device("cpu"))
HERE = Place("cpu", small=True)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, CPU)
    yield tier
    assert tier.used_nbytes == 0
    tier.close()


@pytest.mark.parametrize(("nbytes", "window_nbytes"), [(100 * KIB, None), (2 * MIB, 3 * MIB)])
def test_a_row_of_the_link(tier: DiskTier, nbytes: int, window_nbytes: int | None) -> None:
    row = shuttle_row(CPU, tier, nbytes, 6, window_nbytes, samples=2)
    assert row["correct"]
    assert row["out"]["nbytes"] == 6 * nbytes
    assert 6 * nbytes <= row["both"]["nbytes"] <= 12 * nbytes  # the newest payloads may not have left the device
    for name in ("out", "back", "both"):
        assert min(row[name].values()) > 0


def test_bytes_that_come_back_wrong_are_found(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shuttle, "_get", lambda shuttle, berth: shuttle._engine.drop(berth))
    monkeypatch.setattr(gpu_chain, "rate", lambda *_: {"gbps": 1.0})
    assert not shuttle_row(CPU, tier, MIB, 2, samples=1)["correct"]


def event(kind: Any, begin: int, end: int, nbytes: int) -> Event:
    return Event(kind, begin, end, "", 1, "host", nbytes)


def test_a_rate_is_of_all_copies_from_the_first_to_the_last() -> None:
    events = [event("offload", 100, 200, 50), event("fetch", 150, 400, 700), event("stall", 0, 1000, 9)]
    assert gpu_chain.rate(events, "offload", "fetch") == {"nbytes": 750, "ms": 300 / 1e6, "gbps": 2.5}
    assert gpu_chain.rate(events, "fetch") == {"nbytes": 700, "ms": 250 / 1e6, "gbps": 2.8}
    assert gpu_chain.rate(events[2:], "offload", "fetch") is None


def played(layers: int, ahead: int, fetched: int, compute: float, out: float, back: float) -> float:
    """The stall of a step that is played, copy by copy."""
    now, stall, copied = 0.0, 0.0, [0.0]
    for layer in range(layers):
        now += compute
        free = copied[layer + 1 - ahead] if layer >= ahead else 0.0
        stall, now = stall + max(0.0, free - now), max(now, free)
        copied.append(max(copied[-1], now) + out)
    now, arrived = 0.0, 0.0
    for layer in range(layers):
        if layer >= layers - fetched:
            arrived += back
            stall, now = stall + max(0.0, arrived - now), max(now, arrived)
        now += compute
    return stall


@pytest.mark.parametrize(("layers", "ahead", "kept"), list(product((1, 5, 32), (1, 4), (0, 2))))
@pytest.mark.parametrize("compute", [0.4, 1.0, 1.7])
def test_the_theoretical_stall_is_that_of_a_step_that_is_played(
    layers: int, ahead: int, kept: int, compute: float
) -> None:
    fetched = max(0, layers - kept)
    found = gpu_chain.theoretical_stall_ms(layers, ahead, fetched, compute, 1.0, 0.9)
    assert found == pytest.approx(played(layers, ahead, fetched, compute, 1.0, 0.9))


def test_the_measured_stall_is_compared_with_theory() -> None:
    figures = {"plain_ms": 20.0, "layers": 10, "stall_ms": 12.0}  # 1 ms a layer and way
    found = gpu_transfer.with_theory(figures, 2, 8, 2.0, 2.0)
    assert found == {"fetched": 8, "theory_ms": 14.0, "stall_over_theory": 12 / 14}
    assert gpu_transfer.with_theory(figures, 2, 8, 1.0, 1.0)["stall_over_theory"] is None


@pytest.fixture
def chain() -> Chain:
    return Chain("cpu", layers=4, tokens=256, width=256)


def test_a_chain_is_measured_with_a_store_and_without(chain: Chain, tmp_path: Path) -> None:
    found = gpu_chain.measure(chain, "raw @ disk", repeats=2, tiers=[Disk(tmp_path)])
    assert found["equal"]
    assert (found["layers"], found["nbytes"]) == (4, 256 * KIB)
    assert len(found["samples"]) == 2
    assert found["hits"] + found["late"] + found["misses"] == 4
    assert min(found["plain_ms"], found["store_ms"]) > 0  # a payload that comes back at once was never copied


def test_wrong_gradients_of_a_chain_are_found(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = Raw.bind
    monkeypatch.setattr(
        Raw, "bind", lambda codec, src: bind(codec, src)._replace(decode=lambda buf, out, key: out.fill_(2))
    )
    assert not gpu_chain.measure(chain, "raw @ disk", repeats=1, tiers=[Disk(tmp_path)])["equal"]


def test_a_chain_computes_for_as_long_as_it_is_told(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_chain, "elapsed_ms", lambda device, run: 10.0)  # of 20 products
    chain.balance(1.5, 3.0)
    assert chain.products == 9
    chain.balance(1.5, 0.001)
    assert chain.products == 1


def test_what_steps_allocate_is_counted(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_chain.steady(chain, "keep", steps=3)
    assert found == {"steps": 3, "allocated": {"engine buffers": 0, "pinned segments": 0}, "pinned_segments": []}
    monkeypatch.setattr(Buffers, "give", lambda *_: None)  # so that none is used again
    found = gpu_chain.steady(chain, "raw @ disk", steps=3, tiers=[Disk(tmp_path)])
    assert found["allocated"]["engine buffers"] >= 3


def test_the_trace_is_of_one_step_and_written_in_three_forms(chain: Chain, tmp_path: Path) -> None:
    trace = gpu_chain.traced(chain, "raw @ disk", tiers=[Disk(tmp_path)])
    assert len(trace.steps()) == 1
    assert {"forward", "backward"} & {one.kind for one in trace.events()}
    file, plot = tmp_path / "transfer.ndjson", tmp_path / "transfer.png"
    assert gpu_transfer.picture(trace, file, plot) is None
    assert len(Trace.read(file)) == len(trace)
    assert json.loads((tmp_path / "transfer.chrome.json").read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_picture_but_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "actstore.trace.picture", raising=False)
    monkeypatch.delattr("actstore.trace.picture", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = gpu_transfer.picture(Trace(), tmp_path / "transfer.ndjson", tmp_path / "transfer.png")
    assert said is not None
    assert said.startswith("no picture: ")
    assert (tmp_path / "transfer.ndjson").exists()


def test_what_fails_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    seen = []

    def first(place: Place, found: dict[str, Any], save: Any) -> int:
        found["half"] = 1
        save()
        seen.append(json.loads(file.read_text())["half"])
        raise OSError("no memory\nsecond line")

    found = gpu_transfer.run_all({"first": first, "second": lambda place, found, save: found["half"] + 1}, file, HERE)
    assert seen == [1]
    assert found["second"] == 2
    assert found["failed"] == {"first": "OSError: no memory"}
    assert found["commits"] == {"second": ""}
    assert json.loads(file.read_text()) == found


def test_measurements_of_this_commit_are_not_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(commit: str, value: int, *, fails: bool = False) -> dict[str, Any]:
        def late(place: Place, found: dict[str, Any], save: Any) -> int:
            assert not fails, "stopped"
            return value

        monkeypatch.setenv(COMMIT, commit)
        first: Any = lambda place, found, save: value  # noqa: E731
        return gpu_transfer.run_all({"first": first, "late": late}, tmp_path / "found.json", HERE)

    assert "late" not in run("one", 1, fails=True)
    found = run("one", 2)
    assert (found["first"], found["late"], found["failed"]) == (1, 2, {})
    found = run("two", 3)
    assert (found["first"], found["late"], found["commits"]) == (3, 3, {"first": "two", "late": "two"})
    assert run("", 4)["first"] == 4  # an unknown commit has measured nothing


def test_without_a_gpu_the_measurement_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", gpu_transfer.__name__, "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=gpu.ROOT, env={"PYTHONPATH": "."}, check=False)
    assert (done.returncode, done.stderr) == (2, "no CUDA device: nothing to measure\n")
    assert not list(tmp_path.iterdir())


NOTHING = {"goals": gpu_transfer.GOALS, "failed": {}, "policy": "raw @ host"}
FLOW = {"nbytes": 2**30, "ms": 20.0, "gbps": 53.7, "host_us": 41.2, "of_ceiling": 0.97}
STEP = {
    "layers": 32, "nbytes": 64 * MIB, "products": 9, "equal": True, "plain_ms": 100.0, "store_ms": 101.0, "ratio": 1.01,
    "offload_ms": 40.0, "fetch_ms": 38.0, "stall_ms": 1.5, "stall_share": 0.015,
}  # fmt: skip
FIGURES: dict[str, Any] = {
    "goals": gpu_transfer.GOALS,
    "failed": {"price": "OutOfMemoryError: a | b"},
    "policy": "raw @ host",
    "link": [
        {"nbytes": MIB, "count": 1024, "window_nbytes": None, "correct": True, "out": FLOW, "back": FLOW,
         "both": FLOW | {"of_ceiling": 0.5}},
        {"nbytes": 256 * MIB, "count": 16, "window_nbytes": 1024 * MIB, "correct": False, "out": FLOW, "back": FLOW,
         "both": FLOW},
    ],
    "hidden": STEP,
    "exposed": STEP | {"stall_ms": 30.0, "theory_ms": 25.0, "stall_over_theory": 1.2},
    "steady": {"steps": 20, "allocated": {"engine buffers": 0, "num_device_alloc": 3}, "pinned_segments": [MIB] * 40},
    "pinning": [
        {"nbytes": 1024 * MIB, "register_ms": 250.0, "unregister_ms": 90.0, "refused": False, "torch_ms": 400.0},
        {"nbytes": 4096 * MIB, "register_ms": 1.0, "refused": True, "torch_ms": 1600.0},
    ],
    "trace": "no picture: no matplotlib",
}  # fmt: skip


def test_the_page_shows_figures_beside_goals() -> None:
    page = "\n".join(gpu_page_transfer.lines(FIGURES))
    for words in (
        "| 1024 of 1 | 53.7 | 97 % | 53.7 | 97 % | 53.7 | **50 %** | 41 |",
        "| **WRONG** |",
        "| stall, part of the step | 1.50 % | under 2 % |",
        "| stall, ms | 30.00 | 25.00 by theory |",
        "| stall over theory | **1.20** | at most 1.05 |",
        "40 pinned segments, 40 MiB",
        "| engine buffers | 0 | 0 |",
        "| num_device_alloc | **3** | 0 |",
        "| 1024 | 250.0 | 90.0 | 400.0 |",
        "| 4096 | refused | - | 1600.0 |",
        "- price **failed**: OutOfMemoryError: a \\| b",
        "- no picture",
    ):
        assert words in page
    assert "by way of a buffer" not in page


def test_the_price_of_a_buffer_is_shown() -> None:
    times = {"ms": 2.0, "low_ms": 1.9, "high_ms": 2.1, "gbps": 50.0}
    row = {"nbytes": 64 * MIB, "direct": times, "encode": times | {"ms": 0.05}, "encode_and_copy": times | {"ms": 2.1}}
    page = gpu_page_transfer.lines(NOTHING | {"price": [row]})
    assert page[-1] == "| 64 | 2.000 | 0.050 | 2.100 | 1.050 |"


def test_half_a_measurement_makes_a_page() -> None:
    env = {"gpu": "Some GPU", "time": "now", "actstore": "1", "torch": "2", "python": "3"}
    for part in [{}, *({name: FIGURES[name]} for name in FIGURES if name not in NOTHING)]:
        figures = {**NOTHING, **part}
        found = {"environment": env, "status": "stopped", "seconds": 1, "said": "", "figures": figures}
        assert "## The transfer engine" in gpu_page.page(
            {"gpu": "Some GPU", "dry_run": False, "parts": {"transfer": found}}, {}
        )
