"""Cost of sampling errors in training: `python -m benchmarks.evidence.sampling`.

It writes ``sampling.json`` into the folder of this machine's results.

The GPT of `make bench` in int8: a sampled step, the one after it, which gives the noise from batch to batch,
one to settle, and one without sampling take turns on one model in one process. Processor time on one thread, so
that other work on the machine counts little; medians over the rounds. Further steps are like those without sampling.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import process_time

from actstore import ActivationStore, SampleErrors
from actstore.bench import workloads
from actstore.bench.environment import environment
from actstore.bench.trainer import fix_numerics
from actstore.bench.workloads.job import Job, fix_seed
from actstore.bench.workloads.workload import Workload
from benchmarks import machine

SAMPLE_PERIOD_STEPS = 200  # steps, as the default is
WARMUP = 2


def measure(work: Workload, rounds: int) -> dict[str, float]:
    """Return milliseconds of forward and backward of each kind of step."""
    fix_numerics(work)
    job = workloads.make(work)
    store = ActivationStore(job.model, "int8", observe=[SampleErrors(every=0)])
    found: dict[str, list[float]] = {name: [] for name in ("sampled", "after", "calm", "plain")}
    for turn in range(-WARMUP, rounds):
        store.sample_next()
        for times in found.values():
            taken = _step(job, store)
            if turn >= 0:
                times.append(taken)
    store.close()
    return {name: median(times) for name, times in found.items()}


def _step(job: Job, store: ActivationStore) -> float:
    fix_seed(job.work.seed)
    batch = job.batch(0)
    begin = process_time()
    with store:
        loss = job.loss(*batch)
    job.backward(loss)
    taken = process_time() - begin
    job.model.zero_grad()
    return 1e3 * taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    found = measure(Workload(threads=1), rounds)
    for name, ms in found.items():
        print(f"{name:>8} {ms:8.1f} ms  {ms / found['plain']:.3f}")
    extra = found["sampled"] + found["after"] - 2 * found["plain"]
    print(
        f"with one sampled step in {SAMPLE_PERIOD_STEPS}: {extra / SAMPLE_PERIOD_STEPS / found['plain']:+.2%} of a step"
    )
    here = environment()
    machine.write(machine.RESULTS / machine.name_of(here) / "sampling.json", {"environment": here, "ms": found})


if __name__ == "__main__":
    main()
