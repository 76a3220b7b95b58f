"""A script that runs unchanged with stores around its models' forwards, and the reports at its end."""

from __future__ import annotations

import atexit
import json
import math
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from actstore.errors import ConfigError
from actstore.policy import may_be_lossy
from actstore.run.models import ScriptStores
from actstore.run.settings import Settings
from actstore.session.activation_store import ActivationStore

RANK, RANKS = "RANK", "WORLD_SIZE"  # torchrun and accelerate launch set them


def run_script(settings: Settings, target: str, arguments: Sequence[str], *, is_module: bool = False) -> int:
    """Run a script as ``python target arguments`` would, with a store around the forwards of each model it trains.

    Parameters
    ----------
    target : a file, the name of a command that is a Python file such as ``torchrun``, or the name of a module
    is_module : whether it is a module, as in ``python -m target``

    Returns
    -------
    int : the exit code, 1 after an error of the script, whose traceback is printed

    Raises
    ------
    ConfigError : the script does not exist, or an option is invalid
    ActstoreError : a model of the script gets no store, as the policy does not fit it
    SystemExit : the script's own
    """
    settings.check()
    path = None if is_module else _find(target)
    settings.export()
    if settings.report:
        Path(settings.report).unlink(missing_ok=True)
    stores = ScriptStores(settings, _say, _FIRST_STEP.get(settings.first_step))
    stores.start()
    sys.argv[:] = [str(path or target), *arguments]
    sys.path[0] = os.getcwd() if path is None else str(path.resolve().parent)
    try:
        try:
            if path is None:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(path), run_name="__main__")
        finally:
            _end(stores, settings)
    except SystemExit:
        raise
    except BaseException as error:
        if error is stores.refusal:
            raise
        error.__traceback__ = _of_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def join() -> None:
    """Start the stores of a process that the script has started."""
    settings = Settings.inherited()
    stores = ScriptStores(settings, _say, _FIRST_STEP.get(settings.first_step))
    stores.start()
    atexit.register(_end, stores, settings, is_child=True)


def _find(target: str) -> Path:
    path = Path(target)
    if not path.is_file() and os.sep not in target and (command := shutil.which(target)) is not None:
        path = Path(command)
        with path.open("rb") as file:
            if b"python" not in file.readline():
                raise ConfigError(f"{target}: {command} must be a Python script. Give the Python file that it starts.")
    if not path.is_file():
        raise ConfigError(f"{target}: no such file. Give a script such as train.py, or a module as -m NAME.")
    return path


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the script."""
    outside = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in outside:
        trace = trace.tb_next
    return trace


def _say(line: str) -> None:
    rank = os.environ.get(RANK)
    if rank in (None, "0"):
        print(f"actstore: {line}", file=sys.stderr, flush=True)  # of the command line


def _end(stores: ScriptStores, settings: Settings, *, is_child: bool = False) -> None:
    """Close the stores, and print and write their reports."""
    stores.stop()
    if settings.first_step == "inspect":
        return
    reports = [(each, each.report) for each in stores.trained if each.report is not None]
    for each, report in reports:
        _say(f"{each.name}, {each.steps} steps; activations of step {each.counted}:\n{report}")
    if not reports and not is_child and stores.refusal is None:
        _say("no model ran forward in training mode with gradients in this process, and so no store was entered.")
    if settings.report and (reports or not (is_child or Path(settings.report).exists())):
        found = [
            {"model": each.name, "steps": each.steps, "policy": settings.policy, **json.loads(report.to_json())}
            for each, report in reports
        ]
        _file(settings.report, is_child=is_child).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _file(name: str, *, is_child: bool) -> Path:
    """Return the report file of this process: `name`, or with its rank, or with its number."""
    path, rank = Path(name), os.environ.get(RANK)
    if rank == "0" or (rank is None and not is_child):
        return path
    return path.with_suffix(f".{f'rank{rank}' if rank is not None else os.getpid()}{path.suffix}")


def _loss(output: Any) -> Tensor:
    """Return a loss for the output of a forward: its own, or the sum of its tensors' mean squares."""
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    scalars = [leaf for leaf in found if leaf.numel() == 1]
    return scalars[0] if scalars else torch.stack([leaf.abs().square().mean() for leaf in found]).sum()


def _step(forward: Callable[[], Any], option: str) -> Callable[[], Tensor]:
    if int(os.environ.get(RANKS, "1")) > 1:
        raise ConfigError(f"{option}: runs a step again, which one of several ranks cannot. Run it in one process.")
    return lambda: _loss(forward())


def _verify(store: ActivationStore, forward: Callable[[], Any]) -> None:
    """Compare the first forward and a backward of it with plain PyTorch's; exit where an exact policy differs."""
    from actstore.check import check_gradients

    with closing(copy(store)) as trial:
        tolerance = math.inf if may_be_lossy(trial.policy) else 0.0
        result = check_gradients(_step(forward, "--verify"), trial, tolerance=tolerance)
    _say(f"the first step, with and without the store:\n{result}")
    if result.verdict == "different":
        raise SystemExit(1)


def _inspect(store: ActivationStore, forward: Callable[[], Any]) -> None:
    """Show which lines of code fill the memory in the first forward and a backward of it, and exit."""
    from actstore.inspection import inspect_step

    with closing(copy(store)) as trial:
        found = inspect_step(_step(forward, "--inspect"), trial)
    print(found.text())  # of the command line
    raise SystemExit(0)


_FIRST_STEP = {"verify": _verify, "inspect": _inspect}
