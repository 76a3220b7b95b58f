"""A log line during a long compilation of kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Any

from numba.core import event

from actstore.kernels.cpu import cache

log = logging.getLogger("actstore")

NOTICE_AFTER_S = 1.0  # of compilation in one process


class Notice:
    """The log line, once in a process. numba's lock lets one thread at a time call `begin` and `end`.

    Parameters
    ----------
    folder : returns the folder of the cache
    clock, timer : ``time.perf_counter`` and ``threading.Timer``, or the stand-ins of tests
    """

    def __init__(
        self, folder: Callable[[], Path], clock: Callable[[], float] = perf_counter, timer: Callable[..., Any] = Timer
    ) -> None:
        self._folder, self._clock, self._make_timer = folder, clock, timer
        self._spent_s = self._began_s = 0.0
        self._said = False
        self._timer: Any = None

    def begin(self) -> None:
        """Start the timer when the compiler begins; the line comes when it has taken `NOTICE_AFTER_S` in all."""
        if self._said:
            return
        self._began_s = self._clock()
        self._timer = self._make_timer(max(0.0, NOTICE_AFTER_S - self._spent_s), self._say)
        self._timer.daemon = True
        with suppress(RuntimeError):  # the system gives no thread: no line then
            self._timer.start()

    def end(self) -> None:
        """Stop the timer when the compiler is done."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._spent_s += self._clock() - self._began_s

    def _say(self) -> None:
        self._said = True
        log.warning("compiling CPU kernels (once; cached in %s)", self._folder())  # INFO is not shown by default


notice = Notice(cache.folder)


class _Misses(event.Listener):
    """A listener for numba's compilation of one function: not for a hit in its cache, nor for inlined functions."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func is self._run:
            notice.begin()

    def on_end(self, event: Any) -> None:
        if event.data["dispatcher"].py_func is self._run:
            notice.end()


@contextmanager
def compiling(run: Any) -> Iterator[None]:
    """Tell `notice` when numba compiles `run` inside."""
    with event.install_listener("numba:compile", _Misses(run)):
        yield
