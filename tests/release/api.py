"""The public interface as text: ``python -m tests.release.api`` writes it to api.txt, where a change is seen."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "api.txt"
EVERYTHING = ("actstore", "actstore.codecs", "actstore.policy", "actstore.testing")
PARTS = {
    "actstore.devices": ["Cpu", "Device"],
    "actstore.base.ticket": ["DONE", "Ticket"],
    "actstore.tiers": ["Slot", "Tier", "too_late"],
}


def members() -> Iterator[tuple[str, Any]]:
    """Each public name, once, and what it is."""
    seen = set[int]()
    for name, chosen in {**dict.fromkeys(EVERYTHING), **PARTS}.items():
        module = import_module(name)
        for member in sorted(chosen or module.__all__):
            value = getattr(module, member)
            if id(value) not in seen or not callable(value):
                yield f"{name}.{member}", value
            seen.add(id(value))


def public() -> str:
    """A line for each public name, its signature, and what its class has."""
    return "\n".join([*(line for member in members() for line in described(*member)), ""])


def described(path: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        yield f"class {path}({bases}){_signature(value)}"
        for name, member in sorted(vars(value).items()):
            if not name.startswith("_"):
                yield from _member(f"  .{name}", member)
    elif inspect.isfunction(value) or inspect.ismethod(value):
        yield f"def {path}{_signature(value)}"
    else:
        yield path


def _member(name: str, member: Any) -> Iterator[str]:
    if isinstance(member, property):
        yield f"{name} -> {inspect.get_annotations(member.fget).get('return')}"
    elif isinstance(member, classmethod | staticmethod):
        yield f"{name}{_signature(member.__func__)} ({type(member).__name__})"
    elif inspect.isfunction(member):
        yield f"{name}{_signature(member)}"


def _signature(value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, tuple | BaseException):
        return f"({', '.join(getattr(value, '_fields', ()))})"
    return str(inspect.signature(value))


def main() -> None:
    FILE.write_text(public())


if __name__ == "__main__":
    main()
