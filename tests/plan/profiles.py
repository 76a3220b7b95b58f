"""Profiles made up for tests: a GPT on a GPU, 100 MiB of activations in each block."""

from __future__ import annotations

from dataclasses import replace

from actstore.plan.decisions import KEEP
from actstore.plan.profile import Memory, Profile, Unit, UnitBytes, UnitFigures
from actstore.plan.solver.chain import Links

MIB = 2**20
MACHINE = {"device": "a GPU", "threads": "8", "torch": "2.11", "actstore": "0.1.0"}
SAVED = {"": 10 * MIB, "attn": 40 * MIB, "mlp": 50 * MIB}


def block_figures() -> dict[str, UnitFigures]:
    """Of a block: keep, both recomputations, a codec, and host memory."""

    def parts(**held: int) -> dict[str, UnitBytes]:
        return {name: UnitBytes(nbytes, held.get(name or "own", nbytes)) for name, nbytes in SAVED.items()}

    moved = {name: UnitBytes(nbytes, 0, nbytes) for name, nbytes in SAVED.items()}
    coded = {name: UnitBytes(nbytes, nbytes // 4) for name, nbytes in SAVED.items()}
    return {
        KEEP: UnitFigures(KEEP, 10.0, 20.0, parts()),
        "recompute": UnitFigures(
            "recompute", 10.0, 30.0, parts(own=5 * MIB, attn=0, mlp=0), 95 * MIB, work_backward=10.0
        ),
        "mlp : recompute": UnitFigures("mlp : recompute", 10.0, 24.0, parts(mlp=5 * MIB), 45 * MIB, work_backward=4.0),
        "raw @ host": UnitFigures("raw @ host", 10.5, 20.5, moved, 0, work_forward=0.5, work_backward=0.5),
        "int8": UnitFigures("int8", 11.0, 21.0, coded, 0, 1e-4, work_forward=1.0, work_backward=1.0),
    }


def profile(layers: int = 12, *, memory: Memory | None = None, logits: int = 20 * MIB) -> Profile:
    """An embedding, `layers` blocks, a head, and what the loss saves."""
    noise = {"": 0.5, "attn": 2.0, "mlp": 4.0}
    block = [Unit(f"blocks.{i}", "Block", 1, ("attn", "mlp"), recomputable=True, noise=noise) for i in range(layers)]
    units = (Unit("wte", "wte", 1, (), recomputable=False), *block, Unit("head", "head", 1, (), recomputable=False))
    small = {"": UnitBytes(MIB, MIB)}
    return Profile(
        (*units, Unit("", "whole", 1, (), recomputable=False)),
        {
            "wte": {KEEP: UnitFigures(KEEP, 0.1, 0.1, small)},
            "Block": block_figures(),
            "head": {KEEP: UnitFigures(KEEP, 1.0, 2.0, small)},
            "whole": {KEEP: UnitFigures(KEEP, 0.0, 0.0, {"": UnitBytes(logits, logits)})},
        },
        Links(out=2 * MIB, back=2.5 * MIB),
        6.7,
        memory or Memory(100 * MIB, 100 * MIB, 200 * MIB, MIB),
        "0123456789abcdef",
        dict(MACHINE),
        20,
    )


def on_host(layers: int = 4) -> Profile:
    """The same on a CPU, where nothing moves to host memory, and whose links have no limit."""
    made = profile(layers)
    del made.figures["Block"]["raw @ host"]
    return replace(made, links=Links(on_host=True))
