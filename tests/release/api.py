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
    "actstore.tiers": ["DONE", "Cpu", "Device", "Slot", "Ticket", "Tier", "too_late"],
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
        for name, member in sorted(_members_of(value).items()):
            yield from _member(f"  .{name}", member)
    elif inspect.isfunction(value) or inspect.ismethod(value):
        yield f"def {path}{_signature(value)}"
    else:
        yield path


def _members_of(kind: type) -> dict[str, Any]:
    """What a class has of its own, and of bases that have no public name."""
    public = {value for _, value in members()}
    bases = [base for base in kind.__mro__[1:] if base.__module__.startswith("actstore") and base not in public]
    return {name: member for base in (*reversed(bases), kind) for name, member in vars(base).items() if name[0] != "_"}


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
