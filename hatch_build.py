"""The parts of a wheel that the build makes: its long description, and on demand the allocator of CPU tensors."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n\n?", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)[^)]*\)")


class LongDescription(MetadataHookInterface):
    """README.md, with the text of links to files in place of the links, and without pictures."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = LINK.sub(r"\1", PICTURE.sub("", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class AllocatorLibrary(BuildHookInterface[Any]):
    """The allocator of CPU tensors, compiled for the PyTorch of the build where ACTSTORE_BUILD_ALLOCATOR=1 asks for it.

    Where such a wheel is installed beside that version of PyTorch, no compiler is needed. It is for one platform.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard" or os.environ.get("ACTSTORE_BUILD_ALLOCATOR") != "1":
            return
        sys.path.insert(0, self.root)
        from actstore.base import source
        from actstore.devices import cpu_memory

        command = cpu_memory.compiler()
        if command is None:
            raise RuntimeError(
                "ACTSTORE_BUILD_ALLOCATOR=1: no C++ compiler. Install one, or build without the variable"
            )
        code = source.read("cpu_allocator.cpp")
        folder = Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        made = cpu_memory.build(command, code.text, folder / cpu_memory.library_name(code.digest))
        build_data["force_include"][str(made)] = f"actstore/_csrc/{made.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{re.sub('[^a-z0-9_]', '_', sysconfig.get_platform())}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        for made in Path(self.directory).glob("cpu_allocator-*.so"):
            made.unlink()
