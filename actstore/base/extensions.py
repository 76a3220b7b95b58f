"""Codecs and tiers of other packages, found by the entry points of their distributions.

A package offers them in its pyproject.toml::

    [project.entry-points."actstore.codecs"]
    bf16 = "example_codec:Bf16"

    [project.entry-points."actstore.tiers"]
    shelf = "example_codec:Shelf"

The name is the word of the policy text. actstore reads nothing before a policy names a word that is not its own, and
its own words always win.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from typing import Any

from actstore.errors import ConfigError

CODECS = "actstore.codecs"
TIERS = "actstore.tiers"

modules = set[str]()  # of the classes that were loaded


def names(group: str) -> tuple[str, ...]:
    """Return the names that the installed packages offer in a group."""
    return tuple(sorted(entry_points(group=group).names))


def load(group: str, name: str, base: type) -> Any:
    """Return the subclass of `base` that an installed package offers as `name`; None where no package does.

    Raises
    ------
    ConfigError : several packages offer the name, or the offered object cannot be imported, or is not such a class
    """
    return _load(group, name, base) if name in names(group) else None


@cache
def _load(group: str, name: str, base: type) -> Any:
    points = sorted(entry_points(group=group, name=name), key=_source)
    if len(points) > 1:
        raise ConfigError(
            f"{name!r} is offered by {' and by '.join(map(_source, points))}. Uninstall all but one of these packages.",
            name=name,
        )
    [point] = points
    try:
        found = point.load()
    except Exception as error:  # whatever a module may raise when it is imported
        raise ConfigError(
            f"{name!r} cannot be loaded: {type(error).__name__}: {error}. "
            f"Repair or uninstall its package: {_source(point)}.",
            name=name,
        ) from error
    wrong = None
    if not isinstance(found, type) or not issubclass(found, base):
        wrong = f"{found!r} must be a subclass of {base.__module__}.{base.__name__}"
    elif isabstract(found):
        missing = sorted(name for name in dir(found) if getattr(getattr(found, name), "__isabstractmethod__", False))
        wrong = f"{found.__name__} does not define {', '.join(missing)}"
    elif getattr(found, "name", None) != name:
        wrong = f"{found.__name__}.name is {getattr(found, 'name', None)!r}, and must be {name!r}, as the entry point"
    if wrong:
        raise ConfigError(
            f"{name!r} cannot be used: {wrong}. Repair or uninstall its package: {_source(point)}.", name=name
        )
    modules.add(found.__module__)
    return found


def source(group: str, name: str) -> str:
    """Describe the entry point that a loaded class comes from, for messages."""
    [point] = entry_points(group=group, name=name)
    return _source(point)


def _source(point: EntryPoint) -> str:
    package = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
    return f"the entry point '{point.name} = {point.value}' in the group {point.group} of {package}"
