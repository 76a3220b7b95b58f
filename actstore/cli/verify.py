"""The command ``actstore verify``."""

from __future__ import annotations

import json as json_format
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from actstore import ActivationStore, check_gradients, measure_gradient_error
from actstore.bench.files import check_writable
from actstore.cli.options import Arguments, Script, tiers_of
from actstore.errors import ConfigError
from actstore.rerun.target import load, users_code

EXIT_CODES = {"equal": 0, "within tolerance": 0, "different": 1, "no verdict": 2}


def verify(
    script: Script,
    arguments: Arguments = None,
    policy: Annotated[
        str, typer.Option(help="Policy of the store, as in ActivationStore(model, POLICY).")
    ] = "raw @ host",
    tolerance: Annotated[float, typer.Option(help="Relative error of a gradient that passes; 0: bit for bit.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Runs with the store, each from the same state.")] = 2,
    lossy: Annotated[bool, typer.Option("--lossy", help="Measure bias and variance of the gradients instead.")] = False,
    draws: Annotated[int, typer.Option(help="With --lossy: number of runs, each with other random rounding.")] = 12,
    each_site: Annotated[bool, typer.Option("--each-site", help="With --lossy: measure each site alone, too.")] = False,
    min_bytes: Annotated[str, typer.Option(help="Smaller tensors are kept, and so not checked.")] = "0",
    host_budget: Annotated[str | None, typer.Option(help="Upper bound in host memory, such as 8GiB.")] = None,
    disk_budget: Annotated[str | None, typer.Option(help="Upper bound on the disk.")] = None,
    disk_path: Annotated[str | None, typer.Option(help="Folder of the disk tier.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
) -> None:
    """Run a training step with and without a store, and show the first difference.

    Exit code 0: equal, or within the tolerance; 1: different; 2: no verdict. With --lossy: measure how far a lossy
    policy moves the gradients, and whether at random; exit code 1 if by more than a tolerance above 0.
    """
    check_writable(json, "--json")
    if not lossy and each_site:
        raise ConfigError("--each-site is for lossy policies. Give --lossy, too.")
    with users_code(script, "all was compared"):
        target = load(script, arguments or [])
        tiers = tiers_of(host_budget, disk_budget, disk_path)
        store = ActivationStore(target.model, policy, tiers=tiers, min_bytes=min_bytes)
        with closing(store):
            if lossy:
                error = measure_gradient_error(
                    target.step, store, draws=draws, others=target.others, each_site=each_site
                )
                text, values, code = str(error), error.to_dict(), int(0 < tolerance < error.error)
            else:
                result = check_gradients(target.step, store, tolerance=tolerance, steps=steps)
                text, values, code = str(result), result.to_dict(), EXIT_CODES[result.verdict]
    typer.echo(text)
    if json is not None:
        json.write_text(json_format.dumps(values, indent=2, allow_nan=False) + "\n")
    raise typer.Exit(code)
