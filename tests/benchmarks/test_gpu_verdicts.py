"""The verdicts of the GPU suite, and the pages of the Llama blocks."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import page_llama as gpu_page_llama
from benchmarks.gpu.verdicts import SANITIZER_TEST, verdicts

GIB = 2**30
ROW = {
    "kind": "ours", "exact": True, "equal": True, "step_ms": 200.0, "ratio": 1.2, "peak_bytes": 12 * GIB,
    "grad_error": 0.0, "stall_ms": 1.5, "host_bytes": 8 * 10**9, "offload_ms": 200.0, "held_bytes": 4 * GIB,
}  # fmt: skip
PLAN = ROW | {
    "name": "auto 25 %", "budget": 3 * GIB, "peak_held_bytes": 2 * GIB, "predicted_ms": 210.0, "bound_ms": None,
    "ratio": 1.12, "settled_after": 30, "policy": "* : keep", "samples": [{"peak_held_bytes": 3 * GIB}],
}  # fmt: skip
PEER = ROW | {"name": "torch checkpoint", "kind": "peer", "ratio": 1.3}
QUARTER = ROW | {"name": "sdpa kept", "ratio": 1.12, "held_bytes": 2 * GIB}
DERIVED = ROW | {"name": "derive(int8)", "exact": False, "equal": False, "ratio": 1.05, "held_bytes": 3 * GIB}
LLAMA: dict[str, Any] = {
    "sizes": {"layers": 8, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "tokens": 8192},
    "parameter_bytes": GIB,
    "link": {"device_to_host": 50.0},
    "plain": ROW | {"name": "plain", "kind": "plain", "ratio": 1.0, "held_bytes": 10 * GIB},
    "rows": [
        ROW | {"name": "raw @ host"},
        PLAN,
        PEER,
        QUARTER,
        DERIVED,
        {"name": "TRL offload", "left_out": "trl is not installed"},
    ],
}
TESTS: dict[str, Any] = {"passed": [f"a::{SANITIZER_TEST}[raw]", "b"], "failed": {}, "skipped": {}, "finished": True}
TRANSFER: dict[str, Any] = {
    "goals": {"of_ceiling": 0.9, "stall_share": 0.02, "stall_over_theory": 1.05, "allocated": 0},
    "link": [{"nbytes": 2**20, "correct": True, "both": {"of_ceiling": 0.3}},
             {"nbytes": 2**26, "correct": True, "both": {"of_ceiling": 0.95}}],
    "hidden": {"equal": True, "stall_share": 0.01},
    "exposed": {"equal": True, "stall_over_theory": 1.02},
    "steady": {"allocated": {"engine buffers": 0}},
}  # fmt: skip
SMALL_ROWS = "recompute", "torch checkpoint", "derive"
EXACT = {"rows": [{"kind": kind, "bit_equal": True, "loss_hex": "0x1"} for kind in ("plain", "ours", "ours")]}
SMALL = {"rows": [{"name": "plain", "ratio": None}, *({"name": name, "ratio": 1.1} for name in SMALL_ROWS)]}
GRAPH = {
    "step_ms": 50.0, "held_bytes": GIB, "backward_peak_bytes": 2 * GIB, "peak_bytes": 2 * GIB, "ratio": 1.02,
    "equal": True, "grad_error": 0.0,
}  # fmt: skip
RIVAL, DUEL = GRAPH | {"name": "PyTorch's budget 0.5"}, GRAPH | {"name": "plan at its peak, 0.5"}
DUEL_QUARTER = [RIVAL | {"name": "PyTorch's budget 0.25"}, DUEL | {"name": "plan at its peak, 0.25"}]
GRAPHS = {
    "sizes": {"layers": 2, "tokens": 8192}, "plain": GRAPH | {"name": "plain", "held_bytes": 2 * GIB},
    "rows": [GRAPH | {"name": "keep"}, GRAPH | {"name": "int8", "equal": False}, RIVAL, DUEL,
             {"name": "recompute", "failed": "no"}],
}  # fmt: skip
FIGURES = {
    "codecs": TESTS, "tests": TESTS, "compiled": TESTS, "exact": EXACT, "transfer": TRANSFER, "llama": LLAMA,
    "graphs": GRAPHS, "llama32": LLAMA, "small": SMALL,
    "duel": {"rows": [RIVAL, DUEL, *DUEL_QUARTER]},
    "kernels": {"rows": [{"correct": True}, {"left_out": "no"}]},
    "random": {"examples": 10, "counts": {"equal": 8, "refused": 2, "no model": 5}},
    "lossy": {"examples": 10, "counts": {"equal": 10}},
    "sanitizer": {"said": {"memcheck": "0 errors"}, "clean": True, "tools": ["memcheck"]},
}  # fmt: skip


def judged(name: str, figures: dict[str, Any] | None = None, status: str = "ok") -> dict[str, bool | None]:
    parts = {name: {"status": status, "said": "a line", "figures": FIGURES[name] if figures is None else figures}}
    return {verdict.promise: verdict.good for verdict in verdicts(parts)}


def test_everything_that_is_good_passes() -> None:
    parts = {name: {"status": "ok", "said": "", "figures": figures} for name, figures in FIGURES.items()}
    assert [verdict for verdict in verdicts(parts) if verdict.good is not True] == []


@pytest.mark.parametrize(
    ("part", "change", "promise"),
    [
        ("codecs", {"failed": {"x": "no"}}, "every codec writes"),
        ("codecs", {"finished": False}, "every codec writes"),
        ("tests", {"failed": {f"c::{SANITIZER_TEST}[int8]": "race"}}, "torch.cuda._sanitizer"),
        ("compiled", {"failed": {"x": "no"}}, "tests of compiled"),
        ("exact", {"rows": [*EXACT["rows"], {"kind": "ours", "bit_equal": True, "loss_hex": "0x2"}]}, "lossless rows"),
        ("small", {"rows": [{"name": "recompute", "ratio": 1.3}, SMALL["rows"][2]]}, "small GPT: recompute"),
        ("small", {"rows": [{"name": "derive", "ratio": 1.11}]}, "small GPT: derive"),
        ("graphs", {"rows": [GRAPH | {"name": "keep", "equal": False}]}, "compiled: keep"),
        ("graphs", {"rows": [GRAPH | {"name": "int8", "ratio": 1.04}]}, "compiled: int8"),
        ("graphs", {"rows": [RIVAL, DUEL | {"ratio": 1.03}]}, "compiled: a plan"),
        ("graphs", {"rows": [RIVAL, DUEL | {"peak_bytes": 2 * GIB + 1}]}, "compiled: a plan"),
        (
            "duel",
            {"rows": [RIVAL, DUEL | {"ratio": 1.03}]},
            "compiled, 8 blocks, CUDA graphs: a plan at the peak of PyTorch's budget 0.5",
        ),
        ("sanitizer", {"tools": ["memcheck", "racecheck"]}, "compute-sanitizer"),
        ("random", {"counts": {"equal": 9, "no model": 5}}, "random models under exact"),
        ("lossy", {"counts": {}}, "random models under lossy"),
        ("kernels", {"rows": [{"correct": False}]}, "every kernel's"),
        ("transfer", {"link": [TRANSFER["link"][1] | {"both": {"of_ceiling": 0.89}}]}, "both directions"),
        ("transfer", {"hidden": {"equal": True, "stall_share": 0.02}}, "under 2 %"),
        ("transfer", {"hidden": {"equal": False, "stall_share": 0.0}}, "every byte"),
        ("transfer", {"exposed": {"equal": True, "stall_over_theory": 1.06}}, "at most 1.05"),
        ("transfer", {"steady": {"allocated": {"engine buffers": 1}}}, "a steady state"),
        ("llama", {"rows": [ROW | {"name": "keep", "equal": False}]}, "Llama blocks: exact"),
        ("llama", {"rows": [QUARTER | {"ratio": 1.13}]}, "Llama blocks: an exact row"),
        ("llama", {"rows": [QUARTER | {"held_bytes": 3 * GIB}]}, "Llama blocks: an exact row"),
        ("llama", {"rows": [DERIVED | {"ratio": 1.06}]}, "Llama blocks: derive(int8)"),
        ("llama32", {"rows": [ROW | {"name": "keep", "equal": False}]}, "32 layers with adapters: exact"),
        ("llama32", {"rows": [PEER, ROW | {"name": "raw @ host", "ratio": 1.31}]}, "32 layers with adapters: faster"),
        ("llama", {"rows": [PLAN | {"samples": [{"peak_held_bytes": 3 * GIB + 1}]}]}, "plans hold"),
        ("llama", {"rows": [PLAN | {"predicted_ms": 179.0}]}, "plans take what"),
        ("llama", {"rows": [PLAN | {"ratio": 1.14}, QUARTER | {"name": "attention kept"}]}, "plans take at most"),
        ("llama", {"rows": [PEER, ROW | {"name": "raw @ host", "ratio": 1.31}]}, "faster than torch checkpoint"),
        ("llama", {"rows": [PEER, ROW | {"name": "keep", "peak_bytes": 13 * GIB}]}, "faster than torch checkpoint"),
        ("llama", {"rows": [PEER, ROW | {"name": "int8", "exact": False}]}, "faster than torch checkpoint"),
    ],
)
def test_each_promise_can_fail(part: str, change: dict[str, Any], promise: str) -> None:
    found = judged(part, FIGURES[part] | change)
    assert [good for text, good in found.items() if text.startswith(promise)] == [False]


@pytest.mark.parametrize("part", FIGURES)
def test_half_a_part_is_not_measured(part: str) -> None:
    """Nothing passes that was not measured, and the reason is said."""
    assert True not in judged(part, {}, "stopped").values()
    parts = {part: {"status": "stopped", "said": "so far", "figures": None}}
    assert {verdict.found for verdict in verdicts(parts)} == {"stopped: so far", "not run"}


def test_a_peer_that_is_not_exact_is_compared_with_rows_of_no_larger_error() -> None:
    peer = PEER | {"name": "Liger", "exact": False, "grad_error": 0.01}
    tiles = ROW | {"name": "tiles", "exact": False}
    promise = "faster than Liger with no more memory, gradients no farther from plain's"
    for error, faster in ((0.01, True), (0.011, False)):
        rows = [peer, tiles | {"grad_error": error}]
        for part, words in (("llama", promise), ("llama32", f"32 layers with adapters: {promise}")):
            assert judged(part, LLAMA | {"rows": rows})[words] is faster


def test_the_page_of_the_blocks() -> None:
    page = "\n".join(gpu_page_llama.lines(LLAMA))
    for words in (
        "weights and gradients take 2.0 GiB of each peak",
        "| raw @ host | 200.0 | 1.20 | 40,960 | 12.0 GiB | - | 4.0 GiB | 1.5 | - | 7.5 GiB | 80% | 0 (exact) |",
        "| auto 25 % | 3.0 GiB | 66.7% | 200.0 | 210.0 | - | 30 |",
        "- TRL offload is left out: trl is not installed",
    ):
        assert words in page
    assert "first step" not in page
    pinned = ROW | {"name": "raw @ host", "first_ms": 2500.0, "pinned_bytes": 11 * GIB}
    page = "\n".join(gpu_page_llama.lines(LLAMA | {"rows": [pinned]}))
    assert "The first step pins host memory: raw @ host 2.5 s for 11.0 GiB." in page
    named = PLAN | {"rival": "Faster than 'derive'."}
    assert "\nauto 25 %: Faster than 'derive'.\n\n```\n* : keep\n```" in "\n".join(
        gpu_page_llama.lines(LLAMA | {"rows": [named]})
    )
    assert "2 gradients differ between two plain steps" in "\n".join(gpu_page_llama.lines(LLAMA | {"unrepeated": 2}))
    lossy = ROW | {"name": "recompute", "equal": False, "grad_error": 0.004}
    assert "**0.40%**" in "\n".join(gpu_page_llama.lines(LLAMA | {"rows": [lossy]}))


def test_the_page_of_the_graphs() -> None:
    page = "\n".join(gpu_page_llama.graphs(GRAPHS))
    assert "| keep | 50.0 | 1.02 | 1.0 GiB (0.50) | 2.0 GiB (1.00) | 2.0 GiB (1.00) | 0 (exact) |" in page
    assert "- recompute **failed**: no" in page


def test_the_page_of_the_contexts() -> None:
    attempts = [{"tokens": 4096, "peak_bytes": GIB}, {"tokens": 8192, "peak_bytes": None}]
    row = {"name": "plain", "tokens": 4096, "step_ms": 100.0, "peak_bytes": GIB, "attempts": attempts}
    row["pinned_bytes"] = GIB // 2
    none = {"name": "keep", "tokens": 0, "step_ms": None, "attempts": []}
    others = [none, {"name": "int8", "failed": "no"}, {"name": "Liger", "left_out": "not here"}]
    figures = {"sizes": {"layers": 8}, "limit_bytes": GIB, "rows": [row, *others]}
    page = "\n".join(gpu_page_llama.context(figures))
    assert "| plain | 4,096 | 1.00 | 100 | 40,960 | 1.0 GiB | 512.0 MiB | 4,096, 8,192 (too long) |" in page
    assert "- int8 **failed**: no" in page
    assert "- keep: not even the first attempt fits" in page
    assert "- Liger is left out: not here" in page
    assert "vocabulary" not in page
    sizes = {"layers": 32, "lora": True, "vocabulary": 128256}
    page = "\n".join(gpu_page_llama.context(figures | {"sizes": sizes, "most_tokens": 65536}))
    assert "frozen, but for adapters. The vocabulary has 128,256 tokens. No row was tried beyond 65,536 tokens." in page
