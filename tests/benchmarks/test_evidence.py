"""The evidence that models learn under lossy stores: cells repeat bit for bit, runs go on, and verdicts are right."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("scipy")

from scipy import stats

from benchmarks import machine
from benchmarks.evidence import page as evidence_page
from benchmarks.evidence import plot as evidence_plot
from benchmarks.evidence import tasks as evidence_tasks
from benchmarks.evidence.page import Interval, judge
from benchmarks.evidence.run import Cell, _names, run
from benchmarks.evidence.tasks import PLAIN, ROWS, TASKS, train
from tests.bench.legible import faults

SIZES = {"layers": 1, "context": 16, "batch": 4, "steps": 2}
TINY = {name: replace(task, work=replace(task.work, **SIZES)) for name, task in TASKS.items()}
SOME = {"vit": TINY["vit"]}
TWO = {PLAIN: ROWS[PLAIN], "lossy": {"policy": "int2(group=32, round=dither)"}}
RANDOM = {"policy": "int4(round=stochastic)"}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(evidence_tasks, "BASE_STEPS", 2)


def bits(cell: dict[str, Any]) -> list[str]:
    return [value.hex() for value in (*cell["losses"], cell["held_out"])]


# -- cells ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TASKS))
def test_a_cell_run_twice_has_the_same_bits(name: str) -> None:
    first, second, other = (train(TINY[name], RANDOM, seed) for seed in (3, 3, 4))
    assert bits(first) == bits(second)
    assert bits(first) != bits(other)
    plain = train(TINY[name], ROWS[PLAIN], 3)
    assert plain["losses"][0] == first["losses"][0]
    assert plain["losses"][1] != first["losses"][1]
    assert plain["held"] == 1
    assert first["held"] < 0.5, "most of what waits is to be compressed"


def test_the_seed_is_that_of_the_store_too() -> None:
    usual, same, other = (train(TINY["vit"], RANDOM | given, 3) for given in ({}, {"seed": 3}, {"seed": 4}))
    assert bits(usual) == bits(same)
    assert bits(usual) != bits(other)
    assert usual["losses"][0] == other["losses"][0]


@pytest.mark.parametrize("name", list(TASKS))
def test_signs_matter_to_tasks_that_say_so(name: str) -> None:
    """Cells of the others need not be run again since stores keep signs behind ReLU."""
    kept, rounded = (train(TINY[name], {"policy": f"int4({rule}round=dither)"}, 3) for rule in ("", "signs=round, "))
    assert (bits(kept) != bits(rounded)) == (TASKS[name].stores == 2)


def test_training_never_draws_what_is_held_out() -> None:
    work = replace(TINY["gpt"].work, batch=64)
    seen, unseen = "a" * 900, "b" * 100
    data = evidence_tasks._windows(seen + unseen, work)
    a, b = (evidence_tasks.text.vocabulary().index(letter) for letter in "ab")
    assert {int(code) for step in range(50) for part in data.draw(step, 0) for code in part.unique()} == {a}
    assert {int(code) for batch in data.held_out for part in batch for code in part.unique()} == {b}
    scans = TINY["vit"].data(replace(TINY["vit"].work, batch=512))
    apart = {image.numpy().tobytes() for image in scans.held_out[0][0]}
    assert len(apart) > 300
    assert not apart & {image.numpy().tobytes() for step in range(5) for image in scans.draw(step, 0)[0]}


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    wild = {"vit": replace(TINY["vit"], rate=1e30, work=replace(TINY["vit"].work, steps=5))}
    assert len(train(wild["vit"], ROWS[PLAIN], 0)["losses"]) < 5
    found = run(tmp_path / "evidence.json", [0], 0, wild, {PLAIN: ROWS[PLAIN]})
    assert found["cells"][0]["final"] is None
    assert found["cells"][0]["curve"] == []
    assert machine.read(tmp_path / "evidence.json") == found


# -- runs -------------------------------------------------------------------------------------------------------------


def names(found: dict[str, Any]) -> set[Cell]:
    return {Cell(cell["task"], cell["row"], cell["seed"]) for cell in found["cells"]}


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"

    def stop(_cell: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(path, [0, 1], 0, SOME, TWO, stop)
    kept = machine.read(path)["cells"]
    assert len(kept) == 1
    ran: list[dict[str, Any]] = []
    whole = run(path, [0, 1], 0, SOME, TWO, ran.append)
    assert names(whole) == {Cell("vit", row, seed) for row in TWO for seed in (0, 1)}
    assert len(ran) == 3
    assert whole["cells"][0] == kept[0]
    run(path, [0, 1], 0, SOME, TWO, stop)  # nothing is left to run


def test_what_has_changed_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    run(path, [0], 0, SOME, TWO)
    ran: list[dict[str, Any]] = []
    run(path, [0], 0, SOME, TWO | {"lossy": RANDOM}, ran.append)
    assert [cell["row"] for cell in ran] == ["lossy"]
    longer = {"vit": replace(TINY["vit"], work=replace(TINY["vit"].work, steps=3))}
    run(path, [0], 0, longer, TWO, ran.append)
    assert [cell["row"] for cell in ran[1:]] == list(TWO)


def test_what_stores_have_changed_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    run(path, [0], 0, SOME, TWO)
    ran: list[dict[str, Any]] = []
    run(path, [0], 0, {"vit": replace(SOME["vit"], stores=SOME["vit"].stores + 1)}, TWO, ran.append)
    assert [cell["row"] for cell in ran] == list(TWO)


def test_old_cells_of_a_changed_row_are_marked_until_they_are_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evidence.json"
    old = run(path, [0, 1], 0, SOME, TWO)
    machine.write(path, old | {"cells": [cell | {"date": "2026-01-02"} for cell in old["cells"]]})
    monkeypatch.setitem(evidence_tasks.CHANGED, "lossy", "2026-01-03")
    assert evidence_page.write(tmp_path).read_text().count("‡ |") == 3, "verdicts, a loss in training, one held out"
    ran: list[dict[str, Any]] = []
    found = run(path, [0, 1], 0, SOME, TWO, ran.append)
    assert [(cell["row"], cell["seed"]) for cell in ran] == [("lossy", 0), ("lossy", 1)]
    assert len(found["cells"]) == 4
    assert "‡ |" not in evidence_page.write(tmp_path).read_text()


def test_some_cells_are_run_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    run(path, [0], 0, SOME, TWO)
    found = run(path, [0, 1], 0, SOME, TWO, some=lambda cell: cell.row == PLAIN)
    assert names(found) == {Cell("vit", PLAIN, 0), Cell("vit", "lossy", 0), Cell("vit", PLAIN, 1)}
    assert _names(ROWS)("int8; int4, dither") == {"int8", "int4, dither"}
    with pytest.raises(ArgumentTypeError, match="int9"):
        _names(ROWS)("int8; int9")


def test_a_cell_that_fails_is_named_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    found = run(path, [0], 0, SOME, {PLAIN: ROWS[PLAIN], "broken": {"policy": "int9"}})
    assert "int9" in found["cells"][1]["failed"]
    assert "- vit, broken, seed 0 failed: UnknownCodecError" in evidence_page.write(tmp_path).read_text()
    ran: list[dict[str, Any]] = []
    run(path, [0], 0, SOME, {PLAIN: ROWS[PLAIN], "broken": {"policy": "int9"}}, ran.append)
    assert [cell["row"] for cell in ran] == ["broken"]


def test_results_of_another_torch_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    found = run(path, [0], 0, SOME, {PLAIN: ROWS[PLAIN]})
    machine.write(path, found | {"environment": found["environment"] | {"torch": "1.0"}})
    with pytest.raises(SystemExit, match="another torch"):
        run(path, [0], 0, SOME, {PLAIN: ROWS[PLAIN]})


def test_a_process_trains_the_same(tmp_path: Path) -> None:
    rows = {"lossy": RANDOM}
    here, there = (run(tmp_path / f"{workers}.json", [0], workers, SOME, rows) for workers in (0, 1))
    assert [cell | {"date": ""} for cell in here["cells"]] == [cell | {"date": ""} for cell in there["cells"]]


# -- statistics -------------------------------------------------------------------------------------------------------


def made_up(plain: list[float], mine: list[float | None], first: float = 9.0) -> dict[str, Any]:
    values = {PLAIN: plain, "lossy": mine}
    cells = [
        {"task": "vit", "row": row, "seed": seed, "first": first, "final": value, "held_out": value, "held": 0.25,
         "accuracy": 0.9, "date": "2026-01-02", "curve": [first, value] if value else []}
        for row in values
        for seed, value in enumerate(values[row])
    ]  # fmt: skip
    environment = {"processor": "a processor", "python": "3", "torch": "2"}
    sizes = {name: task.sizes() for name, task in SOME.items()}
    return {"environment": environment, "tasks": sizes, "rows": TWO, "cells": cells}


def test_an_interval_is_that_of_the_textbook() -> None:
    assert Interval.of([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.302652729 / 3**0.5))


def test_differences_are_paired() -> None:
    plain, mine = [1.0, 2.0, 3.5, 2.5], [1.2, 2.1, 3.9, 2.6]
    judged = judge(made_up(plain, mine), "vit", "lossy")
    expected = stats.ttest_rel(mine, plain).confidence_interval(0.95)
    assert judged is not None
    assert judged.off.mean - judged.off.half == pytest.approx(expected.low)
    assert judged.off.mean + judged.off.half == pytest.approx(expected.high)
    alone = stats.t.interval(0.95, 3, loc=2.25, scale=stats.sem(plain))
    assert (judged.plain.mean - judged.plain.half, judged.plain.mean + judged.plain.half) == pytest.approx(alone)


@pytest.mark.parametrize(
    ("plain", "mine", "verdict"),
    [
        ([1.0, 1.1, 1.2], [1.01, 1.11, 1.21], "within"),  # off in each seed alike, but less than seeds are
        ([1.0, 1.1, 1.2], [1.2, 0.9, 1.3], "within"),
        ([1.0, 1.001, 1.002], [1.0, 1.2, 0.9], "unclear"),  # far off, but pairs do not agree
        ([1.0, 1.001, 1.002], [1.1, 1.101, 1.103], "worse"),
        ([1.0, 1.001, 1.002], [0.9, 0.901, 0.903], "lower"),
        ([1.0, 1.1, 1.2], [1.0, None, 1.2], "diverged"),
        ([1.0, 1.1, 1.2], [1.0, 9.0, 1.2], "diverged"),  # no lower than the first loss
    ],
)
def test_verdicts(plain: list[float], mine: list[float | None], verdict: str) -> None:
    judged = judge(made_up(plain, mine), "vit", "lossy")
    assert judged is not None
    assert (judged.verdict, judged.seeds) == (verdict, 3)


def test_a_row_without_a_partner_has_no_verdict() -> None:
    assert judge(made_up([], [1.0, 2.0]), "vit", "lossy") is None
    assert judge(made_up([1.0, 2.0], [1.0]), "vit", "lossy") is None, "one seed shows nothing"
    gone = made_up([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    gone["cells"][0]["final"] = None  # plain itself
    judged = judge(gone, "vit", "lossy")
    assert judged is not None
    assert judged.seeds == 2


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    machine.write(tmp_path / "evidence.json", made_up([1.0, 1.001, 1.002], [1.1, 1.101, 1.103, 1.1]))
    text = evidence_page.write(tmp_path).read_text()
    for words in (
        "| plain | 1.0010 ± 0.0025 (3 seeds) |", "| lossy | **+0.1003 ± 0.0014 worse** (3 seeds) |",
        "| all | 25 to 25 % | 1 worse | 1 worse |", "Fewer seeds of vit: plain (3).", "a processor, no GPU",
        "torch 2.", "| 2026-01-02 |",
    ):  # fmt: skip
        assert words in text, words
    machine.write(tmp_path / "evidence.json", made_up([1.0, 1.1, 1.2], [1.01, 1.11, 1.21]))
    assert "| lossy | +0.0100 ± 0.0000 within† |" in evidence_page.write(tmp_path).read_text()
    assert (tmp_path / "evidence.png").stat().st_size > 5000


def test_the_page_says_what_is_missing(tmp_path: Path) -> None:
    found = made_up([1.0, 1.001, 1.002], [1.1, 1.101, 1.103])
    found["rows"] = TWO | {"other": RANDOM}
    found["tasks"] |= {"cnn": TASKS["cnn"].sizes()}
    found["cells"] += [cell | {"task": "cnn", "date": "2026-01-05"} for cell in found["cells"] if cell["row"] == PLAIN]
    found["cells"] += [
        found["cells"][-1] | {"row": "lossy", "held": 0.9, "date": "2026-01-03"}
    ]  # one seed has no verdict
    machine.write(tmp_path / "evidence.json", found)
    text = evidence_page.write(tmp_path).read_text()
    for words in (
        "| vit | 25 to 25 % | 1 worse |", "| - | - | - | - |", "| lossy | **+0.1003 ± 0.0014 worse** | - |",
        "Not measured of vit: other.", "Not measured of cnn: other.", "Fewer seeds of cnn: lossy (1).",
        "| 2026-01-03 to 2026-01-05 |",
    ):  # fmt: skip
        assert words in text, words


def test_texts_of_the_picture_can_be_read() -> None:
    found = made_up([1.0, 1.1, 1.3], [1.5, 1.6, 1.9])
    found["tasks"] = {name: task.sizes() for name, task in TINY.items()}
    found["rows"] = ROWS
    found["cells"] = [
        cell | {"task": task, "row": row, "curve": [9.0 - n, 2.0 + n / 9]}
        for task in TASKS
        for n, row in enumerate(ROWS)
        for cell in found["cells"][:3]
    ]
    offs = {(task, row): (Interval(0.1 * n, 0.05), 0.1) for task in TASKS for n, row in enumerate(ROWS)}
    offs["gpt", "fp8"] = Interval(inf, inf), 0.1
    assert faults(evidence_plot.draw(found, offs)) == []


def test_the_pages_here_are_those_of_their_figures() -> None:
    for path in machine.RESULTS.glob("*/evidence.json"):
        text = "\n".join(evidence_page.lines(machine.read(path))).rstrip() + "\n"
        assert path.with_name("evidence.md").read_text() == text


def test_the_guide_says_what_its_figures_say() -> None:
    """docs/guide/convergence.md, of the machine whose page it shows."""
    found = machine.read(machine.RESULTS / "amd-epyc-2-cores" / "evidence.json")

    def verdicts(row: str, *tasks: str) -> list[str]:
        judged = [judge(found, task, row, measure) for task in tasks or TASKS for measure in evidence_page.MEASURES]
        return [one.verdict for one in judged if one]

    for row in ("int8", "int8(affine)", "fp8", "recompute(int8)", "recompute(int4)", "bits, as many as int4"):
        assert {*verdicts(row)} == {"within"}, row
    assert len(verdicts("int8")) == 2 * len(TASKS)
    assert {*verdicts("int4", "gpt", "vit", "cnn", "moe", "lstm")} == {"within"}
    assert verdicts("int4", "lora") == ["within", "worse"]
    for row, task, measure in product(("int8", "int8(affine)"), TASKS, evidence_page.MEASURES):
        judged = judge(found, task, row, measure)
        if judged:
            assert abs(judged.off.mean) <= judged.off.half, f"{row} of {task}: pairs show a difference"
    for row in ("int4, dither", "int4, stochastic", "int4, dither, zeros exact"):
        assert verdicts(row, "cnn") == ["within"] * 2
        assert "worse" in verdicts(row, "lora")
    assert {*verdicts("bits, noise 0.1", "gpt", "vit", "cnn", "lora")} == {"within"}
    assert verdicts("bits, noise 0.1", "lstm") == ["within", "worse"]
    assert [verdicts("int2, dither", task)[0] for task in ("gpt", "vit", "cnn", "lstm", "lora")] == [
        "worse", "unclear", "worse", "worse", "worse"
    ]  # fmt: skip
    assert verdicts("topk, a quarter").count("worse") == 7
    assert verdicts("topk, a quarter", "lora") == ["diverged"] * 2
