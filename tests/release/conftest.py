from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.release.environment import Environment, call

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """A folder with the source distribution and the wheel that is built from it, without a network."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="session")
def bare(built, tmp_path_factory) -> Environment:
    """An environment with the wheel and what it requires, and nothing else."""
    [wheel] = built.glob("*.whl")
    return Environment(tmp_path_factory.mktemp("bare"), wheel)
