"""Runs jobs on several gloo processes of this machine. One start serves many jobs: it takes time."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SHARED = ["tests.distributed.jobs"]  # with what all jobs import: seconds of each rank that imports it by itself
# Before, two stages of one rank wait for messages of gloo's to each other that never come, in plain training.
RUNS_ZERO_BUBBLE_V = torch.__version__ >= (2, 12)
TRACE_AFTER_S = 50.0  # before ranks that wait for this one give up
TRACING = threading.Lock()  # while a thread reads sources and writes where all threads are: it has files open


class Outcome(NamedTuple):
    """What became of a launch.

    Attributes
    ----------
    failures : for each job the tracebacks of the ranks that failed, or "did not run" where it did not come to an end
    end : why the processes ended early; empty where they did not
    """

    failures: dict[str, list[str]]
    end: str


def launch(world: int, names: list[str], folder: Path, timeout_s: float, method: str = "forkserver") -> Outcome:
    """Run the named jobs (``module:function``) one after the other on `world` processes; all end before this returns.

    An integer may follow a name, ``module:function:5``: the job's argument.

    Raises
    ------
    TimeoutError : the processes did not end in `timeout_s` seconds; the text says which job ran. They are killed.
    """
    ranks = start(_rank, (world, names, str(folder)), world, method)
    deadline = monotonic() + timeout_s
    ended, end = False, ""
    try:
        while not ended and monotonic() < deadline:
            ended = ranks.join(timeout=1)
    except mp.ProcessExitedException as error:
        ended, end = True, str(error)
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()
                process.join()
    failures = {name: _read(folder, world, name) for name in names}
    if not ended:
        begun = [name for name in names if (folder / f"{_file(name)}.begun").exists()]
        raise TimeoutError(f"{world} processes still ran after {timeout_s} s, in {begun[-1:]}: {failures}")
    return Outcome(failures, end)


def check_jobs(
    world: int, names: list[str], folder: Path, timeout_s: float, method: str = "forkserver", end: str = ""
) -> None:
    """Run jobs as `launch` does. None may fail, and the processes must end in this way."""
    outcome = launch(world, names, folder, timeout_s, method)
    failures = [f"{name}\n{text}" for name in names for text in outcome.failures[name]]
    assert not failures, "\n\n".join(failures)
    assert outcome.end == end


def start(function: Callable[..., None], args: tuple[Any, ...], world: int, method: str = "forkserver") -> Any:
    """Start ``function(rank, *args)`` on `world` processes.

    "forkserver" forks them from one process of a single thread that has imported `SHARED`, and they end by `os._exit`.
    "spawn" starts them anew, and they end as a program does: the interpreter runs its exit functions, and is torn down.
    """
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(SHARED)
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # of that process
            forkserver.ensure_running()
    return mp.start_processes(function, args, world, join=False, start_method=method)


def traces() -> str:
    """Return where each thread of this process is.

    All frames are listed and let go before a source file is read, which lets other threads run: a frame that ends
    meanwhile would keep its tensors.
    `faulthandler.dump_traceback_later` reads frames without the interpreter's lock, and crashes where they end.
    """
    stacks = {ident: _places(frame) for ident, frame in sys._current_frames().items()}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"{names.get(ident, 'a thread')}:\n{''.join(traceback.format_list(stack))}"
        for ident, stack in stacks.items()
        if ident != threading.get_ident()
    ]
    return "\n".join(parts)


def _places(frame: FrameType | None) -> list[tuple[str, int, str, None]]:
    """The lines of a stack, the innermost last."""
    found = [(each.f_code.co_filename, line, each.f_code.co_name, None) for each, line in traceback.walk_stack(frame)]
    return found[::-1]


@contextmanager
def traced(path: Path, after_s: float = TRACE_AFTER_S) -> Iterator[None]:
    """Write to a file where all threads are, if what runs inside takes long."""

    def write() -> None:
        with TRACING:
            path.write_text(traces())

    timer = threading.Timer(after_s, write)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _rank(rank: int, world: int, names: list[str], folder: str) -> None:
    warnings.filterwarnings("error", category=RuntimeWarning)
    warnings.filterwarnings("ignore", "the disk tier's folder", RuntimeWarning)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    results = dist.PrefixStore("results", store)
    for name in names:
        Path(folder, f"{_file(name)}.begun").touch()
        module, function, *arguments = name.split(":")
        text = ""
        with traced(Path(folder, f"{_file(name)}.{rank}.traces")):
            try:
                getattr(import_module(module), function)(*map(int, arguments))
            except Exception:
                text = f"rank {rank}: {traceback.format_exc()}"
        Path(folder, f"{_file(name)}.{rank}").write_text(json.dumps(text))
        # No collective: where ranks are out of step, gloo finds one of another size, and aborts the process.
        results.set(f"{name}/{rank}", "failed" if text else "ended")
        if text:
            dist.destroy_process_group()  # which ends the collectives in which other ranks wait for this one
        keys = [f"{name}/{each}" for each in range(world)]
        results.wait(keys, timedelta(hours=1))  # the limit of the launch is shorter
        if any(results.get(key) == b"failed" for key in keys):
            return
    dist.barrier()
    dist.destroy_process_group()


def _file(name: str) -> str:
    return name.replace(":", ".")


def _read(folder: Path, world: int, name: str) -> list[str]:
    """Return the failures of a job, and where its ranks were if it took long."""
    paths = [folder / f"{_file(name)}.{rank}" for rank in range(world)]
    texts = [json.loads(path.read_text()) if path.exists() else f"{path.name}: did not run" for path in paths]
    failures = [text for text in texts if text]
    late = [path for path in sorted(folder.glob(f"{_file(name)}.*.traces")) if failures]
    return failures + [f"{path.name}, after {TRACE_AFTER_S} s:\n{path.read_text()}" for path in late]
