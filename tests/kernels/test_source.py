"""CUDA sources as one text, and that they compile."""

import re
import shutil
import subprocess

import pytest

from actstore.codecs import names
from actstore.errors import KernelUnavailable
from actstore.kernels import source

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_PACKAGE", tmp_path / "actstore")
    for function in (source.folder, source.read):
        function.cache_clear()
    yield tmp_path / "csrc"
    for function in (source.folder, source.read):
        function.cache_clear()


def test_includes_are_written_out_once(csrc):
    csrc.mkdir()
    (csrc / "common.cuh").write_text("#pragma once\nint common;\n")
    (csrc / "more.cuh").write_text('#include "common.cuh"\nint more;\n')
    (csrc / "one.cu").write_text(
        '// one\n#include "more.cuh"  // text\n  # include "common.cuh"\n#include <x>\nint one;\n'
    )
    text, digest = source.read("one")
    assert re.findall(r"int (\w+);", text) == ["common", "more", "one"]
    assert "#include <x>" in text
    assert 'include "' not in text

    source.read.cache_clear()
    (csrc / "common.cuh").write_text("#pragma once\nint changed;\n")
    assert source.read("one").digest != digest


def test_a_wheel_comes_first(csrc):
    wheel = csrc.parent / "actstore" / "_csrc"
    for folder in (csrc, wheel):
        folder.mkdir(parents=True)
        (folder / "common.cuh").touch()
    assert source.folder() == wheel


def test_missing_sources(csrc):
    with pytest.raises(KernelUnavailable, match="reinstall actstore"):
        source.folder()


@pytest.mark.parametrize("name", names())
def test_every_codec_has_a_source_and_a_page(name):
    assert 'include "' not in source.read(name).text
    assert (source.folder() / f"{name}.md").read_text().startswith(f"# {name}\n")


@pytest.mark.parametrize("name", names())
def test_compiles_without_spills(name, tmp_path):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    unit = tmp_path / f"{name}.cu"
    unit.write_text(source.read(name).text)
    targets = [f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}" for arch in ARCHITECTURES]
    flags = ("-std=c++17", "-ftz=true", "-Xptxas", "-v", "-Werror", "all-warnings", "-fatbin")
    done = subprocess.run(
        [compiler, *flags, *targets, "-o", str(tmp_path / "out"), str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert len(spills) >= len(ARCHITECTURES)
    assert set(spills) == {("0", "0", "0")}, done.stderr
