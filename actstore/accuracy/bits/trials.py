"""What each payload of a step becomes under every codec that might be chosen for it: measured, while gradients stay."""

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

GROUPS = (32, 64, 128, 256)  # elements that share a scale
UNBIASED = (
    "keep",
    "int8(affine, round=dither)",
    *(f"int{bits}(group={group}, round=dither)" for bits in (6, 5, 4, 3, 2) for group in GROUPS),
    *(f"int{bits}(group={group}, round=stochastic)" for bits in (4, 3) for group in GROUPS),  # for many exact zeros
)
NEAREST = (
    "e5m6",
    "int8",
    "int8(affine)",
    "fp8",
    *(f"{name}(group={group})" for name in ("int6", "int5", "int4", "int3", "nf4") for group in GROUPS),
    "hadamard128(int4)",
    "hadamard128(int4(group=128))",
)
CANDIDATES = (*UNBIASED, *NEAREST)
MOST_BIAS = 5e-3  # as harmless as half a per cent more or less of a learning rate
CHANCE = 3.0  # standard deviations of a mean of independent errors, which are no bias
MOST_ZEROS = 0.01  # of the elements
MEASURED = 2**17  # elements of a payload whose errors are measured,
RUN = 2**10  # in runs of so many

_RAW = Raw()
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


class Trials:
    """A policy that stores every payload in one codec, and measures on the way what each candidate would make of it.

    Give it to a store, run a step, and ask for `payloads`. What a policy of codecs would leave out (statistics, the
    loss, small tensors) is left out here too. Of a large payload 131,072 elements are measured, in runs of 1,024 that
    are evenly spaced.

    Parameters
    ----------
    candidates : decisions without a tier, as policy text. By default the unbiased ones (random rounding: the mean of
        many encodings is the value) and those that round to nearest, if their bias is small where they are used. topk
        and nm are biased, and none of the default
    most_bias : a candidate that rounds to nearest is left out at payloads where its bias is larger. The bias is the
        larger of ``|<x', x> / <x, x> - 1|`` (shrinkage) and ``|mean(x' - x)| / rms(x)`` (offset), less three standard
        deviations of what independent errors would show by chance. An error to nearest that averages out over the
        elements is taken as noise. round=dither is left out where more than 1 % of the elements are 0: half of these
        come back above 0, and what reads them as a mask, as ReLU does, lets gradients through
    waits : the codec that the payloads of a site wait in meanwhile, exactly by default
    protected : as of `Encode`

    Raises
    ------
    ConfigError : a candidate moves, recomputes, or is there twice
    PolicyError, ChainError, UnknownCodecError : a candidate does not parse

    Notes
    -----
    Nothing waits for the device before `payloads`, but for candidates of variable size. Not thread-safe.
    """

    def __init__(
        self,
        candidates: Sequence[str] = CANDIDATES,
        *,
        most_bias: float = MOST_BIAS,
        waits: Callable[[Site], Codec] = lambda _site: _RAW,
        protected: bool = True,
    ) -> None:
        self._codecs: dict[str, Codec | None] = {}
        for text in candidates:
            decision = parse_decision(text)
            if not isinstance(decision, Keep | Encode) or text in self._codecs:
                raise ConfigError(
                    f"the candidate {text!r} is no codec by itself, or is there twice; give 'keep' and codecs such as "
                    "'int4(round=dither)', each once",
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
        """A context to enter inside that of the store: which sites share a payload is noted.

        Raises
        ------
        StateError : no store is entered here
        """
        hooks: Any = _top_saved_tensors_default_hooks(False)
        if hooks is None:
            raise StateError("no store is entered: with store: with trials.watching(): loss = model(x)")
        pack, unpack = hooks
        return saved_tensors_hooks(self.noting(pack), unpack)

    def measure(self, site: Site, src: Tensor, *, keep: bool = False) -> None:
        """Take a payload through every candidate.

        Parameters
        ----------
        src : Tensor, dense, float32, float16 or bfloat16
        keep : whether a store keeps its signs; candidates that cannot are left out there
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
        """The payloads of all sites that were met since these trials were made, as one step.

        Parameters
        ----------
        sensitivities : by the names of sites, as reports write them. A site that is not there is not to lose anything
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
                and not (row[4] > MOST_ZEROS * one.numel and getattr(self._codecs[text], "round", "") == "dither")
            ]
            readers = tuple(self._readers.get(site, ()))
            sensitivity = sensitivities.get(str(site), Sensitivity(()))
            found.append(SitePayload(site, sum(self._shapes[site]), sensitivity, tuple(table), readers))
        return found

    def _keyed(self, text: str) -> bool:
        codec = self._codecs[text]
        return codec is not None and codec.keyed

    def noting(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """The hook of a store, whose sites that share a payload are noted."""

        def note(tensor: Tensor) -> Any:
            handle = pack(tensor)
            reader = getattr(handle, "handle", handle)  # a sampled step wraps it
            owner = getattr(reader, "owner", None)
            if owner is not None and reader.account.site != owner.account.site:
                self._readers.setdefault(owner.account.site, {})[reader.account.site] = None
            return handle

        return note


@dataclass(frozen=True, init=False)
class Trial(Codec):
    """What is encoded is measured, and waits in another codec. All with the same are equal, so that payloads are shared
    as ever."""

    name = "trial"
    lossless = False  # what a policy protects from loss is not measured

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
    def plain(self) -> Codec:
        return self.waits

    @property
    def keeping_signs(self) -> Trial:
        return self if self.keep else type(self)(self.trials, self.site, keep=True)

    def replaced_by(self, side: Codec) -> Codec:
        return self  # measured as values, so that the site has candidates: a store makes any of them the side

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
    """At most `MEASURED` elements of a dense tensor: evenly spaced runs, as they lie in memory."""
    numel = src.numel()
    if numel <= MEASURED:
        return src
    runs = numel // RUN
    flat = src.detach().as_strided((runs, RUN), (RUN, 1))
    return flat[:: -(-runs * RUN // MEASURED)].contiguous()


class _Sums:
    """Over the payloads of a site: bytes, and on the device |x|^2, |off|^2, <off, x>, the sum of off, and how many x
    are 0."""

    def __init__(self) -> None:
        self.nbytes = self.numel = self.count = 0
        self.moments = torch.zeros(5)

    def add(self, nbytes: int, numel: int, moments: Tensor) -> None:
        """Take in a payload of so many bytes, of which so many elements were measured."""
        self.nbytes += nbytes
        self.numel += numel
        self.moments = self.moments + moments if self.count else moments
        self.count += 1

    def candidate(self, text: str, figures: list[float]) -> Candidate | None:
        """From the moments, on the host; None where they are not finite."""
        square, off, along, offset, _ = figures
        if not square > 0:
            return Candidate(text, self.nbytes, 0.0) if off == 0 else None
        error = off / square
        if not 0 <= error < float("inf"):
            return None
        bias = max(abs(along) / square, abs(offset) / sqrt(square * self.numel))
        return Candidate(text, self.nbytes, error, bias=max(0.0, bias - CHANCE * sqrt(error / self.numel)))
