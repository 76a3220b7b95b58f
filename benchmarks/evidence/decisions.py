"""Gradient errors where backward decides by saved floats, and what keeping signs costs: a minute on one core.

``python -m benchmarks.evidence.decisions`` prints two Markdown tables.

1. The relative error of all gradients, and the bytes held, of networks whose activations decide (ReLU and its kin) or
   do not (GELU): eight 3x3 convolutions with BatchNorm and one activation, batch 32 of 32 x 32, and the benchmark's
   ResNet; under policies as they are and with ``signs=round``, which lets small values fall to zero.
2. The time of encoding 8 MiB of float32 behind ReLU with signs kept beside that without, in pairs whose order changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actstore import ActivationStore
from actstore.base.spec import Spec
from actstore.bench import workloads
from actstore.bench.workloads.job import fix_seed
from actstore.policy import Encode, parse_decision
from benchmarks.markdown import table

ACTIVATIONS = (
    nn.GELU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.ELU, nn.SELU, nn.Softshrink
)  # fmt: skip
CODECS = ("int8", "int8(affine)", "fp8", "int6", "int4", "nf4")
SPEED = ("int8", "int8(axis=token)", "int8(affine)", "fp8", "int6", "int4", "nf4", "e5m6")
STEPS = 2  # the second follows what the first has learned of each site


def convolutions(activation: Callable[[], nn.Module]) -> nn.Module:
    """Eight of them, each with BatchNorm and an activation."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(8):
        layers += [nn.Conv2d(3 if index == 0 else 32, 32, 3, padding=1), nn.BatchNorm2d(32), activation()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def subjects() -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], Tensor]]]:
    """Name, model, and the loss of it."""
    torch.manual_seed(1)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    for activation in ACTIVATIONS:
        yield activation.__name__, convolutions(activation), lambda model: F.cross_entropy(model(x), y)
    fix_seed(0)
    job = workloads.make(workloads.sized("resnet"))
    yield "ResNet of the benchmark", job.model, lambda model: job.loss(*job.batch(0))


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor], policy: str) -> tuple[list[Tensor], int]:
    """Those of all parameters, and the bytes that the store held for them."""
    store = ActivationStore(model, policy)
    for _ in range(STEPS):
        model.zero_grad()
        with store:
            value = loss(model)
        value.backward()
    held = store.report().held_bytes
    store.close()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], held


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Relative, of all together."""
    off = sum(float((a - b).pow(2).sum()) for a, b in zip(found, exact, strict=True))
    return (off / sum(float(b.pow(2).sum()) for b in exact)) ** 0.5


def errors() -> str:
    rows = []
    for name, model, loss in subjects():
        exact, _ = gradients(model, loss, "keep")
        row = [name]
        for codec in CODECS:
            plain = codec[:-1] + ", signs=round)" if codec.endswith(")") else f"{codec}(signs=round)"
            (kept, held), (rounded, before) = (gradients(model, loss, policy) for policy in (codec, plain))
            row.append(f"{error(rounded, exact):.2%} -> {error(kept, exact):.2%}, bytes {held / before:.3f}")
        rows.append(row)
    return "\n".join(table(["network", *CODECS], rows))


def speed(pairs: int) -> str:
    x = torch.randn(2 << 20).relu().view(1024, 2048)
    rows = []
    for text in SPEED:
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
        rows.append([text, f"{x.nbytes / median(times[False]) / 1e9:.2f}", f"{1 / ratio:.3f}"])
    return "\n".join(table(["codec", "GB/s with signs=round", "speed with signs kept, of that"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=50, help="of encodings that are timed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(errors(), end="\n\n")
    print(speed(given.pairs))


if __name__ == "__main__":
    main()
