"""CUDA sources as one text."""

import re

import pytest

from actstore.base import source
from actstore.codecs import names
from actstore.codecs.dispatch import KernelCodec
from actstore.errors import KernelUnavailable
from actstore.kernels.cuda import codecs
from tests.oracles import find


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
    text, digest = source.read("one.cu")
    assert re.findall(r"int (\w+);", text) == ["common", "more", "one"]
    assert "#include <x>" in text
    assert 'include "' not in text

    source.read.cache_clear()
    (csrc / "common.cuh").write_text("#pragma once\nint changed;\n")
    assert source.read("one.cu").digest != digest


def test_a_wheel_comes_first(csrc):
    wheel = csrc.parent / "actstore" / "_csrc"
    for folder in (csrc, wheel):
        folder.mkdir(parents=True)
        (folder / "common.cuh").touch()
    assert source.folder() == wheel


def test_missing_sources(csrc):
    with pytest.raises(KernelUnavailable, match="Reinstall actstore"):
        source.folder()


def test_every_codec_has_a_page():
    """Its name stands in the title of one, as in ``# zmask, topk, nm``."""
    titles = [page.read_text().partition("\n")[0] for page in source.folder().glob("*.md")]
    assert set(names()) <= {name for title in titles for name in title.removeprefix("# ").split(", ")}


@pytest.mark.parametrize("name", sorted({c.kernel_name for c in find.variants() if isinstance(c, KernelCodec)}))
def test_every_kernel_has_a_source_and_a_launch(name):
    assert 'include "' not in source.read(f"{name}.cu").text
    assert name in codecs.__all__
