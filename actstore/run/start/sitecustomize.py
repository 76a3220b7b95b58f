"""Start of a process that a run's script has started: actstore joins once the process has imported torch."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _TorchFinder(MetaPathFinder):
    """Finder that lets torch load as always, and then starts the stores of this process."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loader of torch that starts the stores when the module is complete."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        importlib.import_module("actstore.run.script").join()


def _run_other_sitecustomize() -> None:
    """Import the module that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    if __name__ != "sitecustomize":
        return
    path, this = sys.path[:], sys.modules.pop("sitecustomize")
    sys.path[:] = [folder for folder in path if os.path.abspath(folder) != here]
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this
    finally:
        sys.path[:] = path


_run_other_sitecustomize()
if "ACTSTORE_RUN" in os.environ:
    sys.meta_path.insert(0, _TorchFinder())
