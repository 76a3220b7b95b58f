"""Models of other projects, under each policy, against plain training: ``make test-models``.

Exact policies must leave the loss, all gradients and buffers, and the state of the random generator as plain training
does, bit for bit. Of lossy ones the error of all gradients together is printed, beside that of plain bfloat16 autocast.
Each model has a line; ``--json FILE`` keeps what came of it, and a later run goes on after the models in it.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actstore import ActivationStore
from actstore.errors import ActstoreError
from tests.models.architectures import Architecture, architectures

EXACT = (
    "derive", "recompute", "@attention : keep; @blocks : recompute", "raw @ disk", "recompute(raw @ disk)",
)  # fmt: skip
LOSSY = ("int8", "recompute(int8)")
Outcome = list[Tensor | None]


def trained(each: Architecture, model: nn.Module, policy: str = "") -> tuple[Outcome, float]:
    """Train one step; return what it leaves, and the share of saved bytes that is held under a policy."""
    torch.manual_seed(1)
    if not policy:
        loss, share = each.loss(model), 1.0
        loss.backward()
    else:
        store = ActivationStore(model, policy, min_bytes=0)
        try:
            with store:
                loss = each.loss(model)
            loss.backward()
            report = store.report()
            share = report.held_bytes / max(1, report.saved_bytes)
        finally:
            store.close()
    left = [loss.detach(), *(weight.grad for weight in model.parameters()), *model.buffers()]
    return [*left, torch.get_rng_state()], share


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


def tried(each: Architecture) -> dict[str, str]:
    """Train a model under all policies; return what came of each."""
    first = each.make()
    plain, again, rounded = (copy.deepcopy(first) for _ in range(3))
    wanted, _ = trained(each, plain)
    if not same(trained(each, again)[0], wanted):
        return {"plain": "does not repeat itself"}
    with torch.autocast("cpu", torch.bfloat16):
        each.loss(rounded).backward()
    found = {"bfloat16": f"error {error_of(rounded, plain):.2%}"}
    for policy in (*EXACT, *LOSSY):
        model = copy.deepcopy(first)
        try:
            left, share = trained(each, model, policy)
        except ActstoreError as error:
            found[policy] = f"refused: {str(error).partition('. ')[0]}"
            continue
        if policy in LOSSY:
            found[policy] = f"held {share:.0%}, error {error_of(model, plain):.2%}"
        else:
            found[policy] = f"held {share:.0%}, equal" if same(left, wanted) else "DIFFERS"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, help="keep what came of the models in this file, and go on after those in it"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="these models alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for each in architectures():
        if each.name in found or (options.only and each.name not in options.only):
            continue
        try:
            found[each.name] = tried(each)
        except Exception as error:  # the remaining models run
            found[each.name] = {"plain": f"failed: {type(error).__name__}: {error}".splitlines()[0]}
        print(f"{each.name}: {'; '.join(f'{policy}: {what}' for policy, what in found[each.name].items())}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    kinds = Counter(
        what.split(":")[0].split(", ")[-1].split(" ")[0] for each in found.values() for what in each.values()
    )
    print(f"{len(found)} models: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}")
    return int(kinds["DIFFERS"] > 0)


if __name__ == "__main__":
    sys.exit(main())
