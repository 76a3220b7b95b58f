"""Dataclasses from JSON values: each field is checked against its annotation, and an error names the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from actstore.display.text import short
from actstore.errors import ConfigError

T = TypeVar("T")

MAX_NUMBER = 2**62  # no figure of a step comes near


def read_as(kind: type[T], value: Any, where: str = "") -> T:
    """Build a dataclass from the JSON form of its `dataclasses.asdict`. Numbers must be finite and 0 or more.

    Parameters
    ----------
    where : name of the value in errors

    Raises
    ------
    ConfigError : a field is missing, unknown, or not of its type
    """
    found = _read(kind, value, where)
    assert isinstance(found, kind)
    return found


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        return _read(next(one for one in arguments if one is not NoneType), value, where)
    if origin is tuple:
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(_of(list, value, where)))
    if origin is dict:
        items = _of(dict, value, where).items()
        return {key: _read(arguments[1], item, f"{where}[{key!r}]") for key, item in items}
    if is_dataclass(kind):
        return value if type(value) is kind else _dataclass(kind, _of(dict, value, where), where)
    if kind in (int, float):
        return _number(kind, value, where)
    return _of(kind, value, where)


def _dataclass(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    hints, known = _hints(kind), {field.name: field for field in fields(kind)}
    dot = f"{where}." if where else ""
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{dot}{name} is missing.", field=f"{dot}{name}")
    for name in values:
        if name not in known:
            raise ConfigError(f"{dot}{name} is not a field. The fields are {', '.join(known)}.", field=f"{dot}{name}")
    return kind(**{name: _read(hints[name], value, f"{dot}{name}") for name, value in values.items()})


def _number(kind: type, value: Any, where: str) -> Any:
    fits = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not fits or not (isinstance(value, int) or isfinite(value)) or not 0 <= value <= MAX_NUMBER:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{where} is {short(value)}, not {wanted} from 0 to {MAX_NUMBER:.0e}.", field=where)
    return value


def _of(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        wanted = {str: "text", bool: "true or false", list: "a list", dict: "an object"}[kind]
        raise ConfigError(f"{where or 'the file'} is {short(value)}, not {wanted}.", field=where)
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
