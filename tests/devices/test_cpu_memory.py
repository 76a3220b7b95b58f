"""The allocator of CPU tensors: blocks that are used again, counts, and everything that can be in its way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from actstore import ActivationStore
from actstore.base import source
from actstore.devices import cpu_memory
from actstore.errors import ConfigError

ROOT = Path(__file__).parents[2]
MIB = 2**20

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or cpu_memory.compiler() is None, reason="needs Linux and a C++ compiler"
)


def test_trim_returns_free_blocks_of_the_heap() -> None:
    run("""
        from actstore.bench.memory import rss_bytes
        from actstore.devices import cpu_memory
        blocks = [bytes([1]) * 50_000 for _ in range(4_000)]
        del blocks[::2]  # the others keep glibc from returning its top
        before = rss_bytes()
        cpu_memory.trim()
        assert before - rss_bytes() > 60 * 2**20, (before, rss_bytes())
    """)


def run(code: str, **environment: str) -> str:
    """What a process of its own prints, whose exit code is 0."""
    names = {key: value for key, value in os.environ.items() if key != cpu_memory.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**names, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture
def pages() -> None:
    assert str(cpu_memory.install()) == "pages"
    cpu_memory.trim()


def test_a_block_serves_the_next_tensor_of_its_size(pages: None) -> None:
    first = torch.empty(3 * MIB, dtype=torch.uint8)
    address = first.data_ptr()
    del first
    assert cpu_memory.idle_bytes() >= 3 * MIB
    assert torch.empty(3 * MIB - 1000, dtype=torch.uint8).data_ptr() == address


def test_a_much_smaller_tensor_gets_another_block(pages: None) -> None:
    first = torch.empty(8 * MIB, dtype=torch.uint8)
    address = first.data_ptr()
    del first
    assert torch.empty(2 * MIB, dtype=torch.uint8).data_ptr() != address


@pytest.mark.parametrize("nbytes", [1, 1000, 64 * 1024, 5 * MIB + 3])
def test_tensors_are_counted(pages: None, nbytes: int) -> None:
    before = cpu_memory.memory_allocated()
    assert before is not None
    cpu_memory.reset_peak()
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    found = cpu_memory.memory_allocated()
    assert found is not None
    assert nbytes <= found - before <= nbytes * 1.01 + 68 * 1024
    del tensor
    assert cpu_memory.memory_allocated() == before
    assert cpu_memory.max_memory_allocated() == found


@pytest.mark.parametrize("nbytes", [1, 1000, 64 * 1024 - 1, 64 * 1024, 300_001, 2 * MIB, 5 * MIB + 3])
def test_no_tensor_takes_more_than_the_most(pages: None, nbytes: int) -> None:
    sizes = [nbytes + nbytes // 16, nbytes + nbytes // 10, 2 * nbytes]
    most = cpu_memory.most_counted(nbytes, sizes)
    assert most <= nbytes + max(nbytes // cpu_memory.REUSE_SHARE, cpu_memory.HUGE_GRAIN_NBYTES)
    others = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    others.clear()
    counts = [cpu_memory.memory_allocated() or 0]
    tensors = []
    for _ in range(70):  # more than there are offsets
        tensors.append(torch.empty(nbytes, dtype=torch.uint8))
        counts.append(cpu_memory.memory_allocated() or 0)
    taken = [after - before for before, after in pairwise(counts)]
    assert nbytes <= min(taken)
    assert max(taken) <= most
    if nbytes >= 2 * MIB:
        assert max(taken) > nbytes + nbytes // 20, "no tensor took a larger block"
    assert cpu_memory.most_counted(0) == 0


def test_the_most_during_a_call_and_the_high_water_of_others(pages: None) -> None:
    kept = torch.empty(8 * MIB, dtype=torch.uint8)
    del kept
    high = cpu_memory.max_memory_allocated()

    def call() -> torch.Tensor:
        work = torch.empty(3 * MIB, dtype=torch.uint8)
        return torch.empty(work.numel() // 3, dtype=torch.uint8)

    found = cpu_memory.most_during(call)
    assert found is not None
    assert 3 * MIB <= found <= cpu_memory.most_counted(3 * MIB)
    assert cpu_memory.max_memory_allocated() == high


def test_large_tensors_begin_at_different_lines_of_a_page(pages: None) -> None:
    tensors = [torch.empty(4 * MIB, dtype=torch.uint8) for _ in range(16)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert len({tensor.data_ptr() % 4096 for tensor in tensors}) == 16


def test_idle_blocks_do_not_exceed_what_was_in_use_at_once(pages: None) -> None:
    """One size after the other: without a bound, each would leave blocks that the next one cannot use."""
    for size in (1, 2, 3, 5, 8, 12):
        tensors = [torch.empty(size * MIB, dtype=torch.uint8) for _ in range(60 // size)]
        del tensors
        assert cpu_memory.idle_bytes() <= 60 * MIB * 1.2 + 32 * MIB


def test_idle_blocks_go_when_they_were_not_needed_for_two_windows(pages: None) -> None:
    library = cpu_memory._library
    tensors = [torch.empty(4 * MIB, dtype=torch.uint8) for _ in range(40)]
    del tensors
    assert cpu_memory.idle_bytes() > 100 * MIB
    library.actstore_set_window(0)
    try:
        for _ in range(3):
            torch.empty(MIB, dtype=torch.uint8)
        assert cpu_memory.idle_bytes() <= 36 * MIB
    finally:
        library.actstore_set_window(30 * 10**9)


def test_closing_a_store_returns_idle_pages(pages: None) -> None:
    store = ActivationStore(torch.nn.Linear(8, 8), "int8")
    freed = torch.empty(16 * MIB, dtype=torch.uint8)
    del freed
    assert cpu_memory.idle_bytes() >= 16 * MIB
    store.close()
    assert cpu_memory.idle_bytes() == 0


def test_what_pytorch_does_with_memory(pages: None) -> None:
    x = torch.arange(100_000.0)
    assert x.clone().equal(x)
    x.resize_(300_000)
    assert x[:100_000].equal(torch.arange(100_000.0))
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    moved = torch.arange(50_000).share_memory_()
    assert moved.is_shared()
    lazy = torch._lazy_clone(torch.ones(100_000))
    lazy += 1
    assert lazy.sum() == 200_000
    assert torch.from_numpy(torch.ones(100_000).numpy()).sum() == 100_000


def test_the_stores_own_pages_are_counted(pages: None) -> None:
    before = cpu_memory.memory_allocated()
    assert before is not None
    mapped = cpu_memory.CountedPages(8 * MIB)
    assert cpu_memory.memory_allocated() == before + 8 * MIB
    del mapped
    assert cpu_memory.memory_allocated() == before


def test_no_python_code_runs_when_the_stores_pages_go(pages: None) -> None:
    """Python would print an interrupt that fell into it, and go on."""
    mapped = cpu_memory.CountedPages(8 * MIB)
    before, called = cpu_memory.memory_allocated(), list[str]()
    assert before is not None
    sys.setprofile(lambda frame, event, _: called.append(f"{event} {frame.f_code.co_name}"))
    del mapped
    sys.setprofile(None)
    assert [event for event in called if event.startswith("call")] == []
    assert cpu_memory.memory_allocated() == before - 8 * MIB


@pytest.mark.parametrize("nbytes", [MIB, 4 * MIB, 4 * MIB + 100])
def test_pages_count_what_was_asked_for(pages: None, nbytes: int) -> None:
    """A block is larger than its tensor, by up to 64 KiB: that is no activation."""
    first = cpu_memory.pages_bytes()
    for _ in range(2):  # a new block, and one that is used again
        tensors = [torch.empty(nbytes - less, dtype=torch.uint8) for less in (0, 3)]
        assert cpu_memory.pages_bytes() == first + 2 * nbytes - 3
        del tensors
        assert cpu_memory.pages_bytes() == first


def test_processes_that_are_forked() -> None:
    assert (
        run("""
            import os, threading, torch
            from torch.utils.data import DataLoader
            from actstore.devices import cpu_memory
            assert str(cpu_memory.install()) == "pages"
            torch.set_num_threads(1)  # a fork loses the threads of OpenMP
            end = threading.Event()

            def busy():
                while not end.is_set():
                    torch.ones(100_000)

            threads = [threading.Thread(target=busy) for _ in range(3)]
            for thread in threads:
                thread.start()
            kept = torch.full((200_000,), 7.0)
            data = [torch.full((50_000,), float(i)) for i in range(40)]
            for _ in range(2):
                found = [batch for batch in DataLoader(data, batch_size=4, num_workers=2)]
                assert [batch[0, 0].item() for batch in found] == [4.0 * i for i in range(10)]
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    made = [torch.ones(100_000 + i) for i in range(20)]
                    os._exit(0 if kept.sum() == 1_400_000 and all(t.mean() == 1 for t in made) else 1)
                assert os.waitpid(child, 0)[1] == 0
            end.set()
            for thread in threads:
                thread.join()
            print("right")
        """)
        == "right"
    )


def test_an_exit_with_live_tensors_and_threads() -> None:
    assert (
        run("""
            import threading, time, torch
            from actstore.devices import cpu_memory
            cpu_memory.install()

            ready = threading.Barrier(4)

            def holds():
                mine = [torch.ones(100_000) for _ in range(10)]
                ready.wait()
                time.sleep(1000)

            for _ in range(3):
                threading.Thread(target=holds, daemon=True).start()
            ready.wait()
            kept = torch.ones(10**6)
            cycle = [torch.ones(10**6)]
            cycle.append(cycle)
            print("right")
        """)
        == "right"
    )


def test_a_refused_allocation_is_an_out_of_memory_error_and_leaves_the_counts() -> None:
    assert (
        run("""
            import torch
            from actstore.devices import cpu_memory
            cpu_memory.install()
            kept = torch.ones(10**6)
            before = cpu_memory.memory_allocated()
            try:
                torch.empty(2**60, dtype=torch.uint8)
            except torch.OutOfMemoryError as error:
                print(str(error).splitlines()[0])
            assert cpu_memory.memory_allocated() == before and kept.sum() == 10**6
        """)
        == f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {2**60} bytes"
    )


STATUS = "from actstore.devices import cpu_memory; print(cpu_memory.install())"


@pytest.mark.parametrize("choice", ["pages", "threshold", "system"])
def test_the_environment_chooses(choice: str) -> None:
    assert run(STATUS, ACTSTORE_CPU_ALLOCATOR=choice) == choice


def test_a_store_on_a_cpu_gives_it_to_pytorch_and_an_import_does_not() -> None:
    said = run("""
        import logging, torch, actstore
        from actstore.devices import cpu_memory
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=__import__("sys").stdout)
        assert cpu_memory.status() is None
        for _ in range(2):
            actstore.ActivationStore(torch.nn.Linear(2, 2), "int8")
        assert str(cpu_memory.status()) == "pages"
    """)
    assert said == "allocator of CPU tensors: pages"


def test_unknown_and_late_choices() -> None:
    assert "must be one of pages, threshold, system" in run(f"""
        import os
        os.environ["ACTSTORE_CPU_ALLOCATOR"] = "pools"
        try:
            {STATUS}
        except Exception as error:
            print(error)
    """)
    cpu_memory.install()
    with pytest.raises(ConfigError, match="the process uses 'pages' since its first store"):
        cpu_memory.choose("system")


def test_another_malloc_is_left_alone(tmp_path: Path) -> None:
    code = tmp_path / "other.c"
    code.write_text(
        "#include <stddef.h>\nextern void *__libc_malloc(size_t);\n"
        "void *malloc(size_t nbytes) { return __libc_malloc(nbytes); }\n"
    )
    library = tmp_path / "libtcmalloc.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", str(code), "-o", str(library)], check=True)
    assert run(STATUS, LD_PRELOAD=str(library)) == "system (malloc is that of libtcmalloc.so, which uses blocks again)"


def test_without_a_compiler_glibc_is_told_to_return_large_blocks(tmp_path: Path) -> None:
    said = run(STATUS, XDG_CACHE_HOME=str(tmp_path), PATH="/nowhere", CXX="")
    assert said.startswith("threshold (no C++ compiler: none of c++, g++, clang++ is installed.")


def test_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    broken.chmod(0o755)
    said = run(STATUS, XDG_CACHE_HOME=str(tmp_path), CXX=str(broken))
    assert said == f"threshold ({broken} cannot compile cpu_allocator.cpp: out of order)"
    assert [path.name for path in (tmp_path / "actstore").iterdir()] == []


def test_the_library_is_compiled_once(tmp_path: Path) -> None:
    for _ in range(2):
        assert run(STATUS, XDG_CACHE_HOME=str(tmp_path)) == "pages"
        (made,) = (tmp_path / "actstore").iterdir()
        assert made.name == cpu_memory.library_name(source.read("cpu_allocator.cpp").digest)
        times = {made.stat().st_mtime_ns}
    assert len(times) == 1


@pytest.mark.parametrize(
    ("way", "sanitizer"), [("threads", "thread"), ("threads", "address,undefined"), ("fork", "undefined")]
)
def test_many_threads_under_a_sanitizer(tmp_path: Path, way: str, sanitizer: str) -> None:
    """The other sanitizers do not follow a fork of several threads.

    A child waits for ever for a lock of the address sanitizer's allocator that another thread had at the fork.
    """
    program = tmp_path / "stress"
    build = [*(cpu_memory.compiler() or []), "-std=c++20", "-g", "-O1", f"-fsanitize={sanitizer}", f"-I{ROOT / 'csrc'}"]
    build.append("-fno-sanitize-recover=undefined")  # or it would say what it finds and go on
    made = subprocess.run(
        [*build, str(Path(__file__).with_name("pages_stress.cpp")), "-o", str(program), "-lpthread"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "cannot find" in made.stderr:
        pytest.skip(f"the {sanitizer} sanitizer is not installed")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([str(program), way], capture_output=True, text=True, check=False, timeout=120)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address space is not one that the thread sanitizer knows")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_the_sanitizers_would_see_a_bug(tmp_path: Path) -> None:
    """A block that is given again while it is in use: planted in the header."""
    header = (ROOT / "csrc" / "pages.hpp").read_text()
    planted = re.sub(r"order_\.erase\(found->second\);\s*by_room_\.erase\(found\);", "", header)
    assert planted != header
    (tmp_path / "pages.hpp").write_text(planted)
    program = tmp_path / "stress"
    build = [*(cpu_memory.compiler() or []), "-std=c++20", "-O1", f"-I{tmp_path}"]
    source_file = str(Path(__file__).with_name("pages_stress.cpp"))
    subprocess.run([*build, source_file, "-o", str(program), "-lpthread"], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
