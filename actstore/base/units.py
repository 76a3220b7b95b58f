"""Numbers of bytes as text: parsed and formatted."""

from __future__ import annotations

import os
import re

from actstore.errors import ConfigError

_SCALE = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_LEAST_WITHOUT_UNIT = 4096  # a smaller budget in bytes holds no tensor
_PER_NODE = re.compile(r"(.*?)\s*/\s*node\s*", re.IGNORECASE)
_PATTERN = re.compile(r"\s*(\d+)(?:\.(\d+))?\s*([a-zA-Z]*)\s*")


def parse_nbytes(value: int | str, name: str = "size") -> int:
    """Read a number of bytes: an int, or text such as ``"20GiB"``, ``"1.5 GB"``, ``"4096"``.

    Raises
    ------
    ConfigError : negative, not a number, or an unknown unit; the message says which argument (`name`)
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name}={value!r}: must be a number of bytes. Give an int or text such as '20GiB'.")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{name}={value}: must be 0 or more bytes.")
        return value
    match = _PATTERN.fullmatch(value)
    scale = _SCALE.get(match[3].lower()) if match else None
    if match is None or scale is None:
        raise ConfigError(
            f"{name}={value!r}: must be a number of bytes. Write a number and one of "
            "B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), such as '20GiB'."
        )
    whole, fraction = match[1], match[2] or ""
    nbytes: int = int(whole + fraction) * scale // 10 ** len(fraction)
    return nbytes


def parse_budget(value: int | str, name: str = "budget") -> int:
    """Read a number of bytes for this process; ``"256GiB/node"`` is its equal share among all processes of the node.

    Text such as ``"20"``, a small number without a unit, is refused: it was meant as ``"20GiB"``.

    The environment variable LOCAL_WORLD_SIZE, which torchrun sets, gives the number of processes; by default 1.

    Raises
    ------
    ConfigError : as `parse_nbytes`; the unit is missing; or LOCAL_WORLD_SIZE is not a positive number
    """
    if isinstance(value, str) and value.strip().isdecimal() and 0 < int(value) < _LEAST_WITHOUT_UNIT:
        raise ConfigError(f"{name}={value!r}: must have a unit. Write '{value.strip()}GiB', or an int for bytes.")
    match = _PER_NODE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return parse_nbytes(value, name)
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{name}={value!r} needs the number of processes of this node. LOCAL_WORLD_SIZE={text!r}: must be an int "
            ">= 1. Start with torchrun, set LOCAL_WORLD_SIZE, or give a budget for one process such as '32GiB'."
        )
    return parse_nbytes(match.group(1), name) // int(text)


def round_up(nbytes: int, grain: int) -> int:
    """Return the next multiple of `grain`."""
    return -(-nbytes // grain) * grain


def format_nbytes(nbytes: float) -> str:
    """Format bytes for people, in powers of 1024: ``1536 -> '1.5 KiB'``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
