"""Chains of models from their shapes: transformers, recurrent nets, and chains of equal layers.

Bytes follow from what each operator saves for its backward; times from operations and a share of the machine's best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actstore.plan.hardware import Hardware
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption

STREAMING_SHARE = 0.85  # of the memory's rate: commonly seen for elementwise kernels


@dataclass(frozen=True, slots=True)
class Coder:
    """Codec in the planner's terms: `ratio` of payload to tensor, and `rate`, bytes of tensors encoded or decoded in
    a millisecond."""

    name: str
    ratio: float
    rate: float


def options(
    nbytes: float,
    boundary: float,
    recompute_ms: float,
    coders: Sequence[Coder] = (),
    *,
    host: bool = True,
    disk: bool = False,
) -> tuple[LayerOption, ...]:
    """Return the options of a layer for its activations.

    Parameters
    ----------
    nbytes : bytes that the layer saves
    boundary : bytes of its input alone
    recompute_ms : time to run forward again
    host, disk : whether payloads may go there
    """

    def option(
        decision: str, waiting: float, place: str, forward: float, backward: float, beside: float
    ) -> LayerOption:
        away = place != "device"
        return LayerOption(
            decision,
            0.0 if away else waiting,
            link=waiting if away else 0.0,
            host=waiting if place == "host" else 0.0,
            disk=waiting if place == "disk" else 0.0,
            forward=forward,
            backward=backward,
            forward_peak=nbytes + beside,
            backward_peak=nbytes + beside,
        )

    found = [option("keep", nbytes, "device", 0, 0, 0), option("recompute", boundary, "device", 0, recompute_ms, 0)]
    for coder in coders:
        payload, ms = coder.ratio * nbytes, nbytes / coder.rate
        found.append(option(coder.name, payload, "device", ms, ms, payload))
    for place in [place for place, allowed in (("host", host), ("disk", disk)) if allowed]:
        found.append(option(f"recompute(raw @ {place})", boundary, place, 0, recompute_ms, 0))
        found.append(option(f"raw @ {place}", nbytes, place, 0, 0, 0))
        for coder in coders:
            payload, ms = coder.ratio * nbytes, nbytes / coder.rate
            found.append(option(f"{coder.name} @ {place}", payload, place, ms, ms, payload))
    return tuple(found)


def chosen(chain: LayerChain, decisions: Sequence[str]) -> tuple[int, ...]:
    """Return the choice that gives each layer the option of that decision.

    Raises
    ------
    ValueError : a layer has no such option
    """
    pairs = zip(chain.layers, decisions, strict=True)
    return tuple([option.decision for option in layer.options].index(decision) for layer, decision in pairs)


def equal(count: int, forward: float, backward: float, ways: tuple[LayerOption, ...], hardware: Hardware) -> LayerChain:
    """Return a chain of `count` equal layers."""
    layers = tuple(Layer(f"layers.{i}", forward, backward, ways) for i in range(count))
    return LayerChain(layers, hardware.links)


@dataclass(frozen=True, slots=True)
class Block:
    """GPT layer in 16-bit precision, dropout included, after Korthikanti et al. 2022 (arXiv 2205.05198), section 4.

    Attributes
    ----------
    hidden, heads, sequence, batch : h, a, s, b
    tensor_parallel : t, the number of devices that share the layer
    sequence_parallel : whether they share what tensor parallelism leaves whole, too
    """

    hidden: int
    heads: int
    sequence: int
    batch: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False

    @property
    def saved(self) -> dict[str, tuple[float, bool, bool]]:
        """Return (bytes in all, shared by tensor parallelism, in the core of attention) of each saved tensor."""
        sbh = float(self.sequence * self.batch * self.hidden)
        scores = float(self.heads * self.sequence**2 * self.batch)
        return {
            "first norm's input": (2 * sbh, False, False),
            "input of query, key and value": (2 * sbh, False, False),
            "query and key": (4 * sbh, True, False),
            "softmax": (2 * scores, True, True),
            "mask of its dropout": (scores, True, True),
            "its dropout": (2 * scores, True, True),
            "value": (2 * sbh, True, False),
            "projection's input": (2 * sbh, True, False),
            "mask of attention's dropout": (sbh, False, False),
            "second norm's input": (2 * sbh, False, False),
            "MLP's input": (2 * sbh, False, False),
            "GELU's input": (8 * sbh, True, False),
            "second linear's input": (8 * sbh, True, False),
            "mask of the MLP's dropout": (sbh, False, False),
        }

    def nbytes(self, *, core: bool = True) -> float:
        """Return the bytes that one device saves; `core` includes what selective recomputation drops."""
        return sum(
            nbytes / (self.tensor_parallel if shared or self.sequence_parallel else 1)
            for nbytes, shared, in_core in self.saved.values()
            if core or not in_core
        )

    @property
    def boundary(self) -> float:
        """Bytes of the layer's input on one device."""
        share = self.tensor_parallel if self.sequence_parallel else 1
        return 2.0 * self.sequence * self.batch * self.hidden / share

    def flops(self, causal: bool = False) -> float:
        """Return the operations of forward on one device; with `causal` kernels skip what is masked."""
        tokens = float(self.sequence * self.batch)
        attention = 4.0 * self.sequence * self.hidden * (0.5 if causal else 1.0)
        return tokens * (24.0 * self.hidden**2 + attention) / self.tensor_parallel

    def core_ms(self, hardware: Hardware, mfu: float) -> float:
        """Return the forward time of attention's core: four kernels, each bound by its operations or its bytes."""
        scores = self.heads * self.sequence**2 * self.batch / self.tensor_parallel
        product = 2.0 * self.batch * self.sequence**2 * self.hidden / self.tensor_parallel
        kernels = (product, 2 * scores), (0.0, 4 * scores), (0.0, 5 * scores), (product, 2 * scores)
        rate, streaming = hardware.flops * mfu, hardware.memory_rate * STREAMING_SHARE
        return sum(max(flops / rate, nbytes / streaming) for flops, nbytes in kernels)


def transformer(
    block: Block, count: int, hardware: Hardware, mfu: float, coders: Sequence[Coder] = (), *, disk: bool = False
) -> LayerChain:
    """Return a chain of `count` blocks with flash attention, which keeps no scores; backward takes twice as long.

    Parameters
    ----------
    mfu : part of the hardware's operations that compute reaches
    disk : whether payloads may go to a disk
    """
    ms = block.flops() / (hardware.flops * mfu)
    ways = options(block.nbytes(core=False), block.boundary, ms, coders, disk=disk)
    return equal(count, ms, 2 * ms, ways, hardware)


def recurrent(steps: int, hidden: int, batch: int, hardware: Hardware, mfu: float) -> LayerChain:
    """Return an LSTM in float32 over `steps` steps, each a layer: it saves four gates, two cell states, its output."""
    ms = 16.0 * batch * hidden**2 / (hardware.flops * mfu)
    ways = options(28.0 * batch * hidden, 8.0 * batch * hidden, ms)
    return equal(steps, ms, 2 * ms, ways, hardware)
