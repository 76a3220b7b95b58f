"""Figures of the error of lossy payloads.

With ``x`` the encoded values, ``y`` the decoded ones and ``e = y - x``, all sums over elements where both are finite:

* ``relative = sqrt(sum(e**2) / sum(x**2))``;
* ``gain = sum(y * x) / sum(x**2)``: the part of ``x`` that is left. It is 1 for rounding whose errors do not depend on
  ``x``, and ``1 - relative**2`` for shrinkage as of a least-squares fit, such as by a codec that drops small elements;
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

MEASURED_NUMEL = 2**20  # most elements of a payload that are measured,
MEASURED_RUNS = 64  # evenly spaced runs of a larger payload
RUN_NUMEL = MEASURED_NUMEL // MEASURED_RUNS
RUNS_AT_ONCE = {"cpu": 1}  # by device type: few, to stay in the cache and take little memory,
ACCELERATOR_RUNS_AT_ONCE = 16  # and on an accelerator
FAINT_MAGNITUDE = 2.0**-100  # a payload with only smaller elements may vanish, as in int8's scales below 1e-33
CLIP_FACTOR = 2.0  # of the largest decoded element: int2 may round the largest element of a group to half of it
ROW_NUMEL = 10  # figures of one payload
SCRATCH_FLOATS = 8  # float32 numbers for each element in work

# A gain is far from 1 where it is off by more than this, beyond the parts of least squares and of chance.
GAIN_TOLERANCE = 0.02
LEAST_SQUARES_FACTOR = 1.5  # times relative**2
CHANCE_SIGMAS = 4.0  # times gain_noise


@torch.no_grad()
def measure(x: Tensor, back: Tensor) -> Tensor:
    """Compare a decoded payload with its source. The host does not wait for the device.

    Parameters
    ----------
    x, back : Tensor, float16, bfloat16 or float32, one shape, any strides. Of more than 2**20 elements, 64 evenly
        spaced runs of 2**14 in storage order are measured

    Returns
    -------
    Tensor of ROW_NUMEL float64 on their device, for `Total.add`: the number of elements where both are finite; of
        those of `x` that are not; of those that are lost (see `ErrorFigures`); a scale s, the largest finite magnitude
        of both; with ``x / s`` and ``e / s`` the sums of x x, e x, e e, e and (e x)(e x); and the largest e
    """
    xs, ys = (_sample(flat) for flat in _flattened(x, back))
    chunks = list(zip(xs, ys, strict=True))
    found = [_largest(*pair) for pair in chunks]
    most = torch.stack([each for each, _ in found]).amax(0) if found else torch.zeros(2, device=x.device)
    scale = most.amax()
    divisor = torch.where(scale > 0, scale, 1.0)
    clipped = torch.where(scale > FAINT_MAGNITUDE, CLIP_FACTOR * (most[1] / divisor), torch.inf)
    row = torch.zeros(ROW_NUMEL, dtype=torch.float64, device=x.device)
    for pair, (_, finite) in zip(chunks, found, strict=True):
        sums, worst = _sums(*pair, divisor, clipped, finite=finite)
        row[:9] += sums
        row[9] = torch.maximum(row[9], worst)
    row[3] = scale
    return row


def scratch_nbytes(x: Tensor) -> int:
    """Return the peak memory of `measure`, without its arguments, where these are dense."""
    return 4 * SCRATCH_FLOATS * min(x.numel(), RUN_NUMEL * _at_once(x))


def _flattened(x: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as 1-d tensors in the same element order; views where they are dense."""
    if x.stride() == back.stride() and layout_of(x.shape, x.stride()).dense:
        return storage_slice(x, 0, x.numel()), storage_slice(back, 0, back.numel())
    return x.detach().reshape(-1), back.detach().reshape(-1)


def _at_once(tensor: Tensor) -> int:
    return RUNS_AT_ONCE.get(tensor.device.type, ACCELERATOR_RUNS_AT_ONCE)


def _sample(flat: Tensor) -> tuple[Tensor, ...]:
    """Return the measured runs of a 1-d tensor, as views, one for each piece of work."""
    if not flat.numel():
        return ()
    if flat.numel() <= MEASURED_NUMEL:
        return flat.split(RUN_NUMEL * _at_once(flat))  # type: ignore[no-any-return]
    space = (flat.numel() - RUN_NUMEL) // (MEASURED_RUNS - 1)
    return flat.as_strided((MEASURED_RUNS, RUN_NUMEL), (space, 1), flat.storage_offset()).split(_at_once(flat))  # type: ignore[no-any-return]


def _largest(x: Tensor, y: Tensor) -> tuple[Tensor, bool]:
    """Return the largest finite magnitudes of two samples, and whether all elements are known to be finite."""
    if x.is_cpu:  # elsewhere the host would wait
        found = torch.stack([x.abs().amax().float(), y.abs().amax().float()])
        if found.isfinite().all():
            return found, True
    return torch.stack([_finite_max(x), _finite_max(y)]), False


def _finite_max(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, 0).abs().amax().float()


def _sums(x: Tensor, y: Tensor, divisor: Tensor, clipped: Tensor, *, finite: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of a row over some elements, and their largest e. `finite` says that all elements are."""
    whole, zero = torch.count_nonzero, x.new_zeros((), dtype=torch.int64)
    good, bad, unlike = zero + x.numel(), zero, zero
    if not finite:
        good_x, good_y = torch.isfinite(x), torch.isfinite(y)
        both = good_x & good_y
        good, bad, unlike = whole(both), whole(~good_x), whole(good_x != good_y)
        x, y = torch.where(both, x, 0), torch.where(both, y, 0)
    x = x.float() / divisor
    e = y.float() / divisor - x
    ex = e * x
    sums = (good, bad, unlike + whole(x.abs() > clipped), zero)
    parts = (x.square().sum(), ex.sum(), e.square().sum(), e.sum(), ex.square().sum())
    return torch.stack([part.double() for part in (*sums, *parts)]), e.abs().amax().double()


@dataclass(frozen=True)
class ErrorFigures:
    """Errors of one site's payloads in one step. The relative figures leave out NaN, Inf and lost elements.

    Attributes
    ----------
    step : number of the measured step, from 1
    decision : decision of the payloads, as policy text
    payloads : number of lossy payloads of the step
    measured : number of these that were measured; the rest found no room. With 0 the figures are NaN
    nbytes : bytes of the measured tensors
    relative : relative L2 error: 0.01 is 1 %; inf where zeros came back as other values
    gain : the part of the values that is left: 1 where nothing shrinks
    gain_noise : the standard error of `gain` if the errors of elements are independent
    bias : mean error, as a fraction of the root mean square of the values
    largest : largest error of an element, as the same fraction
    nonfinite : number of elements that were NaN or Inf before
    lost : number of elements that lost their value: finite ones that came back as NaN or Inf; NaN and Inf that came
        back as numbers; and finite ones of more than twice the largest decoded magnitude of their payload, which the
        codec clipped or let vanish. The last kind does not count in a payload without elements above 2**-100
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
        """True where `gain` is farther from 1 than rounding, dropped small elements and chance explain."""
        explained = LEAST_SQUARES_FACTOR * self.relative**2 + CHANCE_SIGMAS * self.gain_noise
        return abs(1 - self.gain) > GAIN_TOLERANCE + explained

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
    """Format a relative error in per cent, with two significant digits."""
    return f"{100 * relative:.{1 if relative >= 0.001 else 2}f} %" if relative >= 1e-4 else f"{100 * relative:.1e} %"


class Total:
    """Sum of rows of `measure`."""

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
        """Relative L2 error."""
        return sqrt(_ratio(self._ee, self._xx))

    def figures(self, step: int, decision: str, payloads: int, measured: int, nbytes: int) -> ErrorFigures:
        """Return the figures of `measured` out of `payloads`."""
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
    """Return `part` divided by `whole`; 0 by 0 gives 0."""
    if whole:
        return part / whole
    return 0.0 if not part else inf if part > 0 else -inf
