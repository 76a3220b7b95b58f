"""The command ``actstore fit``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated

import torch
import typer

from actstore import fit_step
from actstore.bench.files import check_writable
from actstore.cli.options import Arguments, Script
from actstore.inspection.fit.fit import POLICIES, log
from actstore.rerun.target import find_maker, users_code
from actstore.session.activation_store import MIN_NBYTES

SILENT_S = 2.0  # before the first line of progress


def fit(
    script: Script,
    arguments: Arguments = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of the device, such as 24GiB: which batch and context fit?")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Predict times, too: for cpu, or a GPU such as h100-sxm, by its data sheet.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Argument of make_step.")] = None,
    context: Annotated[int | None, typer.Option(help="Argument of make_step.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy of a store; may be repeated.", show_default="; ".join((*POLICIES, "with --memory: auto"))
        ),
    ] = None,
    optimizer: Annotated[
        bool, typer.Option(help="AdamW for a step that returns its loss; or none. Other steps have their own.")
    ] = True,
    fsdp: Annotated[
        int,
        typer.Option(
            help="Ranks that shard weights, gradients and optimizer, as FSDP2 does. All figures are per rank."
        ),
    ] = 1,
    tp: Annotated[int, typer.Option(help="Ranks that split the linear layers and heads of the blocks.")] = 1,
    min_bytes: Annotated[str, typer.Option(help="Smaller tensors are kept.")] = str(MIN_NBYTES),
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
) -> None:
    """Predict the memory of a training step under each policy, without needing it: nothing is computed."""
    check_writable(json, "--json")
    sizes = {name: size for name, size in (("batch", batch), ("context", context)) if size is not None}
    make_optimizer = torch.optim.AdamW if optimizer else None
    with users_code(script, "the memory was known"), _progress():
        make_step = find_maker(script, arguments or [])
        found = fit_step(
            make_step,
            policy,
            memory=memory,
            device=device,
            make_optimizer=make_optimizer,
            min_bytes=min_bytes,
            fsdp=fsdp,
            tp=tp,
            **sizes,
        )
    typer.echo(str(found))
    if json is not None:
        json.write_text(found.to_json() + "\n", encoding="utf-8")


class _Lines(logging.Handler):
    """Lines on stderr, from a moment after the start on."""

    def __init__(self) -> None:
        super().__init__()
        self._begin_s = monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if monotonic() - self._begin_s > SILENT_S:
            typer.echo(f"actstore: {record.getMessage()}", err=True)


@contextmanager
def _progress() -> Iterator[None]:
    lines, level = _Lines(), log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(lines)
