"""Quality of the predicted effect of payload errors on gradients: ``python -m benchmarks.evidence.prediction``.

It prints a table, and writes ``prediction.json`` into the folder of this machine's results.

Small GPTs are trained for some steps. Then each site alone is made lossy, and the variance of all gradients over some
draws of the random rounding is compared with what one sampled step predicts: rank correlation over the sites, the least
and the largest ratio of predicted to measured variance, and the same ratio of all sites at once.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from actstore import ActivationStore, measure_gradient_error
from actstore.bench import workloads
from actstore.bench.environment import environment as environment_of_this
from actstore.bench.workloads.workload import Workload
from actstore.results import GradientDeviation
from benchmarks import machine

LAYERS = (2, 4)
POLICIES = ("int4(round=stochastic)", "int8(affine, round=dither)")
STEPS, DRAWS = 100, 8


def measure(layers: int, policy: str) -> GradientDeviation:
    torch.manual_seed(0)
    job = workloads.make(Workload(layers=layers, width=64, heads=2, context=64, batch=8, threads=1))
    optimizer = torch.optim.AdamW(job.model.parameters(), 1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        job.backward(job.model(*job.batch(step)))
        optimizer.step()
    store = ActivationStore(job.model, policy, min_bytes=0)
    batch = job.batch(STEPS)
    return measure_gradient_error(lambda: job.model(*batch), store, draws=DRAWS, each_site=True)


def main() -> None:
    torch.set_num_threads(1)
    table = Table("layers", "policy", "sites", "rank correlation", "least ratio", "largest", "all together")
    rows = []
    for layers in LAYERS:
        for policy in POLICIES:
            found = measure(layers, policy)
            ratios = [(site.predicted / site.measured) ** 2 for site in found.sites if site.predicted]
            assert found.predicted is not None
            together = found.predicted.variance / (found.deviation**2 + found.bias**2)
            figures = [found.rank_correlation or 0.0, min(ratios), max(ratios), together]
            table.add_row(str(layers), policy, str(len(ratios)), *(f"{figure:.2f}" for figure in figures))
            names = ("rank_correlation", "least", "largest", "together")
            rows.append({"layers": layers, "policy": policy, **dict(zip(names, figures, strict=True))})
    Console().print(table)
    environment = environment_of_this()
    path = machine.RESULTS / machine.name_of(environment) / "prediction.json"
    machine.write(path, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
