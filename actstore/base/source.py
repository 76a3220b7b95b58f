"""Sources in `csrc/`: the text of a translation unit with its includes written out, and a digest of it."""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from actstore.errors import KernelUnavailable

_PACKAGE = Path(__file__).resolve().parents[1]
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.MULTILINE)


class TranslationUnit(NamedTuple):
    """One translation unit: its text and the sha256 of that text."""

    text: str
    digest: str


@cache
def folder() -> Path:
    """Return the folder of the sources: inside an installed wheel, else beside the package in a checkout.

    Raises
    ------
    KernelUnavailable : the sources are in neither place
    """
    places = (_PACKAGE / "_csrc", _PACKAGE.parent / "csrc")
    for place in places:
        if (place / "common.cuh").is_file():
            return place
    raise KernelUnavailable(f"the sources of csrc/ are in none of {', '.join(map(str, places))}. Reinstall actstore.")


@cache
def read(file: str) -> TranslationUnit:
    """Read the source of `file`, such as ``"int8.cu"``.

    Notes
    -----
    CuPy's cache of compiled kernels does not see included files; written out, they are part of its key.
    """
    text = _inline(folder() / file, set())
    return TranslationUnit(text, sha256(text.encode()).hexdigest())


def _inline(path: Path, seen: set[Path]) -> str:
    """Return the text of a file. The first quoted include of a file is replaced by its text, later ones by nothing."""
    if path in seen:
        return ""
    seen.add(path)
    text = path.read_text(encoding="utf-8").replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda match: _inline(path.parent / match.group(1), seen), text)
