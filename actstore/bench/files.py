"""Checks of the files that a command will write, before it runs for minutes, and of results that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from actstore.display.text import short
from actstore.errors import MALFORMED, ActstoreError, ConfigError


def check_writable(path: Path | None, option: str) -> None:
    """Check that the file can be written, before the run. It leaves no new file.

    Raises
    ------
    ConfigError : the file cannot be written
    """
    if path is None:
        return
    existed = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}. Choose a file that can be written.") from error
    if not existed:
        path.unlink()


def check_plot(path: Path | None) -> None:
    """Check that the suffix names a kind of picture, and that matplotlib is installed.

    Raises
    ------
    ConfigError : the suffix is not .png, .svg or .pdf; or matplotlib is not installed
    """
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: give a file that ends in .png, .svg or .pdf.")
    if path is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed. Run pip install 'actstore[bench]'.")


@contextmanager
def reading(*files: Path) -> Iterator[None]:
    """Read results inside: what is wrong in them is one line, as they may be edited or from strangers.

    Raises
    ------
    ConfigError : a field is missing, or not what it must be
    """
    try:
        yield
    except ActstoreError:
        raise
    except MALFORMED as error:
        names = " or ".join(map(str, files))
        raise ConfigError(
            f"{names}: not a result of actstore bench ({short(error)}). Give a file that its --json made."
        ) from None
