"""Trials: the size and error of each payload under every candidate codec. They do not change gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from actstore.accuracy.bits.payloads import Candidate, Sensitivity, SitePayload
from actstore.base.spec import Site, Spec
from actstore.codecs import Codec, Raw
from actstore.codecs.base import Exact, Size
from actstore.errors import ConfigError, StateError
from actstore.policy import Decision, Encode, Keep, parse_decision
from actstore.policy.encoded import encode

GROUP_NUMELS = (32, 64, 128, 256)  # elements that share a scale
UNBIASED = (
    "keep",
    "int8(affine, round=dither)",
    *(f"int{bits}(group={group}, round=dither)" for bits in (6, 5, 4, 3, 2) for group in GROUP_NUMELS),
    *(f"int{bits}(group={group}, round=stochastic)" for bits in (4, 3) for group in GROUP_NUMELS),  # for exact zeros
)
NEAREST = (
    "e5m6",
    "int8",
    "int8(affine)",
    "fp8",
    *(f"{name}(group={group})" for name in ("int6", "int5", "int4", "int3", "nf4") for group in GROUP_NUMELS),
    "hadamard128(int4)",
    "hadamard128(int4(group=128))",
)
CANDIDATES = (*UNBIASED, *NEAREST)
MAX_BIAS = 5e-3  # as harmless as a change of the learning rate by half a per cent
CHANCE_SIGMAS = 3.0  # standard deviations of a mean of independent errors, which do not count as bias
MAX_ZERO_SHARE = 0.01  # of the elements
MEASURED_NUMEL = 2**17  # most elements of a payload whose errors are measured,
RUN_NUMEL = 2**10  # elements of a run

_RAW = Raw()
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


class Trials:
    """A policy that stores every payload in one codec, and measures the size and error of each candidate on it.

    Give it to a store, run a step, and call `payloads`. It leaves out what a policy of codecs would leave out
    (statistics, the loss, small tensors). Of a large payload it measures 131,072 elements, in evenly spaced runs of
    1,024.

    Parameters
    ----------
    candidates : decisions without a tier, as policy text. By default the unbiased ones (random rounding: the mean of
        many encodings is the value) and those that round to nearest, if their bias is small on the payload. The default
        excludes topk and nm, which are biased
    most_bias : the largest bias of a candidate that rounds to nearest; at payloads with a larger one it is left out.
        The bias is the larger of ``|<x', x> / <x, x> - 1|`` (shrinkage) and ``|mean(x' - x)| / rms(x)`` (offset), less
        three standard deviations of the same under independent errors. An error to nearest that averages out over the
        elements counts as noise. round=dither is left out where more than 1 % of the elements are 0: half of these
        come back above 0, and an operator that reads them as a mask, as ReLU does, lets gradients through
    waits : the codec that stores the payloads of a site meanwhile; by default an exact one
    protected : as for `Encode`

    Raises
    ------
    ConfigError : a candidate offloads, recomputes, or is given twice
    PolicyError, ChainError, UnknownCodecError : a candidate does not parse

    Notes
    -----
    The host does not wait for the device before `payloads`, except for candidates of variable size. Not thread-safe.
    """

    def __init__(
        self,
        candidates: Sequence[str] = CANDIDATES,
        *,
        most_bias: float = MAX_BIAS,
        waits: Callable[[Site], Codec] = lambda _site: _RAW,
        protected: bool = True,
    ) -> None:
        self._codecs: dict[str, Codec | None] = {}
        for text in candidates:
            decision = parse_decision(text)
            if not isinstance(decision, Keep | Encode) or text in self._codecs:
                raise ConfigError(
                    f"candidate={text!r}: must be 'keep' or a codec without a tier, given once. Use codecs such as "
                    "'int4(round=dither)'.",
                    candidate=text,
                )
            self._codecs[text] = decision.codec if isinstance(decision, Encode) else None
        self._most_bias = most_bias
        self._protected = protected
        self.waits = waits
        self._sums: dict[Site, dict[str, _Sums]] = {}
        self._shapes: dict[Site, list[int]] = {}  # elements of each payload
        self._readers: dict[Site, dict[Site, None]] = {}

    def __call__(self, site: Site, spec: Spec) -> Decision:
        return Encode(Trial(self, site), self._protected)

    def watching(self) -> saved_tensors_hooks:
        """Return a context to enter inside the store's, which notes the sites that share a payload.

        Raises
        ------
        StateError : no store is entered on this thread
        """
        hooks: Any = _top_saved_tensors_default_hooks(False)
        if hooks is None:
            raise StateError("no store is entered: with store: with trials.watching(): loss = model(x).")
        pack, unpack = hooks
        return saved_tensors_hooks(self.noting(pack), unpack)

    def measure(self, site: Site, src: Tensor, *, keep: bool = False) -> None:
        """Encode and decode a payload with every candidate, and add up the errors.

        Parameters
        ----------
        src : Tensor, dense, float32, float16 or bfloat16
        keep : whether a store needs the signs of the payload; candidates that cannot keep signs are left out there
        """
        shapes = self._shapes.setdefault(site, [])
        sums = self._sums.setdefault(site, {})
        spec, some = Spec.of(src), _some(src)
        exact = some.float()
        square, zeros = exact.square().sum(dtype=torch.float64), (exact == 0).sum()
        for text, given in self._codecs.items():
            codec = given.keeping_signs if keep and given is not None else given
            if given is None:
                moments = torch.stack((square, *[torch.zeros_like(square)] * 3, zeros))
                sums.setdefault(text, _Sums()).add(src.nbytes, some.numel(), moments)
            elif codec is not None and codec.accepts(src.dtype):
                size = codec.size(spec)
                encoded = encode(some, codec, len(shapes))
                nbytes = size.nbytes if isinstance(size, Exact) else encoded.nbytes * src.numel() // some.numel()
                off = encoded.decode().float() - exact
                parts = (off.square().sum(dtype=torch.float64), (off * exact).sum(dtype=torch.float64), off.sum())
                sums.setdefault(text, _Sums()).add(nbytes, some.numel(), torch.stack((square, *parts, zeros)))
        shapes.append(src.numel())

    def payloads(self, sensitivities: Mapping[str, Sensitivity]) -> list[SitePayload]:
        """Return the payloads of all sites since construction, as one step.

        Parameters
        ----------
        sensitivities : by the names of sites, as reports write them. A site without one gets exact candidates only
        """
        found = []
        every = [one.moments for sums in self._sums.values() for one in sums.values()]
        figures = iter(torch.stack(every).tolist() if every else [])  # one copy from the device
        for site, sums in self._sums.items():
            known = str(site) in sensitivities
            table = [
                candidate
                for (text, one), row in zip(sums.items(), figures, strict=False)
                if one.count == len(self._shapes[site])
                and (candidate := one.candidate(text, row)) is not None
                and (known or not candidate.error)
                and (candidate.bias <= self._most_bias or self._keyed(text))
                and not (row[4] > MAX_ZERO_SHARE * one.numel and getattr(self._codecs[text], "round", "") == "dither")
            ]
            readers = tuple(self._readers.get(site, ()))
            sensitivity = sensitivities.get(str(site), Sensitivity(()))
            found.append(SitePayload(site, sum(self._shapes[site]), sensitivity, tuple(table), readers))
        return found

    def _keyed(self, text: str) -> bool:
        codec = self._codecs[text]
        return codec is not None and codec.keyed

    def noting(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return the store's pack hook, wrapped to note the sites that share a payload."""

        def note(tensor: Tensor) -> Any:
            handle = pack(tensor)
            reader = getattr(handle, "handle", handle)  # a sampled step wraps the handle
            owner = getattr(reader, "owner", None)
            if owner is not None and reader.account.site != owner.account.site:
                self._readers.setdefault(owner.account.site, {})[reader.account.site] = None
            return handle

        return note


@dataclass(frozen=True, init=False)
class Trial(Codec):
    """Codec that measures each payload in the trials, and stores it in another codec. Instances with the same `waits`
    are equal, so that payloads are shared as usual.
    """

    name = "trial"
    lossless = False  # payloads that a policy protects from loss are not measured

    trials: Trials = field(init=False, compare=False, repr=False)
    site: Site = field(init=False, compare=False, repr=False)
    keep: bool = field(init=False, compare=False, repr=False)
    waits: Codec

    def __init__(self, trials: Trials, site: Site, keep: bool = False) -> None:
        object.__setattr__(self, "keep", keep)
        object.__setattr__(self, "trials", trials)
        object.__setattr__(self, "site", site)
        object.__setattr__(self, "waits", trials.waits(site))

    @property
    def keyed(self) -> bool:
        return self.waits.keyed

    @property
    def shaped(self) -> bool:
        return self.waits.shaped

    @property
    def plain(self) -> Codec:
        return self.waits

    @property
    def keeping_signs(self) -> Trial:
        return self if self.keep else type(self)(self.trials, self.site, keep=True)

    def replaced_by(self, side: Codec) -> Codec:
        return self  # measured as values, so that the site has candidates; a store makes any of them the side codec

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _DTYPES and self.waits.accepts(dtype)

    def size(self, spec: Spec) -> Size:
        return self.waits.size(spec)

    def encode(self, src: Tensor, out: Tensor, key: int = 0) -> int:
        self.trials.measure(self.site, src, keep=self.keep)
        return self.waits.encode(src, out, key)

    def decode(self, buf: Tensor, out: Tensor, key: int = 0) -> None:
        self.waits.decode(buf, out, key)


def _some(src: Tensor) -> Tensor:
    """Return at most `MEASURED_NUMEL` elements of a dense tensor: evenly spaced runs in memory order."""
    numel = src.numel()
    if numel <= MEASURED_NUMEL:
        return src
    runs = numel // RUN_NUMEL
    flat = src.detach().as_strided((runs, RUN_NUMEL), (RUN_NUMEL, 1))
    return flat[:: -(-runs * RUN_NUMEL // MEASURED_NUMEL)].contiguous()


class _Sums:
    """Sums over a site's payloads: bytes, and on the device |x|^2, |off|^2, <off, x>, the sum of off, and the number
    of zeros in x.
    """

    def __init__(self) -> None:
        self.nbytes = self.numel = self.count = 0
        self.moments = torch.zeros(5)

    def add(self, nbytes: int, numel: int, moments: Tensor) -> None:
        """Add a payload of `nbytes` with `numel` measured elements."""
        self.nbytes += nbytes
        self.numel += numel
        self.moments = self.moments + moments if self.count else moments
        self.count += 1

    def candidate(self, text: str, figures: list[float]) -> Candidate | None:
        """Return the candidate from the moments on the host; None where they are not finite."""
        square, off, along, offset, _ = figures
        if not square > 0:
            return Candidate(text, self.nbytes, 0.0) if off == 0 else None
        error = off / square
        if not 0 <= error < float("inf"):
            return None
        bias = max(abs(along) / square, abs(offset) / sqrt(square * self.numel))
        return Candidate(text, self.nbytes, error, bias=max(0.0, bias - CHANCE_SIGMAS * sqrt(error / self.numel)))
