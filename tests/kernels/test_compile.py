"""Every CUDA source compiles for every architecture that we name, without a warning, and no kernel spills.

`make test-slow` compiles all of them. csrc/registers.md has a digest of each source as it was when it last compiled.
"""

from __future__ import annotations

import re

import pytest

from tests.kernels import nvcc

COMPILER = nvcc.compiler()
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function 'two' for 'sm_100a'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""


def kernels_on_the_page(name: str) -> set[str]:
    """Those that csrc/registers.md lists for a source."""
    _, _, section = nvcc.PAGE.read_text().partition(f"\n## {name}.cu\n")
    return set(re.findall(r"^\| (\w+) \| \d", section.partition("\n## ")[0], re.MULTILINE))


@pytest.mark.parametrize("name", nvcc.sources())
def test_the_page_is_of_the_present_sources(name: str) -> None:
    assert nvcc.digest(name) in nvcc.PAGE.read_text(), "python -m tests.kernels.nvcc compiles it, and writes the page"


@pytest.mark.parametrize(
    ("name", "architectures"),
    [("raw", ("90",)), *(pytest.param(name, nvcc.ARCHITECTURES, marks=pytest.mark.slow) for name in nvcc.sources())],
)
def test_compiles_without_spills(name: str, architectures: tuple[str, ...]) -> None:
    if COMPILER is None:
        pytest.skip("needs nvcc: pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime")
    figures = nvcc.compile_source(name, COMPILER, architectures)
    assert figures
    assert not nvcc.spills(figures)
    for by_arch in figures.values():
        assert list(by_arch) == list(architectures)
        assert all(0 < found["registers"] <= 255 for found in by_arch.values())
    assert set(figures) == kernels_on_the_page(name), "python -m tests.kernels.nvcc writes csrc/registers.md anew"


def test_what_ptxas_says_is_read() -> None:
    assert [line.partition(":")[0] for line in nvcc.spills(nvcc.read(LOG))] == ["one for sm_90"]
    assert nvcc.read(LOG) == {
        "one": {"90": {"stack": 8, "spill": 16, "registers": 255}},
        "two": {"100": {"stack": 0, "spill": 0, "registers": 32}},
    }


def test_a_source_that_does_not_compile_is_an_error(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    if COMPILER is None:
        pytest.skip("needs nvcc")
    monkeypatch.setattr(nvcc, "BUILD", tmp_path)
    monkeypatch.setattr(nvcc.source, "read", lambda name: nvcc.source.TranslationUnit("unknown x;", ""))
    with pytest.raises(AssertionError, match="unknown"):
        nvcc.compile_source("bad", COMPILER)
    assert not list(tmp_path.glob("*.json"))
