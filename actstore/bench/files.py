"""Checks of the files that a command will write, before it runs for minutes, and of results that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from actstore.display.text import short
from actstore.errors import MALFORMED, ActstoreError, ConfigError


def check_outputs(**files: Path | None) -> None:
    """Check that the files can be written, by the names of their options, before the run. No new file is left.

    Raises
    ------
    ConfigError : a file cannot be written; the suffix of a `plot` is not .png, .svg or .pdf, or matplotlib, which draws
        it, is not installed
    """
    for option, path in files.items():
        if path is None:
            continue
        existed = path.exists()
        try:
            with path.open("a"):
                pass
        except OSError as error:
            raise ConfigError(f"--{option} {path}: {error.strerror}. Choose a file that can be written.") from error
        if not existed:
            path.unlink()
    plot = files.get("plot")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {plot}: give a file that ends in .png, .svg or .pdf.")
    if plot is not None and find_spec("matplotlib") is None:
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
