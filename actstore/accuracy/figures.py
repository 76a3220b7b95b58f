"""Figures of what a lossy payload loses.

With ``x`` what was encoded, ``y`` what comes back and ``e = y - x``, all sums over the elements where both are finite:

* ``relative = sqrt(sum(e**2) / sum(x**2))``;
* ``gain = sum(y * x) / sum(x**2)``: the part of ``x`` that is left. Rounding whose errors do not depend on ``x`` has 1;
  the shrinkage that least squares explain, as of a codec that drops small elements, is ``1 - relative**2``;
* ``gain_noise = sqrt(sum((e * x)**2)) / sum(x**2)``: the standard error of ``gain`` if errors are independent;
* ``bias = mean(e) / rms(x)`` and ``largest = max(abs(e)) / rms(x)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt

import torch
from torch import Tensor

from actstore.base.layout import layout_of
from actstore.kernels.base import storage_slice

MOST_ELEMENTS = 2**20  # of one payload that are measured,
BLOCKS = 64  # in so many runs, evenly spaced, where it has more
RUN = MOST_ELEMENTS // BLOCKS
RUNS_AT_ONCE = {"cpu": 1}  # that are worked on, so that they stay in the cache and take little memory,
RUNS = 16  # and on an accelerator
FAINT = 2.0**-100  # as good as zero: a payload whose elements are all smaller may vanish. int8's scales do below 1e-33
CLIPPED = 2.0  # times what came back at most: int2 may round the largest element of a group to half of it
ROW = 10  # figures of one payload
SCRATCH = 8  # float32 numbers for each element that is worked on

# A gain is far from 1 where it is off by more than this, beyond what least squares and chance explain.
GAIN_OFF = 0.02
LEAST_SQUARES = 1.5  # times relative**2
CHANCE = 4.0  # times gain_noise


@torch.no_grad()
def measure(x: Tensor, back: Tensor) -> Tensor:
    """Compare what came back of a payload with what was encoded. Nobody waits for the device.

    Parameters
    ----------
    x, back : Tensor, float16, bfloat16 or float32, one shape, any strides. Of more than 2**20 elements, 64 evenly
        spaced runs of 2**14 in storage order are measured

    Returns
    -------
    Tensor of ROW float64 on their device, for `Total.add`: the elements where both are finite; those of `x` that are
        not; those that are lost (see `ErrorFigures`); a scale s, the largest finite magnitude of both; with
        ``x / s`` and ``e / s`` the sums of x x, e x, e e, e and (e x)(e x); and the largest e
    """
    xs, ys = (_sample(flat) for flat in _flattened(x, back))
    chunks = list(zip(xs, ys, strict=True))
    largest = [torch.stack([_finite_max(part) for part in pair]) for pair in chunks]
    most = torch.stack(largest).amax(0) if largest else torch.zeros(2, device=x.device)
    scale = most.amax()
    divisor = torch.where(scale > 0, scale, 1.0)
    clipped = torch.where(scale > FAINT, CLIPPED * (most[1] / divisor), torch.inf)
    row = torch.zeros(ROW, dtype=torch.float64, device=x.device)
    for pair in chunks:
        sums, worst = _sums(*pair, divisor, clipped)
        row[:9] += sums
        row[9] = torch.maximum(row[9], worst)
    row[3] = scale
    return row


def scratch_nbytes(x: Tensor) -> int:
    """Bytes that `measure` needs beside its arguments, at most, where these are dense."""
    return 4 * SCRATCH * min(x.numel(), RUN * _at_once(x))


def _flattened(x: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Both as 1-d tensors, one order of elements; views where they are dense."""
    if x.stride() == back.stride() and layout_of(x.shape, x.stride()).dense:
        return storage_slice(x, 0, x.numel()), storage_slice(back, 0, back.numel())
    return x.detach().reshape(-1), back.detach().reshape(-1)


def _at_once(tensor: Tensor) -> int:
    return RUNS_AT_ONCE.get(tensor.device.type, RUNS)


def _sample(flat: Tensor) -> tuple[Tensor, ...]:
    """Return the runs of a 1-d tensor that are measured, as views, one piece of work each."""
    if not flat.numel():
        return ()
    if flat.numel() <= MOST_ELEMENTS:
        return flat.split(RUN * _at_once(flat))  # type: ignore[no-any-return]
    space = (flat.numel() - RUN) // (BLOCKS - 1)
    return flat.as_strided((BLOCKS, RUN), (space, 1), flat.storage_offset()).split(_at_once(flat))  # type: ignore[no-any-return]


def _finite_max(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, 0).abs().amax().float()


def _sums(x: Tensor, y: Tensor, divisor: Tensor, clipped: Tensor) -> tuple[Tensor, Tensor]:
    """What a row has of some elements, but for the largest e, which follows."""
    good_x, good_y = torch.isfinite(x), torch.isfinite(y)
    both = good_x & good_y
    x = torch.where(both, x, 0).float() / divisor
    e = torch.where(both, y, 0).float() / divisor - x
    ex = e * x
    whole = torch.count_nonzero
    lost = whole(good_x != good_y) + whole(x.abs() > clipped)
    sums = (whole(both), whole(~good_x), lost, both.new_zeros((), dtype=torch.int64))
    parts = (x.square().sum(), ex.sum(), e.square().sum(), e.sum(), ex.square().sum())
    return torch.stack([part.double() for part in (*sums, *parts)]), e.abs().amax().double()


@dataclass(frozen=True)
class ErrorFigures:
    """What the payloads of one site lost in one step. NaN, Inf and what is lost are left out of the relative figures.

    Attributes
    ----------
    step : number of the step that was measured, from 1
    decision : what it was stored by, as policy text
    payloads : lossy payloads of the step
    measured : those of them that were measured; for the others there was no room. With 0 the figures are NaN
    nbytes : of the tensors that were measured
    relative : relative L2 error: 0.01 is 1 %; inf where zeros came back as something else
    gain : how much of the values is left: 1 where nothing shrinks
    gain_noise : the standard error of `gain` if the errors of elements are independent
    bias : mean error, as a part of the root mean square of the values
    largest : largest error of an element, likewise
    nonfinite : elements that were NaN or Inf before
    lost : elements that are no longer what they were: finite ones that came back as NaN or Inf; NaN and Inf that came
        back as numbers; and finite ones of more than twice the magnitude of all that came back of their payload: the
        codec clipped them, or let them vanish; not where the payload has none above 2**-100, which is as good as zero
    """

    step: int
    decision: str
    payloads: int
    measured: int
    nbytes: int
    relative: float
    gain: float
    gain_noise: float
    bias: float
    largest: float
    nonfinite: int
    lost: int

    @property
    def shrunk(self) -> bool:
        """Whether `gain` is farther from 1 than rounding, dropping small elements and chance explain."""
        return abs(1 - self.gain) > GAIN_OFF + LEAST_SQUARES * self.relative**2 + CHANCE * self.gain_noise

    def __str__(self) -> str:
        if not self.measured:
            return f"not measured: no room for any of {self.payloads} payloads"
        percent = format_error(self.relative)
        text = f"{percent}, gain {self.gain:.3f}, bias {self.bias:.1e}, largest {self.largest:.2g} rms"
        counts = [(self.nonfinite, "not finite"), (self.lost, "lost")]
        text += "".join(f", {count} elements {what}" for count, what in counts if count)
        missing = self.payloads - self.measured
        return f"{text}, {missing} of {self.payloads} payloads not measured" if missing else text


def format_error(relative: float) -> str:
    """A relative error in per cent, with two digits that mean something."""
    return f"{100 * relative:.{1 if relative >= 0.001 else 2}f} %" if relative >= 1e-4 else f"{100 * relative:.1e} %"


class Total:
    """Rows of `measure`, added up."""

    __slots__ = ("_ee", "_ex", "_exex", "_largest", "_n", "_sum", "_xx", "lost", "nonfinite")

    def __init__(self) -> None:
        self._n = self.nonfinite = self.lost = 0
        self._xx = self._ex = self._ee = self._sum = self._exex = self._largest = 0.0

    def add(self, row: Sequence[float]) -> None:
        """Add a row of `measure`, on the host."""
        n, nonfinite, lost, scale, xx, ex, ee, e, exex, largest = row
        self._n += int(n)
        self.nonfinite += int(nonfinite)
        self.lost += int(lost)
        square = scale * scale
        self._xx += square * xx
        self._ex += square * ex
        self._ee += square * ee
        self._sum += scale * e
        self._exex += square * square * exex
        self._largest = max(self._largest, scale * largest)

    @property
    def relative(self) -> float:
        """The relative L2 error."""
        return sqrt(_ratio(self._ee, self._xx))

    def figures(self, step: int, decision: str, payloads: int, measured: int, nbytes: int) -> ErrorFigures:
        """As figures of so many payloads."""
        unknown = 0.0 if measured else nan
        rms = sqrt(self._xx / self._n) if self._n else 0.0
        return ErrorFigures(
            step=step,
            decision=decision,
            payloads=payloads,
            measured=measured,
            nbytes=nbytes,
            relative=self.relative + unknown,
            gain=1.0 + _ratio(self._ex, self._xx) + unknown,
            gain_noise=_ratio(sqrt(self._exex), self._xx) + unknown,
            bias=_ratio(self._sum / self._n if self._n else 0.0, rms) + unknown,
            largest=_ratio(self._largest, rms) + unknown,
            nonfinite=self.nonfinite,
            lost=self.lost,
        )


def _ratio(part: float, whole: float) -> float:
    """Nothing of nothing is nothing."""
    if whole:
        return part / whole
    return 0.0 if not part else inf if part > 0 else -inf
