"""Models of other projects, under each policy, against plain training: ``make test-models``.

Exact policies must leave the loss, all gradients and buffers, and the state of the random generator as plain training
does, bit for bit. Of lossy ones the error of all gradients together is kept, beside that of plain bfloat16 autocast.
Each model has a line; ``--json FILE`` keeps what came of it, and a later run goes on after the models in it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy
import torch
from torch import Tensor, nn

from actstore import ActivationStore, make_plan
from actstore.accuracy.influence.effect import GradientEffect
from actstore.errors import ActstoreError
from tests.models.architectures import Architecture, Batch, architectures, loss_of

EXACT = ("recompute", "@attention : keep; @blocks : recompute", "raw @ disk", "derive")
LOSSY = ("int8", "recompute(int8)")
COMPILED = ("recompute", "int8")
PLAN = "plan"
COMPILED_MODELS = 60
BUDGET = 0.75  # of the bytes that plain training saves, where a plan can be so small
DTYPES = ("float32", "bfloat16")
WITHOUT_CACHE = "run without it"  # words of a warning: a layer that is given a cache runs again without it
Outcome = list[Tensor | None]


class Trial:
    """One training step of a model, in float32 or under autocast, plain and under policies."""

    def __init__(self, model: nn.Module, batch: Batch, dtype: str) -> None:
        self.first, self.batch, self.dtype = model, batch, dtype
        self.model = copy.deepcopy(model)
        self.wanted = self.plain(self.model)
        self.effect: GradientEffect | None = None  # of the last policy, as its report predicts it

    def plain(self, model: nn.Module) -> Outcome:
        """Train one step; return what it leaves."""
        _seed()
        loss = self.loss(model)
        loss.backward()
        return _left(model, loss)

    def loss(self, model: nn.Module) -> Tensor:
        """Run forward."""
        with torch.autocast("cpu", torch.bfloat16) if self.dtype == "bfloat16" else nullcontext():
            return loss_of(model, self.batch)

    def under(self, policy: Any, *, exact: bool, compiled: bool = False) -> list[float] | str:
        """Train one step under a policy; return the share of bytes held and the gradient error, or what is wrong."""
        model = copy.deepcopy(self.first)
        _seed()
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                loss, share = self._stored(model, policy, compiled)
        except ActstoreError as error:
            return _reason(error)
        left, error = _left(model, loss), error_of(model, self.model)
        if exact and not same(left, self.wanted):
            without = any(WITHOUT_CACHE in str(each.message) for each in told)
            return f"{WITHOUT_CACHE}, as warned: {error:.2g}" if without else f"DIFFERS by {error:.2g}"
        if not math.isfinite(error):
            return "NAN"
        effect = self.effect
        figures = [error] if exact or effect is None or effect.error is None else [error, effect.error]
        return [round(share, 3), *(float(f"{each:.3g}") for each in figures)]

    def _stored(self, model: nn.Module, policy: Any, compiled: bool) -> tuple[Tensor, float]:
        with tempfile.TemporaryDirectory() as folder:
            store = ActivationStore(model, policy, min_bytes=0, **_tiers(policy, folder))
            with closing(store):
                if compiled:
                    store.compile(backend="aot_eager")
                with store:
                    loss = self.loss(model)
                loss.backward()
                report = store.report()
                self.effect = report.gradients
        return loss, report.held_bytes / max(1, report.saved_bytes)

    def planned(self) -> list[float] | str:
        """Train one step under a plan for `BUDGET`, or for the least that the refusal of that names.

        The last figure is the largest peak of a step of that plan, or of one that was measured for it, in budgets.
        """
        model = copy.deepcopy(self.first)
        budget: int | str = max(1, int(self._saved_bytes() * BUDGET))
        peaks: list[int] = []

        def step(store: ActivationStore) -> None:
            with store:
                loss = self.loss(model)
            loss.backward()
            peaks.append(store.report().peak_held_bytes)

        for _ in range(2):
            peaks.clear()
            try:
                found = make_plan(model, step, budget, min_bytes=0)
            except ActstoreError as error:
                refused, named = _reason(error), re.search(r'Give Auto\("(.+?)"\)', str(error))
                if named is None:
                    break
                budget = named[1]
            else:
                outcome = self.under(found, exact=True)
                return [*outcome, round(max(peaks) / found.budget, 3)] if isinstance(outcome, list) else outcome
        return refused

    def _saved_bytes(self) -> int:
        model = copy.deepcopy(self.first)
        store = ActivationStore(model, "keep", min_bytes=0)
        with store:
            self.loss(model).backward()
        saved = store.report().saved_bytes
        store.close()
        return saved


def _seed() -> None:
    """Seed all generators: masks of audio models come from numpy's, layers that are left out from Python's."""
    torch.manual_seed(1)
    numpy.random.seed(1)  # noqa: NPY002  Transformers draws from it
    random.seed(1)


def _tiers(policy: Any, folder: str) -> dict[str, Any]:
    from actstore import Disk

    return {"tiers": [Disk(folder)]} if isinstance(policy, str) and "disk" in policy else {}


def _reason(error: ActstoreError) -> str:
    return f"refused: {str(error).partition('. ')[0]}"[:200].replace("\n", " ")


def _left(model: nn.Module, loss: Tensor) -> Outcome:
    return [loss.detach(), *(each.grad for each in model.parameters()), *model.buffers(), torch.get_rng_state()]


def same(a: Outcome, b: Outcome) -> bool:
    """Return whether two steps have left the same bits; NaN equals NaN."""
    pairs = zip(a, b, strict=True)
    return all(x is y if x is None or y is None else torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def error_of(model: nn.Module, wanted: nn.Module) -> float:
    """Return the error of all gradients together, relative to their norm."""
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), wanted.parameters(), strict=True)]
    found = [(p.double(), q.double()) for p, q in pairs if p is not None and q is not None]
    off, norm = (
        sum(float(x.square().sum()) for x in each) for each in ([p - q for p, q in found], [q for _, q in found])
    )
    return float((off / norm) ** 0.5) if norm else 0.0


def tried(each: Architecture) -> dict[str, Any]:
    """Train a model under all policies, in each dtype; return what came of each."""
    try:
        first, batch = each.make()
    except Exception as error:  # each model has its own kind of error for what it does not take
        return {"left out": f"{type(error).__name__}: {error}".replace("\n", " ")[:200]}
    found: dict[str, Any] = {"weights": sum(weight.numel() for weight in first.parameters())}
    trials: dict[str, Trial] = {}
    for dtype in DTYPES:
        try:
            trial = trials[dtype] = Trial(first, batch, dtype)
            again = trial.plain(copy.deepcopy(first))
        except RuntimeError as error:  # autocast does not know all operators
            found[dtype] = f"plain training fails: {error}".replace("\n", " ")[:200]
            continue
        if not all(each is None or each.isfinite().all() for each in trial.wanted):
            found[dtype] = "plain training gives NaN or infinity"
        elif not same(again, trial.wanted):
            found[dtype] = "plain training does not repeat itself"
        else:
            found[dtype] = _outcomes(trial)
    if isinstance(found["bfloat16"], dict):
        found["autocast"] = float(f"{error_of(trials['bfloat16'].model, trials['float32'].model):.3g}")
    return found


def _outcomes(trial: Trial) -> dict[str, Any]:
    found: dict[str, Any] = {policy: trial.under(policy, exact=True) for policy in EXACT}
    found |= {policy: trial.under(policy, exact=False) for policy in LOSSY}
    return found | ({PLAN: trial.planned()} if trial.dtype == "float32" else {})


def _compiled(first: nn.Module, batch: Batch) -> dict[str, Any] | str:
    try:
        trial = CompiledTrial(first, batch, "float32")
        return {policy: trial.under(policy, exact=policy not in LOSSY, compiled=True) for policy in COMPILED}
    except Exception as error:  # a model that cannot be compiled
        return f"not compiled: {type(error).__name__}: {str(error)[:100]}".replace("\n", " ")


class CompiledTrial(Trial):
    """A step beside that of the compiled model."""

    def plain(self, model: nn.Module) -> Outcome:
        """Compile the model, and train one step."""
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
        return super().plain(model)


def verdict(found: dict[str, Any]) -> str:
    """Return a line about a model."""
    for reason in ("left out", "failed"):
        if reason in found:
            return f"{reason}: {found[reason]}"
    texts = []
    for kind in (*DTYPES, "compiled"):
        outcomes = found.get(kind, {})
        if isinstance(outcomes, str):
            texts.append(f"{kind}: {outcomes}")
            continue
        for policy, what in outcomes.items():
            shown = (
                what if isinstance(what, str) else f"held {what[0]:.0%}" + (f", error {what[1]:.2%}" if what[1] else "")
            )
            texts.append(f"{policy}{'' if kind == 'float32' else f' ({kind})'}: {shown}")
    return "; ".join(texts)


def outcomes(found: dict[str, Any]) -> Iterable[tuple[str, str, Any]]:
    """Yield (float32, bfloat16 or compiled; the policy; what came of it) of one model."""
    for kind in (*DTYPES, "compiled"):
        each = found.get(kind, {})
        if isinstance(each, dict):
            for policy, what in each.items():
                yield kind, policy, what


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return what came of each model of a file; a name is LIBRARY/CLASS."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return dict(map(json.loads, lines))


def run(wanted: Callable[[str], bool], path: Path | None, seconds: float) -> dict[str, dict[str, Any]]:
    """Try the architectures that are not yet in a file, then compile `COMPILED_MODELS` of them, for so many seconds."""
    found, ends = read(path) if path else {}, time.monotonic() + seconds
    drawn = sorted(architectures(), key=lambda each: crc32(each.name.encode()))  # each part of a sweep is a sample
    named = {f"{each.library}/{each.name}": each for each in drawn}

    def keep(name: str, outcome: dict[str, Any]) -> None:
        found[name] = outcome
        print(f"{name}: {verdict(outcome)}", flush=True)
        if path:
            lines = [json.dumps([each, found[each]]) + "\n" for each in named if each in found]
            path.write_text("".join(lines), encoding="utf-8")

    for name, each in named.items():
        if name not in found and wanted(name) and time.monotonic() < ends:
            try:
                keep(name, tried(each))
            except Exception as error:  # the remaining models run
                keep(name, {"failed": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]})
    rest = [name for name in named if "weights" in found.get(name, ()) and wanted(name)]
    for name in rest[:COMPILED_MODELS]:
        if "compiled" not in found[name] and time.monotonic() < ends:
            keep(name, found[name] | {"compiled": _compiled(*named[name].make())})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, help="keep what came of the models in this file, and go on after those in it"
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="these models alone, by LIBRARY/CLASS, or a glob"
    )
    parser.add_argument("--seconds", type=float, default=5400, help="start no further model after so many seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    only = options.only
    found = run(lambda name: any(fnmatch(name, each) for each in only or "*"), options.json, options.seconds)
    kinds = Counter(_kind(what) for each in found.values() for _, _, what in outcomes(each))
    failed = [name for name, each in found.items() if "failed" in each]
    count = sum("left out" not in each for each in found.values())
    print(f"{count} models: {', '.join(f'{number} {kind}' for kind, number in kinds.most_common())}; failed: {failed}")
    return int(bool(kinds["DIFFERS"] or kinds["NAN"] or failed))


def _kind(what: Any) -> str:
    return what.split(":")[0].split(" ")[0] if isinstance(what, str) else "trained"


if __name__ == "__main__":
    sys.exit(main())
