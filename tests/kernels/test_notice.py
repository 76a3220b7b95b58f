"""The line in the log about a long compilation, and the folder of numba's cache."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("numba")

from actstore.kernels.cpu.notice import NOTICE_AFTER_S, Notice

LINE = "compiling CPU kernels (once; cached in /somewhere)"


class Timers:
    """Timers that ring when the clock of the test has come that far, and the clock."""

    def __init__(self):
        self.now_s = 0.0
        self.set = []

    def __call__(self, after_s, ring):
        timer = Timer(self, self.now_s + after_s, ring)
        self.set.append(timer)
        return timer

    def pass_(self, seconds):
        self.now_s += seconds
        for timer in self.set:
            if timer.runs and timer.at_s < self.now_s:
                timer.runs = False
                timer.ring()


class Timer:
    def __init__(self, timers, at_s, ring):
        self.timers, self.at_s, self.ring, self.runs = timers, at_s, ring, False

    def start(self):
        self.runs = True

    def cancel(self):
        self.runs = False


@pytest.fixture
def timers():
    return Timers()


@pytest.fixture
def notice(timers):
    return Notice(lambda: Path("/somewhere"), lambda: timers.now_s, timers)


def compile_for(notice, timers, seconds):
    notice.begin()
    timers.pass_(seconds)
    notice.end()


def test_a_long_compilation_is_said_once_while_it_runs(notice, timers, caplog):
    notice.begin()
    timers.pass_(0.9 * NOTICE_AFTER_S)
    assert caplog.messages == []
    timers.pass_(0.2 * NOTICE_AFTER_S)
    assert caplog.messages == [LINE]
    notice.end()
    compile_for(notice, timers, 5 * NOTICE_AFTER_S)
    assert caplog.messages == [LINE]
    assert caplog.records[0].name == "actstore"


def test_short_compilations_add_up(notice, timers, caplog):
    compile_for(notice, timers, 0.6 * NOTICE_AFTER_S)
    timers.pass_(100 * NOTICE_AFTER_S)  # of other work
    assert caplog.messages == []
    compile_for(notice, timers, 0.6 * NOTICE_AFTER_S)
    assert caplog.messages == [LINE]


def test_a_short_one_is_not_said(notice, timers, caplog):
    compile_for(notice, timers, 0.9 * NOTICE_AFTER_S)
    timers.pass_(100 * NOTICE_AFTER_S)
    assert caplog.messages == []


def test_a_process_that_may_not_start_threads_compiles_all_the_same(timers, monkeypatch, caplog):
    def refuse(_timer):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Timer, "start", refuse)
    compile_for(Notice(lambda: Path("/somewhere"), lambda: timers.now_s, timers), timers, 9 * NOTICE_AFTER_S)
    assert caplog.messages == []


KERNEL = """
    from actstore.kernels.cpu.language import cache, kernel, notice

    notice.NOTICE_AFTER_S = 0.0

    def factory(step):
        @kernel
        def run(source, target, numel, key, extra, first, last):
            pass

        return run

    factory(1)
    factory(2)
    print(cache.folder())
"""


def run(tmp_path, code, **environment):
    (tmp_path / "main.py").write_text(textwrap.dedent(code))
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, env=given, capture_output=True, text=True, check=True
    )


def test_plain_python_shows_the_line_and_a_warm_cache_gives_none(tmp_path):
    cold, warm = (run(tmp_path, KERNEL, NUMBA_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2))
    folder = cold.stdout.strip()
    assert folder.startswith(str(tmp_path / "cache"))
    assert cold.stderr == f"compiling CPU kernels (once; cached in {folder})\n"
    assert warm.stdout.strip() == folder
    assert warm.stderr == ""


def test_the_cache_lies_where_the_variable_says_and_knows_its_kernels(tmp_path):
    done = run(
        tmp_path,
        """
        import torch
        from pathlib import Path
        from actstore.codecs import Bit1
        from actstore.kernels.cpu import cache
        print(cache.cached("bit1"), cache.cached("int8"))
        Bit1().kernels("cpu", torch.float32, torch.device("cpu"))
        print(cache.cached("bit1"), cache.cached("int8"))
        print(len(list(cache.folder().glob("*.nbi"))))
        (old,) = list(cache.folder().glob("bit1*encode*.nbi"))[:1]
        digest = cache.short_digest(Path(cache.__file__).with_name("bit1.py"))
        old.rename(old.with_name(old.name.replace(digest, "0" * 8)))
        print(cache.cached("bit1"))
        """,
        NUMBA_CACHE_DIR=str(tmp_path / "cache"),
    )
    before, after, files, changed = done.stdout.split("\n")[:4]
    assert before == "0 0"
    assert int(after.split()[0]) == int(files) > 1
    assert after.split()[1] == "0"
    assert int(changed) == int(files) - 1  # a kernel of another source does not count


def test_without_a_folder_pytorch_does_it_and_says_what_to_set(tmp_path):
    done = run(
        tmp_path,
        """
        import warnings
        import torch
        from numba.core import caching

        def refuse(self):
            raise OSError("Read-only file system")

        for locator in caching.CacheImpl._locator_classes:
            locator.ensure_cache_path = refuse
        from actstore import encode
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            encode(torch.ones(64), "int8")
        (warning,) = caught
        print(warning.message)
        """,
    )
    assert "int8 runs on cpu as PyTorch operations: numba finds no folder for compiled kernels" in done.stdout
    assert "NUMBA_CACHE_DIR" in done.stdout
