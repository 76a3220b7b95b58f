"""Kernels in numba's cache on disk, which several processes fill at once."""

import os
import subprocess
import sys
import textwrap

import pytest

FACTORY = """
    import numpy as np
    from actstore.kernels.cpu.language import get, kernel, put, u8_at

    def factory(step, twice):
        @kernel
        def run(source, target, numel, key, extra, first, last):
            for i in range(first, last):
                put(u8_at(target), i, get(u8_at(source), i) + (2 * step if twice else step))

        return run

    source, found = np.zeros(8, np.uint8), []
    for step, twice in ((3, False), (5, False), (5, True)):
        target = np.zeros(8, np.uint8)
        factory(step, twice)(source.ctypes.data, target.ctypes.data, 8, 0, 0, 0, 8)
        found.append(target[0])
    print(*found)
"""


def test_each_kernel_of_a_factory_has_an_index_of_its_own(tmp_path):
    """numba writes an index without a lock: with one index, two processes could exchange two kernels."""
    (tmp_path / "main.py").write_text(textwrap.dedent(FACTORY))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for _ in ("compiled", "read from the cache"):
        done = subprocess.run(
            [sys.executable, "main.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout.split() == ["3", "5", "10"], done.stderr
        assert len(list(tmp_path.rglob("*.nbi"))) == 3


AT_ONCE = """
    import sys
    from actstore.kernels.cpu.language import get, kernel, put, u8_at

    def factory(step):
        @kernel
        def run(source, target, numel, key, extra, first, last):
            for i in range(first, last):
                put(u8_at(target), i, get(u8_at(source), i) + step)

        return run

    factory(1)  # opens the cache
    print("ready", flush=True)
    sys.stdin.readline()
    print(sum(factory(2).stats.cache_misses.values()))
"""


def test_processes_that_need_a_kernel_at_once_compile_it_once(tmp_path):
    (tmp_path / "main.py").write_text(textwrap.dedent(AT_ONCE))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    both = [
        subprocess.Popen(
            [sys.executable, "main.py"],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    assert sorted(process.communicate()[0] for process in both) == ["0\n", "1\n"]


EVERYTHING = """
    import sys
    import torch
    from actstore.codecs.dispatch import KernelCodec
    from actstore.kernels.cpu import language
    from tests.codecs.contract import cases
    from tests.oracles import find
    from tests.oracles.samples import EVERY_DTYPE

    made, compiled = [], language._compiled
    language._compiled = lambda run: made.append(compiled(run)) or made[-1]
    for case in cases(find.variants(), EVERY_DTYPE):
        codec, name = case.values
        if isinstance(codec, KernelCodec) and (sys.argv[1:] or not case.marks):
            codec.kernels("cpu", getattr(torch, name), torch.device("cpu"))
    print(len(made), *{kernel.py_func.__qualname__ for kernel in made if sum(kernel.stats.cache_misses.values())})
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chosen", [(), pytest.param(("slow cases, too",), marks=pytest.mark.slow)], ids=len)
def test_a_second_process_compiles_nothing(chosen):
    """A kernel whose factory closed over a compiled function would never be found on disk."""
    for _ in ("what no test has compiled yet", "read from the cache"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(EVERYTHING), *chosen],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
    number, *missed = done.stdout.split()
    assert int(number) > 100
    assert missed == []
