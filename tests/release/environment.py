"""Virtual environments as pip would make them, filled from the packages of the running one: no network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIRED = ("torch", "numpy", "typer", "rich")


def call(*command: object, cwd: Path, fails: bool = False) -> str:
    """Run a command and return what it printed, errors included."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (run.returncode != 0) == fails, run.stdout
    return run.stdout


class Environment:
    """A virtual environment with a wheel, what it requires, and `extra` packages of the running environment.

    Attributes
    ----------
    python : its interpreter
    """

    def __init__(self, folder: Path, wheel: Path, *extra: str) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        call(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        [self.packages] = (folder / "venv" / "lib").glob("python*/site-packages")
        self.lend(*REQUIRED, *extra)
        call(
            *(sys.executable, "-m", "pip", "--python", self.python, "install", "--no-deps", "--no-index", wheel),
            cwd=folder,
        )

    def lend(self, *names: str) -> None:
        """Link these packages of the running environment, and what they require, into this one."""
        for name in closure(names):
            for link, place in self._links(name):
                if not link.exists():
                    link.symlink_to(place)

    def take_back(self, *names: str) -> None:
        """Remove the links to these packages."""
        for name in names:
            for link, _ in self._links(name):
                link.unlink(missing_ok=True)

    def _links(self, name: str) -> Iterator[tuple[Path, Path]]:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            yield self.packages / top, Path(found.locate_file(top))

    def run(self, *arguments: object, fails: bool = False) -> str:
        """What Python prints there, far from the repository."""
        return call(self.python, "-I", *arguments, cwd=self.folder, fails=fails)


def closure(names: tuple[str, ...]) -> set[str]:
    """The distributions, and all that they require here."""
    found, left = set[str](), list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found.add(name)
            wanted = map(Requirement, distribution(name).requires or ())
            left += [need.name for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found
