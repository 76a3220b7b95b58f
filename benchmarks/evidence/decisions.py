"""Gradient errors where saved floats decide in backward, and the cost of kept decisions: three minutes on one core.

``python -m benchmarks.evidence.decisions`` prints Markdown tables, and writes ``decisions.json`` into the folder of
this machine's results. Gradients are those of the first weights in float32.

1. The relative error of all gradients, and the bytes held, of networks whose activations decide (such as ReLU) or
   do not (GELU): eight 3x3 convolutions with BatchNorm and one activation, batch 32 of 32 x 32, and the benchmark's
   ResNet; under policies as they are and with ``signs=round``, which lets small values fall to zero.
2. The same networks with every block recomputed from lossy inputs: decisions made anew, and repeated.
3. A mixture of experts in the same way, and the tokens whose second run goes to other experts than the first.
4. The time of encoding 8 MiB of float32 after ReLU with signs kept beside that without, in pairs whose order changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actstore import ActivationStore
from actstore.base.spec import Spec
from actstore.bench import workloads
from actstore.bench.environment import environment
from actstore.bench.workloads.job import fix_seed
from actstore.errors import StateError
from actstore.policy import Encode, parse_decision
from actstore.session.activation_store import MIN_NBYTES
from benchmarks import machine
from benchmarks.evidence.experts import MixtureGPT, Router
from benchmarks.evidence.tasks import TASKS
from benchmarks.markdown import table

Row = dict[str, Any]

ACTIVATIONS = (
    nn.GELU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.ELU, nn.SELU,
    nn.CELU, nn.Softshrink,
)  # fmt: skip
CODECS = ("int8", "int8(affine)", "fp8", "int6", "int4", "nf4")
TIMED_CODECS = ("int8", "int8(axis=token)", "int8(affine)", "fp8", "int6", "int4", "nf4", "e5m6")
INPUT_CODECS = ("int8", "int4")  # of recomputed blocks
STEPS = 2  # the second uses what the first learned of each site


class Convolutions(nn.Module):
    """Eight convolutions, each with BatchNorm and an activation."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32 if index else 3, 32, 3, padding=1), nn.BatchNorm2d(32), activation())
            for index in range(8)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def subjects() -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], Tensor]]]:
    """Yield the name, the model, and its loss function."""
    torch.manual_seed(1)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    for activation in ACTIVATIONS:
        yield activation.__name__, Convolutions(activation), lambda model: F.cross_entropy(model(x), y)
    fix_seed(0)
    job = workloads.make(workloads.sized("resnet"))
    yield "ResNet of the benchmark", job.model, lambda model: job.loss(*job.batch(0))


def gradients(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], policy: str, min_bytes: int = MIN_NBYTES
) -> tuple[list[Tensor], int]:
    """Return the gradients of all parameters, and the bytes that the store held for them."""
    store = ActivationStore(model, policy, min_bytes=min_bytes)
    for _ in range(STEPS):
        model.zero_grad()
        with store:
            value = loss(model)
        value.backward()
    held = store.report().held_bytes
    store.close()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], held


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Return the relative error over all gradients."""
    off = sum(float((a - b).pow(2).sum()) for a, b in zip(found, exact, strict=True))
    return (off / sum(float(b.pow(2).sum()) for b in exact)) ** 0.5


def errors() -> list[Row]:
    rows = []
    for name, model, loss in subjects():
        exact, _ = gradients(model, loss, "keep")
        for codec in CODECS:
            plain = codec[:-1] + ", signs=round)" if codec.endswith(")") else f"{codec}(signs=round)"
            (kept, held), (rounded, before) = (gradients(model, loss, policy) for policy in (codec, plain))
            row = {"network": name, "codec": codec, "rounded": error(rounded, exact), "kept": error(kept, exact)}
            rows.append(row | {"bytes": held / before})
    return rows


def recomputed() -> list[Row]:
    rows = []
    for name, model, loss in subjects():
        exact, _ = gradients(model, loss, "keep")
        for codec in INPUT_CODECS:
            (anew, less), (kept, held) = (
                gradients(model, loss, f"recompute({codec}{rule})") for rule in (", decisions=anew", "")
            )
            row = {"network": name, "codec": codec, "anew": error(anew, exact), "repeated": error(kept, exact)}
            rows.append(row | {"bytes": held / less})
    return rows


class Mixture:
    """A mixture of experts with one batch, which records the experts of each token in each run."""

    def __init__(self, every: bool) -> None:
        task = TASKS["moe"]
        fix_seed(0)
        self.model = MixtureGPT(task.work, every)
        self.batch = task.data(task.work).draw(0, 0)
        self.chosen: dict[nn.Module, list[Tensor]] = {}
        for module in self.model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._see)
        self.exact = self.gradients("keep")

    def _see(self, router: nn.Module, _: object, out: tuple[Tensor, Tensor]) -> None:
        self.chosen.setdefault(router, []).append(out[1])

    def gradients(self, policy: str) -> list[Tensor]:
        self.chosen.clear()
        return gradients(self.model, lambda model: model(*self.batch), policy, min_bytes=0)[0]

    def under(self, policy: str) -> Row:
        """Return the error, and the tokens that took other experts where the last step ran blocks a second time."""
        try:
            found: Row = {"error": error(self.gradients(policy), self.exact)}
        except StateError:
            return {"error": None}
        runs = [seen[-2:] for seen in self.chosen.values() if len(seen) == 2 * STEPS]
        moved = sum(int((first != second).any(-1).sum()) for first, second in runs)
        return found | ({"rerouted": moved, "tokens": sum(len(first) for first, _ in runs)} if runs else {})


def routed() -> list[Row]:
    rows = []
    for name, every in (("the tokens that chose it", False), ("all tokens, weighted", True)):
        mixture = Mixture(every)
        for codec in INPUT_CODECS:
            policies = {"once": codec, "anew": f"recompute({codec}, decisions=anew)", "repeated": f"recompute({codec})"}
            runs = {kind: mixture.under(policy) for kind, policy in policies.items()}
            rows.append({"each expert computes": name, "codec": codec, **runs})
    return rows


def speed(pairs: int) -> list[Row]:
    x = torch.randn(2 << 20).relu().view(1024, 2048)
    rows = []
    for text in TIMED_CODECS:
        decision = parse_decision(text)
        assert isinstance(decision, Encode)
        plain, kept = decision.codec, decision.codec.keeping_signs
        assert kept is not None
        payload = torch.empty(plain.size(Spec.of(x)).nbytes, dtype=torch.uint8)
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(-2, pairs):  # the first two compile
            for keep in (False, True) if number % 2 else (True, False):
                begin = perf_counter()
                (kept if keep else plain).encode(x, payload)
                if number >= 0:
                    times[keep].append(perf_counter() - begin)
        ratio = median(a / b for a, b in zip(times[True], times[False], strict=True))
        gbps = x.nbytes / median(times[False]) / 1e9
        rows.append({"codec": text, "gbps_rounded": gbps, "speed_of_rounded": 1 / ratio})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=50, help="of encodings that are timed")
    parser.add_argument("--json", type=Path, help="write the figures to this file, not to that of this machine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    made = {"errors": errors, "recomputed": recomputed, "routed": routed, "speed": lambda: speed(given.pairs)}
    found: dict[str, Any] = {"environment": environment()}
    for name, rows in made.items():
        found[name] = rows()
        print(
            "\n".join(table(list(found[name][0]), [list(map(shown, row.values())) for row in found[name]])),
            end="\n\n",
            flush=True,
        )
    machine.write(given.json or machine.RESULTS / machine.name_of(found["environment"]) / "decisions.json", found)


def shown(value: Any) -> str:
    """Return a cell of a printed table."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
