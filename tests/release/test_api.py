"""A change of the public interface is deliberate."""

import inspect
import re
from difflib import unified_diff
from importlib import import_module

import pytest

from tests.release.api import EVERYTHING, FILE, members, public


def test_the_public_interface_is_as_recorded():
    recorded, found = FILE.read_text().splitlines(), public().splitlines()
    changes = "\n".join(unified_diff(recorded, found, "recorded", "found", lineterm="", n=0))
    assert not changes, (
        f"the public interface has changed:\n{changes}\nIf that is meant, run `python -m tests.release.api`, and tell "
        "users in CHANGELOG.md; what is taken away is deprecated first (CONTRIBUTING.md)"
    )


@pytest.mark.parametrize(("path", "value"), list(members()), ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_public_says_what_it_is(path, value):
    assert not inspect.isroutine(value) or value.__doc__
    assert not inspect.isclass(value) or value.__doc__


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_public_name_is_there_once(name):
    module = import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, member) for member in module.__all__)


def test_the_page_of_what_stays_has_every_name_and_command():
    import actstore
    from actstore.cli.commands import app

    page = (FILE.parents[2] / "docs/reference/stability.md").read_text(encoding="utf-8")
    commands = [each.name or each.callback.__name__ for each in (*app.registered_commands, *app.registered_groups)]
    assert [name for name in (*actstore.__all__, *commands) if not re.search(rf"\b{name}\b", page)] == []
