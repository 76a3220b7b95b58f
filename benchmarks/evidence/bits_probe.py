"""Trained GPT whose payloads are exact except for the errors that a probe adds: for `benchmarks/evidence/bits.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actstore import ActivationStore
from actstore.accuracy.bits.trials import Trial, Trials
from actstore.base.spec import Site, Spec
from actstore.bench.workloads import gpt
from actstore.bench.workloads.workload import Workload
from actstore.codecs import Codec
from actstore.policy import Decision, Encode, Policy
from actstore.policy.encoded import encode

MIN_NBYTES = 4096  # the benchmark's tensors are small
WORK = Workload(layers=4, width=128, heads=4, context=64, batch=8)
LEARNING_RATE = 1e-3

Gradients = list[Tensor]


@dataclass(frozen=True, init=False)
class _Disturbed(Trial):
    """A payload that is stored exactly, and read as the probe wants it."""

    def decode(self, buf: Tensor, out: Tensor, key: int = 0) -> None:
        super().decode(buf, out, key)
        trials = self.trials
        assert isinstance(trials, Probe)
        codec, drawn = trials.lossy.get(self.site, (None, 0))
        if codec is not None:
            out.copy_(encode(out, codec, drawn).decode())


class Probe(Trials):
    """Trials whose payloads can be read through any codec, with any key, site by site.

    Attributes
    ----------
    lossy : codec and key of each site that is read with loss
    """

    def __init__(self, candidates: Sequence[str]) -> None:
        super().__init__(candidates)
        self.lossy: dict[Site, tuple[Codec, int]] = {}

    def __call__(self, site: Site, spec: Spec) -> Decision:
        return Encode(_Disturbed(self, site))


class Subject:
    """The model after `steps` steps of plain training, and the next batch.

    Attributes
    ----------
    backwards : how many backwards the probes have run
    """

    def __init__(self, work: Workload, steps: int) -> None:
        torch.manual_seed(work.seed)
        job = gpt.KIND.make(work)
        self.model = job.model
        self.parameters = list(self.model.parameters())
        self.backwards = 0
        optimizer = torch.optim.AdamW(self.parameters, LEARNING_RATE)
        for step in range(steps):
            optimizer.zero_grad()
            self.model(*job.batch(step)).backward()
            optimizer.step()
        optimizer.zero_grad()
        self.batches = [job.batch(steps + i) for i in range(9)]
        self.exact = self._plain(0)
        self.square = sum(float(g.square().sum()) for g in self.exact)

    def minibatch_noise(self) -> float:
        """Return the gradient's variance between batches: |g|^2 about the mean of 8 batches, over all weights."""
        found = [self._plain(i) for i in range(1, len(self.batches))]
        return spread(found)

    def probed(self, probe: Probe) -> Tensor:
        """Return the loss of one forward with the probe; its graph serves any number of backwards."""
        with ActivationStore(self.model, probe, min_bytes=MIN_NBYTES), probe.watching():
            loss: Tensor = self.model(*self.batches[0])
        return loss

    def gradients(self, loss: Tensor, probe: Probe, lossy: Mapping[Site, tuple[Codec, int]]) -> Gradients:
        """Return the gradients where these sites are read with loss."""
        self.backwards += 1
        probe.lossy = dict(lossy)
        return list(torch.autograd.grad(loss, self.parameters, retain_graph=True))

    def deviation(self, policy: Policy, draws: int) -> tuple[float, float, int]:
        """Return the mean squared distance of a store's gradients from the exact ones over `draws` seeds of the store.

        Returns
        -------
        float, float : summed over all weights: the mean, and its standard error
        int : bytes that the store encoded
        """
        squares = []
        for seed in range(draws):
            store = ActivationStore(self.model, policy, min_bytes=MIN_NBYTES, seed=seed)
            with store:
                loss = self.model(*self.batches[0])
            found = torch.autograd.grad(loss, self.parameters)
            squares.append(distance(list(found), self.exact))
            stored = store.report().stored_bytes
            store.close()
        values = torch.tensor(squares, dtype=torch.float64)
        return float(values.mean()), float(values.std() / draws**0.5), stored

    def _plain(self, batch: int) -> Gradients:
        return list(torch.autograd.grad(self.model(*self.batches[batch]), self.parameters))


def distance(found: Gradients, wanted: Gradients) -> float:
    """Return |found - wanted|^2 over all weights."""
    return float(sum((a - b).square().sum(dtype=torch.float64) for a, b in zip(found, wanted, strict=True)))


def spread(found: Sequence[Gradients]) -> float:
    """Return the unbiased sample variance of gradients, summed over all weights."""
    mean = [torch.stack(parts).mean(0) for parts in zip(*found, strict=True)]
    return sum(distance(one, mean) for one in found) / (len(found) - 1)
