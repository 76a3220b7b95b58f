"""The effect of noise in the payloads of one autograd node on the gradients that the node computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actstore.base.layout import layout_of
from actstore.base.ledger import Account, Ledger
from actstore.base.reaper import Finalizer
from actstore.base.spec import Site
from actstore.kernels.base import storage_slice

BLOCK_NUMEL = 32  # contiguous elements that share one size of noise
CHUNK_NUMELS = {"cpu": 2**15}  # elements in work at once, by device type,
ACCELERATOR_CHUNK_NUMEL = 2**22  # and on an accelerator
MIN_PART_NUMEL = 2**10  # fewest elements of a payload that stand for all of it
NOISE_SEED = 0x5EED
NOISE_NUMEL = 2**16 + 1  # not a power of two, so that rows of tensors do not all get the same numbers
NOISE_STRIDE = 104_729  # a prime
MATMULS = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}  # the attribute of a linear layer's input
CONVOLUTION = "ConvolutionBackward0"
WEIGHT_EDGES = {"AddmmBackward0": 2, "MmBackward0": 1, CONVOLUTION: 1}  # the edge of a layer's weight gradient,
BIAS_EDGES = {"AddmmBackward0": 0, CONVOLUTION: 2}  # and that of a sum of the incoming gradient

# The gradient of a weight is a sum of the incoming gradient, or of that times a factor of unit size.
SUMS = frozenset(
    {
        "AddBackward0", "SubBackward0", "RsubBackward0", "EmbeddingBackward0", "NativeLayerNormBackward0",
        "NativeGroupNormBackward0", "NativeBatchNormBackward0", "BatchNormWithUpdateBackward0",
        "BatchNormNoUpdateBackward0", "CudnnBatchNormBackward0", "FusedRmsNormBackward0",
    }
)  # fmt: skip

# Their output element depends only on the same element of the tensors that they read and are given.
POINTWISE = frozenset(
    {
        "CosBackward0", "DivBackward0", "EluBackward0", "ExpBackward0", "GeluBackward0", "HardsigmoidBackward0",
        "HardswishBackward0", "HardtanhBackward0", "LeakyReluBackward0", "LogBackward0", "LogSigmoidBackward0",
        "MishBackward0", "MulBackward0", "PowBackward0", "ReluBackward0", "RsqrtBackward0", "SigmoidBackward0",
        "SiluBackward0", "SinBackward0", "SoftplusBackward0", "SqrtBackward0", "TanhBackward0", "ThresholdBackward0",
    }
)  # fmt: skip

# Their backward reads no more than signs, which payloads of their results keep.
SIGN_ONLY = frozenset({"ReluBackward0", "LeakyReluBackward1"})

# These may write to their saved tensors unless the graph is retained: `retain_variables` in derivatives.yaml.
OVERWRITING = frozenset(
    {
        "BatchNormWithUpdateBackward0", "BatchNormNoUpdateBackward0", "CudnnBatchNormBackward0", "CudnnRnnBackward0",
        "MiopenRnnBackward0",
    }
)  # fmt: skip


def norm(tensor: Tensor) -> Tensor:
    """Return the 2-norm: a float32 scalar on the tensor's device."""
    double = tensor.dtype is torch.float64  # vector_norm does not narrow float64
    size: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64 if double else torch.float32)
    return size.float()


def book(ledger: Ledger, nbytes: int) -> Finalizer:
    """Hold bytes of the observation on the ledger, without a site, for the lifetime of the result."""
    return ledger.hold(Account(Site("", -1)), 0, 0, nbytes)


class Noise:
    """Standard normal numbers from generators of its own: torch's generators stay untouched.

    They are drawn once for each device, and each tensor repeats them from another offset: a new draw for each tensor
    takes a CPU longer than the whole rest of a prediction.
    """

    NBYTES = 4 * NOISE_NUMEL  # on each device

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._drawn: dict[torch.device, tuple[Tensor, Finalizer]] = {}
        self._at = 0

    def _draw(self, tensor: Tensor) -> Tensor:
        """Return noise of the shape of `tensor`: float32, in memory of its own."""
        if tensor.device not in self._drawn:
            generator = torch.Generator(tensor.device).manual_seed(NOISE_SEED)
            drawn = torch.randn(NOISE_NUMEL, generator=generator, device=tensor.device)
            self._drawn[tensor.device] = drawn, book(self._ledger, self.NBYTES)
        drawn, _ = self._drawn[tensor.device]
        self._at = (self._at + NOISE_STRIDE) % NOISE_NUMEL
        noise = torch.empty(tensor.numel(), device=tensor.device)
        first = min(NOISE_NUMEL - self._at, noise.numel())
        noise[:first] = drawn[self._at : self._at + first]
        whole = (noise.numel() - first) // NOISE_NUMEL * NOISE_NUMEL
        noise[first : first + whole].view(-1, NOISE_NUMEL).copy_(drawn.expand(whole // NOISE_NUMEL, NOISE_NUMEL))
        noise[first + whole :] = drawn[: noise.numel() - first - whole]
        return noise.view(tensor.shape)

    def like(self, tensor: Tensor) -> Tensor:
        """Return noise of the shape and dtype of `tensor`, in memory of its own."""
        made = torch.empty_like(tensor)
        for part in _chunks(made):
            part.copy_(self._draw(part))
        return made

    def perturb(self, tensor: Tensor, relative: Tensor, *, signs: bool = False) -> Tensor:
        """Return `tensor` plus noise: `relative` times the root mean square of each block of 32 elements.

        Parameters
        ----------
        tensor : any shape, a floating dtype
        relative : scalar on the same device
        signs : whether elements stay zero, positive or negative, as in the payload: backward decides by it
        """
        made = torch.empty_like(tensor)
        if made.stride() != tensor.stride():  # `tensor` has gaps
            tensor = made.copy_(tensor)
        for values, part in zip(_chunks(tensor), _chunks(made), strict=True):
            flat = values.float()
            blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
            rms = torch.linalg.vector_norm(blocks, dim=1, keepdim=True) / math.sqrt(BLOCK_NUMEL)
            noise = self._draw(blocks).mul_(rms).mul_(relative).view(-1)[: flat.numel()]
            del blocks
            noise.add_(flat)
            if signs:
                noise.abs_().copysign_(flat).mul_(flat != 0)
            part.copy_(noise)
        return made


def scratch_nbytes(tensor: Tensor) -> int:
    """Return the bytes that `Noise.perturb` and `changes` take beside their results."""
    return 16 * min(tensor.numel(), CHUNK_NUMELS.get(tensor.device.type, ACCELERATOR_CHUNK_NUMEL)) + Noise.NBYTES


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the elements of a tensor in storage order, in 1-d pieces; views for a tensor without gaps."""
    dense = layout_of(tensor.shape, tensor.stride()).dense
    flat = storage_slice(tensor, 0, tensor.numel()) if dense else tensor.reshape(-1)
    pieces: tuple[Tensor, ...] = flat.split(CHUNK_NUMELS.get(tensor.device.type, ACCELERATOR_CHUNK_NUMEL))
    return pieces


@dataclass(frozen=True)
class ElementRange:
    """Run of elements, in storage order, of tensors with one shape and one element order.

    Attributes
    ----------
    begin, count : the run
    numel : number of elements of the whole tensors
    """

    begin: int
    count: int
    numel: int

    @property
    def scale(self) -> float:
        """Norm over all elements, for each unit of the norm over the run."""
        return math.sqrt(self.numel / self.count)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the run of a tensor, as a 1-d view."""
        return storage_slice(tensor, self.begin, self.count)


def saved_count(node: Any) -> int:
    """Return the number of tensors that a node has saved."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    return sum(isinstance(getattr(node, name), Tensor) for name in names)


def part_of(name: str, tensors: Sequence[Tensor], numel: int) -> ElementRange | None:
    """Return a run of at most `numel` elements on which a pointwise node can run; None for other nodes.

    Parameters
    ----------
    tensors : all tensors that the node reads and is given
    """
    first = tensors[0]
    alike = all(x.shape == first.shape and x.stride() == first.stride() for x in tensors)
    if name not in POINTWISE or not alike or not layout_of(first.shape, first.stride()).dense:
        return None
    count = min(first.numel(), numel) // BLOCK_NUMEL * BLOCK_NUMEL
    begin = (first.numel() - count) // 2 // BLOCK_NUMEL * BLOCK_NUMEL
    return ElementRange(begin, count, first.numel()) if count >= MIN_PART_NUMEL else None


def changes(expected: tuple[Tensor | None, ...], found: Any) -> dict[int, Tensor]:
    """Return the norms of the differences of gradients that a node computed twice, by edge.

    The first gradients have been summed to the shapes of the inputs, the second ones have not.
    """
    found = found if isinstance(found, tuple) else (found,)
    sizes = {}
    for k, (was, now) in enumerate(zip(expected, found, strict=True)):
        if was is not None and now is not None:
            now = now.sum_to_size(was.shape)
            alike = now.stride() == was.stride()
            pairs = zip(_chunks(now), _chunks(was), strict=True) if alike else [(now, was)]
            sizes[k] = norm(torch.stack([norm(mine.float() - its.float()) for mine, its in pairs]))
    return sizes


def linear_change(node: Any, x: Tensor, grad: Tensor, relative: Tensor) -> Tensor:
    """Return the change of the gradient x^T grad of a linear layer's weight under `relative` noise in each row of x.

    The rows' errors e_n are independent of each other, so that E |sum_n e_n grad_n^T|^2 = sum_n |e_n|^2 |grad_n|^2.

    Parameters
    ----------
    node : the autograd node, which may have a factor `alpha`
    x : (rows, inputs)
    grad : (rows, outputs)

    Returns
    -------
    Tensor : root of the expected square, a float32 scalar
    """
    sizes = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
    sizes *= torch.linalg.vector_norm(grad, dim=1, dtype=torch.float32)
    return norm(sizes) * relative * scale(node, "alpha")


def convolution_change(node: Any, x: Tensor, grad: Tensor, relative: Tensor) -> Tensor:
    """Return the change of the gradient of a convolution's weight under `relative` noise in each element of x.

    As for `linear_change`: the squares of the errors that come to a tap, summed over the channels of a group, times the
    squares of the gradients there. That is the gradient of a convolution with one channel for each group.

    Parameters
    ----------
    node : the autograd node, not of a transposed convolution
    x : (batch, channels, ...)
    grad : (batch, channels, ...)

    Returns
    -------
    Tensor : root of the expected square, a float32 scalar
    """
    groups = node._saved_groups
    squares = [
        torch.linalg.vector_norm(each.unflatten(1, (groups, -1)), dim=2, dtype=torch.float32).square_()
        for each in (x, grad)
    ]
    taps = node._saved_weight.shape[2:]
    weight = squares[0].new_empty((groups, 1, *taps))
    options = node._saved_stride, node._saved_padding, node._saved_dilation, False, [0] * len(taps), groups
    _, found, _ = torch.ops.aten.convolution_backward(
        squares[1], squares[0], weight, None, *options, [False, True, False]
    )
    root: Tensor = found.clamp_(min=0).sum().sqrt_()
    return root * relative


def is_sum(name: str, edge: int) -> bool:
    """Return whether a weight's gradient at this edge is a sum of the incoming one: white noise keeps its energy."""
    return name in SUMS or edge == BIAS_EDGES.get(name)


def scale(node: Any, name: str) -> float:
    """Return the size of an addmm's factor `alpha` of the product, or `beta` of the addend; 1 for other nodes."""
    return float(abs(getattr(node, f"_saved_{name}", 1)))


def fan_in(node: Any, name: str, edge: int, weight: Tensor) -> Tensor | None:
    """Return the growth of white noise in a layer's incoming gradient on its way to a weight.

    With x the input of a linear or convolutional layer, n its rows or pixels and k the taps of a kernel, the noise's
    energy grows by k |x|^2 / n on its way to the weight, and not at all on its way to the bias.

    Parameters
    ----------
    node : the autograd node, whose saved tensors can still be read
    edge : the edge that the gradient takes
    weight : the gradient that the node has computed there

    Returns
    -------
    Tensor | None : root of that factor, a float32 scalar; None for another edge, or where x was not saved
    """
    if is_sum(name, edge):
        return torch.full((), scale(node, "beta"), dtype=torch.float32, device=weight.device)
    if edge != WEIGHT_EDGES.get(name):
        return None
    if name in MATMULS:
        x = getattr(node, MATMULS[name])
        return None if x is None else norm(x) * (scale(node, "alpha") / math.sqrt(max(1, x.shape[0])))
    if node._saved_transposed:
        return None
    x = node._saved_input
    return norm(x) * math.sqrt(weight[0].numel() / max(1, x.numel()))


def probe(node: Any, noise: Noise, incoming: tuple[Tensor | None, ...], edges: list[int]) -> dict[int, Tensor]:
    """Return the growth of white noise in the first incoming gradient along these edges, as `fan_in`."""
    first = next(k for k, grad in enumerate(incoming) if grad is not None)
    white = [None if grad is None else torch.zeros_like(grad) for grad in incoming]
    white[first] = noise.like(incoming[first])  # type: ignore[arg-type]
    size = norm(white[first])  # type: ignore[arg-type]
    found = node(*white)
    found = found if isinstance(found, tuple) else (found,)
    return {k: norm(found[k]) / size for k in edges if found[k] is not None}
