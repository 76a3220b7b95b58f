"""Ranks start without imports of their own, say where they hang, and are all gone at the end."""

from __future__ import annotations

import linecache
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from tests.distributed import launch as launcher
from tests.distributed import training
from tests.distributed.launch import launch, traced, traces
from tests.distributed.training import open_files

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def begins_with_imports() -> None:
    """A rank of the fork server, which is safe to fork: it has one thread."""
    assert "torch.distributed.pipelining" in sys.modules
    assert len(os.listdir(f"/proc/{os.getppid()}/task")) == 1


def takes_an_argument(number: int) -> None:
    assert number == 5, number


def ends_the_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        os.abort()
    dist.barrier()


def fails_on_the_last_rank() -> None:
    assert dist.get_rank() != dist.get_world_size() - 1, "as it should"


def fails_beside_a_collective() -> None:
    fails_on_the_last_rank()
    dist.all_reduce(torch.zeros(512))


def waits_for_ever() -> None:
    if dist.get_rank():
        threading.Event().wait()
    dist.barrier()


def named(*jobs: str) -> list[str]:
    return [f"{__name__}:{job}" for job in jobs]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_are_forked_from_one_thread_that_has_imported(tmp_path: Path) -> None:
    outcome = launch(2, named("begins_with_imports", "takes_an_argument:5"), tmp_path, 120)
    assert not any(outcome.failures.values()), outcome.failures
    assert outcome.end == ""


def test_a_failure_has_its_rank_and_ends_the_jobs(tmp_path: Path) -> None:
    failing, *rest = named("fails_on_the_last_rank", "takes_an_argument:6")
    outcome = launch(2, [failing, *rest], tmp_path, 120)
    (text,) = outcome.failures[failing]
    assert text.startswith("rank 1: Traceback")
    assert "as it should" in text
    assert len(outcome.failures[rest[0]]) == 2  # it did not run on any rank
    assert outcome.end == ""


def test_a_failure_beside_a_collective_aborts_no_rank(tmp_path: Path) -> None:
    """The other rank waits for the one that has failed, and gets an error; gloo aborts where sizes differ."""
    (name,) = named("fails_beside_a_collective")
    outcome = launch(2, [name], tmp_path, 120)
    assert outcome.end == ""
    waiting, failing = sorted(outcome.failures[name])
    assert waiting.startswith("rank 0: ")
    assert "all_reduce" in waiting
    assert "as it should" in failing


def test_a_rank_that_aborts_is_named(tmp_path: Path) -> None:
    assert launch(2, named("ends_the_last_rank"), tmp_path, 120).end == "process 1 terminated with signal SIGABRT"


def test_ranks_that_hang_are_killed(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"2 processes still ran after 0.0 s, in .*did not run"):
        launch(2, named("waits_for_ever"), tmp_path, 0.0)
    assert not multiprocessing.active_children()


def test_a_rank_that_takes_long_says_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "job.traces"
    with traced(path, 0.0):
        while not path.exists() or not path.read_text():
            threading.Event().wait(0.01)
    assert "MainThread:\n" in path.read_text()
    assert "in test_a_rank_that_takes_long_says_where_it_is" in path.read_text()


def test_what_ends_in_time_is_not_traced(tmp_path: Path) -> None:
    before = threading.enumerate()
    with traced(tmp_path / "traces", 60.0):
        assert len(threading.enumerate()) == len(before) + 1
    assert threading.enumerate() == before
    assert not (tmp_path / "traces").exists()


def test_files_of_a_trace_are_not_left_by_a_job(tmp_path: Path) -> None:
    """Where a job took long, the files that a trace reads and writes were taken for some that the job had left."""
    begun, listed = threading.Event(), threading.Event()

    def trace() -> str:
        assert launcher.TRACING.locked()
        begun.set()
        return ""

    class Lock:
        def __enter__(self) -> None:
            listed.set()

        def __exit__(self, *error: object) -> None:
            assert listed.is_set()

    with mock.patch.object(launcher, "traces", trace), traced(tmp_path / "traces", 0.0):
        begun.wait()
    assert (tmp_path / "traces").exists()
    with mock.patch.object(training, "TRACING", Lock()):
        open_files()
    assert listed.is_set()


def test_a_trace_keeps_nothing_alive() -> None:
    """A job was said to leave payloads: a trace held the frames of a step that had ended, while it read sources."""
    begun, end = threading.Event(), threading.Event()
    locals_: list[ref[torch.Tensor]] = []

    def run() -> None:
        local = torch.ones(1)
        locals_.append(ref(local))
        begun.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    alive: list[bool] = []
    read = linecache.getline

    def getline(*args: Any) -> str:
        end.set()
        thread.join()
        alive.append(locals_[0]() is not None)
        return read(*args)

    with mock.patch.object(linecache, "getline", getline):
        traces()
    end.set()
    assert set(alive) == {False}


def test_traces_of_threads_that_run_are_safe() -> None:
    """Threads enter and leave functions all the time; with `faulthandler.dump_traceback_later` this crashes."""
    stop = threading.Event()

    def enter(depth: int) -> int:
        return depth and 1 + enter(depth - 1)

    def run() -> None:
        while not stop.is_set():
            enter(100)

    threads = [threading.Thread(target=run, name=f"busy-{number}") for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        found = [traces() for _ in range(100)]
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()
    assert all(f"busy-{number}:\n" in text for text in found for number in range(4))
    assert any("return depth and 1 + enter(depth - 1)" in text for text in found)
