"""Automatic bits beside GACT's: bytes at equal variance of the gradients, variance at equal bytes.

    python -m benchmarks.evidence.bits        # about 15 minutes on one core

A GPT is trained for some hundred steps. Then both ways choose a codec for each payload of one more step, and the
gradients that a store with that choice gives are measured: the mean of |g - g_exact|^2 over all weights and a number
of seeds of the store, relative to |g_exact|^2. So rounding to nearest, which is biased, pays for its bias too.

GACT here is our reading of "GACT: Activation Compressed Training for Generic Network Architectures" (Liu et al., ICML
2022, after ActNN, Chen et al., ICML 2021), not its code: affine codes with a minimum and a scale for 256 elements,
stochastic rounding, 8, 4 or 2 bits; the variance of a layer c * S(b) with S(b) = (2**b - 1)**-2; c from the spread of
the gradient when only that layer's random seed changes, all layers at 4 bits, with three backwards for each layer; then
from 8 bits everywhere the step down that adds the least variance for each bit that it saves, until the average fits.
What differs: the formats are our `int8(affine)`, `int4` and `int2` (bfloat16 minimum and scale), one bit is left out,
and a layer is a payload of the store: what it protects stays exact for both.

Ours takes its sensitivities from one lossy step, as "bits" does, without another backward; and one more step in which
every payload goes through each candidate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from actstore import ActivationStore, SampleErrors
from actstore.accuracy.bits.chooser import ERROR_LEVELS, INITIAL_CODEC
from actstore.accuracy.bits.payloads import Choice, Sensitivity, SitePayload
from actstore.accuracy.bits.solve import least_bytes, least_variance
from actstore.accuracy.bits.trials import CANDIDATES, UNBIASED
from actstore.accuracy.influence.influence import variances
from actstore.base.spec import Site
from actstore.bench.environment import environment
from actstore.policy import Encode, parse_decision
from benchmarks import machine
from benchmarks.evidence.bits_probe import MIN_NBYTES, WORK, Probe, Subject, spread

FORMATS = {
    8: "int8(affine, group=256, round=stochastic)",
    4: "int4(group=256, round=stochastic)",
    2: "int2(group=256, round=stochastic)",
}
AVERAGE_BITS = (4.0, 6.0, 5.0, 3.0)  # average bits of GACT
PROBE_BITS = 4  # bits at which GACT measures the layers
BACKWARDS_PER_LAYER = 3  # of each layer
SEARCH_STEPS = 6  # steps of the search for GACT's measured variance

Per = Literal["module", "site"]


def gact_variances(subject: Subject, probe: Probe, loss: torch.Tensor, sites: Sequence[Site]) -> dict[Site, float]:
    """Return the variance of the gradient from each site's rounding at 4 bits, by three backwards for each."""
    decision = parse_decision(FORMATS[PROBE_BITS])
    assert isinstance(decision, Encode)
    fixed = {site: (decision.codec, key) for key, site in enumerate(sites)}
    found = {}
    for number, site in enumerate(sites):
        keys = [len(sites) * (1 + draw) + number for draw in range(BACKWARDS_PER_LAYER)]
        found[site] = spread([subject.gradients(loss, probe, {**fixed, site: (decision.codec, key)}) for key in keys])
    return found


def gact_bits(variances: Mapping[Site, float], numels: Mapping[Site, int], average: float) -> dict[Site, int]:
    """Return GACT's greedy choice: from 8 bits down, each time the step of least variance for each bit saved."""
    ladder = sorted(FORMATS, reverse=True)
    share = {site: variance / _s(PROBE_BITS) for site, variance in variances.items()}
    bits = dict.fromkeys(variances, ladder[0])
    while sum(bits[site] * numels[site] for site in bits) > average * sum(numels.values()):
        steps = []
        for site, now in bits.items():
            if now != ladder[-1]:
                then = ladder[ladder.index(now) + 1]
                steps.append(
                    (share[site] * (_s(then) - _s(now)) / ((now - then) * numels[site]), str(site), site, then)
                )
        _, _, site, then = min(steps)
        bits[site] = then
    return bits


def _s(bits: int) -> float:
    return float((2**bits - 1) ** -2)


def chosen(payloads: Sequence[SitePayload], decisions: Mapping[Site, str]) -> Choice:
    """Return given decisions as a Choice, with actstore's prediction."""
    rows = {p.site: next(c for c in p.candidates if c.decision == decisions[p.site]) for p in payloads}
    every = {site: decisions[p.site] for p in payloads for site in (p.site, *p.readers)}
    nbytes = sum(row.nbytes for row in rows.values())
    variance = sum(p.sensitivity.at(rows[p.site].error) for p in payloads)
    return Choice(every, nbytes, variance, 0.0, sum(p.numel for p in payloads), "bytes", 0.0, 0.0, "site")


def ours(subject: Subject) -> dict[str, Sensitivity]:
    """Return the sensitivities from one lossy step, for the variance of all weights together, as GACT defines it."""
    store = ActivationStore(subject.model, Encode(INITIAL_CODEC), min_bytes=MIN_NBYTES, observe=[SampleErrors(every=0)])
    influence = store._influence
    assert influence is not None
    store.sample_next()
    influence.ask(ERROR_LEVELS)
    with store:
        loss = subject.model(*subject.batches[0])
    torch.autograd.grad(loss, subject.parameters)
    assert influence._look is not None
    assert influence._look.parts is not None
    step, _ = influence._look.parts
    norms = step.norms.read()
    curves = {level: variances(step, norms, None, level) for level in ERROR_LEVELS}
    store.close()
    return {
        str(account.site): Sensitivity(tuple((level**2, curves[level][account]) for level in ERROR_LEVELS))
        for account in curves[ERROR_LEVELS[0]]
    }


def among(payloads: Sequence[SitePayload], decisions: Sequence[str]) -> list[SitePayload]:
    """Return the payloads with the candidates of these decisions only."""
    return [
        replace(payload, candidates=tuple(c for c in payload.candidates if c.decision in decisions))
        for payload in payloads
    ]


class Comparison:
    """Choices, and the gradient errors of a store with them."""

    def __init__(self, subject: Subject, draws: int) -> None:
        self.subject, self.draws = subject, draws

    def row(self, name: str, choice: Choice) -> dict[str, Any]:
        """Measure the figures of a choice."""
        variance, error, stored = self.subject.deviation(choice.policy, self.draws)
        return {
            "name": name,
            "nbytes": choice.nbytes,
            "stored_bytes": stored,
            "bits": choice.bits,
            "variance": variance / self.subject.square,
            "standard_error": error / self.subject.square,
            "predicted": choice.variance / self.subject.square,
            "gap": choice.gap,
            "decisions": {str(site): text for site, text in choice.decisions.items()},
        }

    def group(
        self,
        average: float,
        payloads: Sequence[SitePayload],
        measured: Sequence[SitePayload],
        variances: Mapping[Site, float],
    ) -> dict[str, Any]:
        """Compare actstore with GACT at some average bits: `payloads` have our sensitivities, `measured` GACT's."""
        mine, theirs = among(payloads, CANDIDATES), among(payloads, list(FORMATS.values()))
        bits = gact_bits(variances, {payload.site: payload.numel for payload in payloads}, average)
        gact = self.row("GACT", chosen(payloads, {site: FORMATS[b] for site, b in bits.items()}))
        return {
            "average_bits": average,
            "gact": gact,
            "equal_variance": [
                self.equal_variance("ours, by site", mine, gact, "site"),
                self.equal_variance("ours, by module", mine, gact, "module"),
            ],
            "equal_bytes": [
                self.equal_bytes("ours, by site", mine, gact, "site"),
                self.equal_bytes("ours, by module", mine, gact, "module"),
                self.equal_bytes("ours, unbiased only", among(mine, UNBIASED), gact, "site"),
                self.equal_bytes("ours, GACT's formats", theirs, gact, "site"),
                self.equal_bytes("ours, GACT's sensitivities", among(measured, CANDIDATES), gact, "site"),
            ],
        }

    def equal_bytes(self, name: str, payloads: Sequence[SitePayload], gact: dict[str, Any], per: Per) -> dict[str, Any]:
        """Measure actstore's choice with GACT's bytes."""
        row = self.row(name, least_variance(payloads, nbytes=gact["nbytes"], per=per))
        return row | {"times_gact": row["variance"] / gact["variance"]}

    def equal_variance(
        self, name: str, payloads: Sequence[SitePayload], gact: dict[str, Any], per: Per
    ) -> dict[str, Any]:
        """Search for the requested variance at which actstore's choice has GACT's measured variance."""
        low, high, asked = 0.0, None, gact["variance"]
        best = None
        for _ in range(SEARCH_STEPS):
            row = self.row(name, least_bytes(payloads, variance=asked * self.subject.square, per=per))
            row["asked"] = asked
            if row["variance"] <= gact["variance"]:
                low = asked
                best = row if best is None or row["nbytes"] < best["nbytes"] else best
            else:
                high = asked
            mended = asked * gact["variance"] / row["variance"]
            asked = mended if high is None or (not low and mended < high) else (max(low, high / 4) * high) ** 0.5
        if best is None:
            return {"name": name, "failed": f"no choice of {SEARCH_STEPS} had GACT's variance"}
        return best | {"times_gact": best["nbytes"] / gact["nbytes"]}


def measure(steps: int, draws: int, done: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return all figures; `done` receives the figures so far after each of GACT's budgets."""
    subject = Subject(WORK, steps)
    probe = Probe([*CANDIDATES, *(text for text in FORMATS.values() if text not in CANDIDATES)])
    begin = perf_counter()
    loss = subject.probed(probe)
    trials = perf_counter()
    known = ours(subject)
    predicted = perf_counter()
    sites = [payload.site for payload in probe.payloads({})]
    variances = gact_variances(subject, probe, loss, sites)
    end = perf_counter()
    errors = {
        p.site: next(c.error for c in p.candidates if c.decision == FORMATS[PROBE_BITS]) for p in probe.payloads(known)
    }
    measured = {str(site): Sensitivity(((errors[site], variances[site]),)) for site in sites}
    groups: list[dict[str, Any]] = []
    found = {
        "environment": environment(),
        "workload": WORK.to_dict() | {"steps": steps},
        "draws": draws,
        "sites": len(sites),
        "minibatch_noise": subject.minibatch_noise() / subject.square,
        "extra_backwards": {"gact": BACKWARDS_PER_LAYER * len(sites), "ours": 0},
        "sampled_steps": {"gact": 0, "ours": 2},
        "seconds": {"trials": trials - begin, "ours": predicted - trials, "gact": end - predicted},
        "groups": groups,
    }
    compare = Comparison(subject, draws)
    for average in AVERAGE_BITS:
        groups.append(compare.group(average, probe.payloads(known), probe.payloads(measured), variances))
        done(found)
    return found


def show(found: dict[str, Any]) -> None:
    """Print the figures."""
    table = Table("GACT's bits", "row", "bits", "variance", "predicted", "of GACT's")
    for group in found["groups"]:
        first = group["gact"]
        table.add_row(f"{group['average_bits']:g}", "GACT", *_cells(first), "")
        for what in ("equal_variance", "equal_bytes"):
            for row in group[what]:
                unit = "bytes" if what == "equal_variance" else "variance"
                said = (
                    [row["failed"], "", "", ""]
                    if "failed" in row
                    else [*_cells(row), f"{row['times_gact']:.1%} {unit}"]
                )
                table.add_row("", row["name"], *said)
        table.add_section()
    Console().print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    return [f"{row['bits']:.2f}", f"{row['variance']:.2e} ± {row['standard_error']:.0e}", f"{row['predicted']:.2e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of training before")
    parser.add_argument("--draws", type=int, default=12, help="seeds of the store for each measured variance")
    parser.add_argument("--output", type=Path, help="JSON file instead of that of this machine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = given.output or machine.RESULTS / machine.name_of(environment()) / "bits.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    show(measure(given.steps, given.draws, lambda found: machine.write(path, found)))


if __name__ == "__main__":
    main()
