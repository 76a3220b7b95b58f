"""Installed packages, made on the spot: the metadata that pip would write."""

from __future__ import annotations

from pathlib import Path

import pytest


def offer(folder: Path, patch: pytest.MonkeyPatch, package: str, points: dict[str, dict[str, str]]) -> None:
    """Have `package` 1.0 stand in `folder`, which is searched for modules, with these entry points by group."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {package}\nVersion: 1.0\n")
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in members.items())
        for group, members in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections))
    patch.syspath_prepend(folder)
