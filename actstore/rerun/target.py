"""The model and the training step from a user's file or module."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from torch.nn import Module

from actstore.errors import ActstoreError, ConfigError

MAKE_STEP = "make_step"
EXAMPLE = """\
def make_step():
    model = MyModel()
    x, y = one_batch()  # the same at every call of step
    def step():
        return loss_function(model(x), y)  # the loss; or run backward here too
    return model, step"""


@dataclass(frozen=True)
class Target:
    """A model, its training step as `actstore.check_gradients` takes it, and the same step on other batches."""

    name: str
    model: Module
    step: Callable[..., Any]
    others: tuple[Callable[..., Any], ...] = ()


def read_target(target: str, made: Any) -> Target:
    """Return the model and the step from the result of the user's function.

    Raises
    ------
    ConfigError : it made something else
    """
    match made:
        case (Module() as model, step) if callable(step):
            return Target(target, model, step)
        case (Module() as model, step, [*others]) if callable(step) and all(map(callable, others)):
            return Target(target, model, step, tuple(others))
        case _ if callable(made) and isinstance(getattr(made, "model", None), Module):
            return Target(target, made.model, made)
    raise ConfigError(
        f"{target} returned {type(made).__name__}, neither (model, step) nor a step with an attribute `model`. "
        f"Write it so:\n\n{EXAMPLE}"
    )


def load(target: str, arguments: Sequence[str] = ()) -> Target:
    """Import a file or a module, and call the function that makes the model and the step.

    The parameters, errors and notes are those of `find_maker`; the function takes no arguments.
    """
    return read_target(target, find_maker(target, arguments)())


def find_maker(target: str, arguments: Sequence[str] = ()) -> Callable[..., Any]:
    """Import a file or a module, and return its function that makes the model and the step.

    Parameters
    ----------
    target : ``path.py:make_step`` or ``my_module:make_step``; the name may be left out. The function
        returns ``(model, step)``, or a step that has the model as its attribute `model`; a list of steps on other
        batches may come third, ``(model, step, [step, ...])``, to measure the noise of the gradients
    arguments : the script's arguments, set in `sys.argv` as if Python had started the script with them

    Raises
    ------
    ConfigError : the file, module or function does not exist, or the function returns something else. A file that does
        not define the function is not run
    Any error of the user's own code

    Notes
    -----
    The folder of the file, or the current folder, comes first in `sys.path`, as under ``python path.py`` and
    ``python -m my_module``. Both stay so: the step may import more when it runs.
    """
    where, separator, name = target.rpartition(":")
    if not separator:
        where, name = target, MAKE_STEP
    sys.argv = [where, *arguments]
    module = _run_file(Path(where), name) if where.endswith(".py") else _import_module(where)
    make = getattr(module, name, None)
    if not callable(make):
        raise _missing(where, name)
    found: Callable[..., Any] = make
    return found


@contextmanager
def users_code(script: str, before: str) -> Iterator[None]:
    """Run the user's code; show its error as a traceback and one line, and exit with code 2. actstore's errors pass.

    Parameters
    ----------
    before : the work that an early exit prevents, for the message
    """
    try:
        yield
    except (ActstoreError, KeyboardInterrupt):
        raise
    except SystemExit as error:  # its own code may be 0, which means success
        traceback.print_exc()
        typer.echo(
            f"actstore: {script} ended the program (SystemExit: {error.code}) before {before}. Put what it "
            'runs by itself under: if __name__ == "__main__":',
            err=True,
        )
        raise typer.Exit(2) from error
    except BaseException as error:
        traceback.print_exc()
        typer.echo(f"actstore: {script} raised {type(error).__name__}, and so the command has no result", err=True)
        raise typer.Exit(2) from error


def _run_file(path: Path, name: str) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give a file such as train.py:{MAKE_STEP}.") from error
    if not _defines(ast.parse(source, str(path)), name):
        raise _missing(str(path), name)
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # pickle and dataclasses look modules up here
    spec.loader.exec_module(module)
    return module


def _defines(tree: ast.Module, name: str) -> bool:
    """Return whether a file seems to define this name at its top level, by its syntax tree alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # an import inside the user's module failed
        raise ConfigError(
            f"no module is called {name!r} here. Give a file such as train.py:{MAKE_STEP}, or run this in the "
            "folder of the module."
        ) from error


def _missing(where: str, name: str) -> ConfigError:
    return ConfigError(
        f"{where} has no function {name!r}, which makes a model and one step of its training. Without it the training "
        f"cannot be run twice from one point. Write it:\n\n{EXAMPLE}"
    )
