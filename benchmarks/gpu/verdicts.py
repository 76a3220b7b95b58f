"""Promises of the store on a GPU, each with its measured figure and a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

MIB, GIB = 2**20, 2**30
LARGE_NBYTES = 16 * MIB  # payloads from which on the link must be full
SANITIZER_TEST = "test_the_cuda_sanitizer_has_no_complaint"
PREDICTION_TOLERANCE = 0.1  # allowed error of a prediction, as a fraction of the measured step
MOST_OF_INT8 = 1.03  # times plain compilation
SAME_RATIO = 0.01  # times plain; two rows that do the same differ by this
MOST_OF_DERIVE, MOST_BEYOND_CHECKPOINT = 1.1, 0.05  # times plain, where the host is the limit

Figures = dict[str, Any]


class Verdict(NamedTuple):
    """One promise. `good` is None where it was not measured; `found` then has the reason."""

    promise: str
    found: str
    good: bool | None


def verdicts(parts: dict[str, Any]) -> list[Verdict]:
    """Return the verdicts on all promises, whichever parts ran."""
    found: list[Verdict] = []
    for name, judge in _JUDGES:
        figures = parts.get(name, {}).get("figures")
        part = parts.get(name, {"status": "not run", "said": ""})
        said = "" if part["status"] == "ok" else f"{part['status']}: {part['said']}".removesuffix(": ")
        for promise, verdict in judge(figures or {}):
            found.append(Verdict(promise, *verdict) if verdict else Verdict(promise, said, None))
    return found


_Judged = Iterator[tuple[str, tuple[str, bool] | None]]


def _codecs(figures: Figures) -> _Judged:
    yield "every codec writes the oracle's bytes, with every option and type", _counted(figures)


def _tests(figures: Figures) -> _Judged:
    yield "tests on the device pass", _counted(figures)
    checked = {name for kind in ("passed", "failed") for name in figures.get(kind, ()) if SANITIZER_TEST in name}
    bad = len(checked & set(figures.get("failed", ())))
    yield (
        "torch.cuda._sanitizer finds no race in the engine, and finds planted ones",
        (f"{len(checked) - bad} of {len(checked)} tests pass", not bad) if checked else None,
    )


def _compiled(figures: Figures) -> _Judged:
    yield "tests of compiled models pass on the device", _counted(figures)


def _counted(figures: Figures) -> tuple[str, bool] | None:
    """Judge a run of tests; a run that was stopped does not pass."""
    if not figures:
        return None
    passed, failed, skipped = (len(figures[kind]) for kind in ("passed", "failed", "skipped"))
    if not failed and not passed:
        return None
    end = "" if figures["finished"] else ", not finished"
    return f"{passed} passed, {failed} failed, {skipped} skipped{end}", not failed and figures["finished"]


def _sanitizer(figures: Figures) -> _Judged:
    said = figures.get("said", {})
    whole = len(said) == len(figures.get("tools", ()))
    words = "; ".join(f"{tool}: {text}" for tool, text in said.items())
    yield "compute-sanitizer finds nothing in the kernels", (words, figures["clean"] and whole) if said else None


def _exact(figures: Figures) -> _Judged:
    rows = figures.get("rows", [])
    ours = [row for row in rows if row["kind"] != "plain"]
    exact = [row for row in ours if row["bit_equal"] and row["loss_hex"] == rows[0]["loss_hex"]]
    yield (
        "lossless rows have plain's gradients and loss, bit for bit (float32)",
        (f"{len(exact)} of {len(ours)} rows", len(exact) == len(ours)) if ours else None,
    )


def _small(figures: Figures) -> _Judged:
    rows = {row["name"]: row["ratio"] for row in figures.get("rows", []) if row.get("ratio")}
    ours, theirs, derive = (rows.get(name) for name in ("recompute", "torch checkpoint", "derive"))
    yield (
        f"small GPT: recompute takes at most {MOST_BEYOND_CHECKPOINT} times plain more than torch checkpoint",
        (f"{ours:.2f} against {theirs:.2f}", ours <= theirs + MOST_BEYOND_CHECKPOINT) if ours and theirs else None,
    )
    yield (
        f"small GPT: derive takes at most {MOST_OF_DERIVE} times plain",
        (f"{derive:.2f}", derive <= MOST_OF_DERIVE) if derive else None,
    )


def _random(figures: Figures) -> _Judged:
    yield "random models under exact policies leave what plain training leaves, bit for bit", _all_of(figures)


def _lossy(figures: Figures) -> _Judged:
    yield (
        "random models under lossy policies have plain's loss, and the same gradients whenever copies end",
        _all_of(figures),
    )


def _all_of(figures: Figures) -> tuple[str, bool] | None:
    """Judge random models; where one failed, those of its hundred and later ones are not counted."""
    if not figures:
        return None
    counts = figures["counts"]
    trained = sum(count for name, count in counts.items() if name not in ("no model", "no policy"))
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{trained} of {figures['examples']} models ({words})", trained >= figures["examples"]


def _transfer(figures: Figures) -> _Judged:
    goals, links = figures.get("goals", {}), figures.get("link", [])
    steps = [figures[name]["equal"] for name in ("hidden", "exposed") if name in figures]
    right = [*(row["correct"] for row in links), *steps]
    yield "every byte comes back", (f"{sum(right)} of {len(right)} checks", all(right)) if right else None
    shares = [row["both"].get("of_ceiling") for row in links if row["nbytes"] >= LARGE_NBYTES]
    least = min(filter(None, shares), default=None)
    yield (
        f"both directions at once reach {100 * goals.get('of_ceiling', 0.9):.0f} % of plain pinned copies (payloads of"
        f" {LARGE_NBYTES // MIB} MiB or more)",
        (f"{100 * least:.0f} %", least >= goals["of_ceiling"]) if least else None,
    )
    hidden = figures.get("hidden")
    yield (
        f"under {100 * goals.get('stall_share', 0.02):.0f} % of a step are stalls when compute is longer than copies",
        (f"{100 * hidden['stall_share']:.2f} %", hidden["stall_share"] < goals["stall_share"]) if hidden else None,
    )
    over = figures.get("exposed", {}).get("stall_over_theory")
    yield (
        f"at most {goals.get('stall_over_theory', 1.05):.2f} times the stall of theory when it is shorter",
        (f"{over:.2f}", over <= goals["stall_over_theory"]) if over is not None else None,
    )
    steady = figures.get("steady")
    counts = steady["allocated"] if steady else {}
    yield (
        "a steady state allocates nothing",
        (", ".join(f"{name} {count}" for name, count in sorted(counts.items())), not any(counts.values()))
        if steady
        else None,
    )


def _kernels(figures: Figures) -> _Judged:
    rows = [row for row in figures.get("rows", []) if "correct" in row]
    right = sum(row["correct"] for row in rows)
    yield (
        "every kernel's first rows are those of PyTorch operations",
        ((f"{right} of {len(rows)} rows", right == len(rows)) if rows else None),
    )


def _llama(figures: Figures) -> _Judged:
    rows = [row for row in figures.get("rows", []) if "step_ms" in row]
    ours = [row for row in rows if row["kind"] == "ours"]
    exact = [row for row in ours if row["exact"]]
    equal = sum(row["equal"] for row in exact)
    yield (
        "Llama blocks: exact rows have plain's gradients, bit for bit (bfloat16)",
        (f"{equal} of {len(exact)} rows", equal == len(exact)) if exact else None,
    )
    plans = [row for row in ours if "budget" in row]
    peaks = [max(sample["peak_held_bytes"] for sample in row["samples"]) / row["budget"] for row in plans]
    words = ", ".join(f"{row['name']}: {peak:.1%}" for row, peak in zip(plans, peaks, strict=True))
    yield "plans hold their budget", (words, max(peaks) <= 1) if plans else None
    off = [row["predicted_ms"] / row["step_ms"] - 1 for row in plans]
    yield (
        f"plans take what was predicted, within {PREDICTION_TOLERANCE:.0%}",
        (", ".join(f"{share:+.1%}" for share in off), all(abs(share) <= PREDICTION_TOLERANCE for share in off))
        if off
        else None,
    )
    yield (
        f"plans take at most {SAME_RATIO} times plain more than a policy in one line with no more memory",
        _beside_policies(plans, exact),
    )
    lossy = [row for row in ours if row["name"] == "derive(int8)"]
    for words, some, most, share in (("an exact row", exact, 1.12, 0.25), ("derive(int8)", lossy, 1.05, 0.3)):
        yield (
            f"Llama blocks: {words} takes at most {most} times plain and holds at most {share} of it",
            _cheapest(some, figures.get("plain", {}), most, share),
        )
    for peer in [row for row in rows if row["kind"] == "peer"]:
        yield f"faster than {peer['name']} with no more memory, {_fidelity(peer)}", _against(peer, ours)


def _beside_policies(plans: list[Figures], rows: list[Figures]) -> tuple[str, bool] | None:
    """Compare each plan with the fastest policy whose peak is not higher; None without a GPU, which has the peak."""
    words, good = [], True
    for plan in plans:
        fit = [row for row in rows if "budget" not in row and row.get("peak_bytes", inf) <= plan.get("peak_bytes", 0)]
        if fit:
            best = min(fit, key=lambda row: float(row["ratio"]))
            words.append(f"{plan['name']}: {plan['ratio']:.2f}, {best['name']}: {best['ratio']:.2f}")
            good &= plan["ratio"] <= best["ratio"] + SAME_RATIO
    return ("; ".join(words), good) if words else None


def _cheapest(rows: list[Figures], plain: Figures, most: float, share: float) -> tuple[str, bool] | None:
    """Judge the fastest row that holds at most a share of what plain training holds; None without a GPU's bytes."""
    if "held_bytes" not in plain or not rows or "peak_bytes" not in plain:
        return None
    fit = [row for row in rows if row["held_bytes"] <= share * plain["held_bytes"]]
    if not fit:
        return "no row holds so little", False
    best = min(fit, key=lambda row: float(row["ratio"]))
    words = f"{best['name']}: {best['ratio']:.2f} with {best['held_bytes'] / plain['held_bytes']:.2f} held"
    return words, best["ratio"] <= most


def _adapted(figures: Figures) -> _Judged:
    rows = [row for row in figures.get("rows", []) if "step_ms" in row]
    ours = [row for row in rows if row["kind"] == "ours"]
    exact = [row for row in ours if row["exact"]]
    yield (
        "32 layers with adapters: exact rows have plain's gradients, bit for bit (bfloat16)",
        (f"{sum(row['equal'] for row in exact)} of {len(exact)} rows", all(row["equal"] for row in exact))
        if exact
        else None,
    )
    for peer in [row for row in rows if row["kind"] == "peer"]:
        yield (
            f"32 layers with adapters: faster than {peer['name']} with no more memory, {_fidelity(peer)}",
            _against(peer, ours),
        )


def _graphs(figures: Figures) -> _Judged:
    rows = {row["name"]: row for row in figures.get("rows", []) if "ratio" in row}
    keep, int8 = rows.get("keep"), rows.get("int8")
    yield (
        "compiled: keep has plain compilation's gradients, bit for bit (bfloat16)",
        (f"{keep['ratio']:.2f} times plain, error {keep['grad_error']:.2%}", keep["equal"]) if keep else None,
    )
    yield (
        f"compiled: int8 takes at most {MOST_OF_INT8} times plain compilation",
        (f"{int8['ratio']:.2f}", int8["ratio"] <= MOST_OF_INT8) if int8 else None,
    )
    yield "compiled: a plan at the peak of PyTorch's budget needs no more memory or time than that", _duel(rows, 0.5)


def _duels(figures: Figures) -> _Judged:
    rows = {row["name"]: row for row in figures.get("rows", []) if "ratio" in row}
    for share in (0.5, 0.25):
        yield (
            f"compiled, 8 blocks, CUDA graphs: a plan at the peak of PyTorch's budget {share} needs no more memory or"
            " time than that",
            _duel(rows, share),
        )


def _duel(rows: dict[str, Figures], share: float) -> tuple[str, bool] | None:
    theirs, ours = rows.get(f"PyTorch's budget {share}"), rows.get(f"plan at its peak, {share}")
    if not ours or not theirs or not theirs["peak_bytes"]:
        return None
    words = f"{ours['ratio']:.2f} against {theirs['ratio']:.2f} times plain, "
    words += f"{ours['peak_bytes'] / theirs['peak_bytes']:.1%} of its peak"
    return words, ours["ratio"] <= theirs["ratio"] and ours["peak_bytes"] <= theirs["peak_bytes"]


def _fidelity(peer: Figures) -> str:
    return "gradients exact" if peer["exact"] else "gradients no farther from plain's"


def _against(peer: Figures, ours: list[Figures]) -> tuple[str, bool] | None:
    """Compare with the fastest row of actstore whose peak is not higher; None without a GPU, which has the peak.

    Its gradients are exact, or no farther from plain's than those of a peer whose own are not.
    """
    if "peak_bytes" not in peer:
        return None
    rows = [row for row in ours if row["exact"] or (not peer["exact"] and row["grad_error"] <= peer["grad_error"])]
    fit = [row for row in rows if row.get("peak_bytes", inf) <= peer["peak_bytes"]]
    if not fit:
        return "no row of ours fits", False
    best = min(fit, key=lambda row: float(row["ratio"]))
    words = f"{best['name']}: {best['ratio']:.2f} against {peer['ratio']:.2f} times plain"
    return words, best["ratio"] < peer["ratio"]


_JUDGES = (
    ("codecs", _codecs),
    ("kernels", _kernels),
    ("tests", _tests),
    ("sanitizer", _sanitizer),
    ("compiled", _compiled),
    ("exact", _exact),
    ("small", _small),
    ("random", _random),
    ("lossy", _lossy),
    ("transfer", _transfer),
    ("llama", _llama),
    ("llama32", _adapted),
    ("graphs", _graphs),
    ("duel", _duels),
)
