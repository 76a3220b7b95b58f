"""The rows of the benchmark: their names, and what each needs to run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from actstore.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """One way to train the workload.

    Attributes
    ----------
    name : as the table shows it
    kind : plain | peer | ours
    policy : text for ActivationStore; rows of ours only
    package : a package that must be installed for it
    """

    name: str
    kind: str
    policy: str = ""
    package: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def missing(self) -> str:
        """Why this row cannot run here; empty where it can."""
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return ""


PLAIN = Row("plain", "plain")
CHECKPOINT = Row("torch checkpoint", "peer")
SAVE_ON_CPU = Row("save_on_cpu", "peer")
BITSANDBYTES = Row("bitsandbytes 8-bit", "peer", package="bitsandbytes")
_OURS = (
    "raw @ host",
    "raw @ disk",
    "expack",
    "int8",
    "int8 @ host",
    "int8 @ disk",
    "int4",
    "recompute",
    "recompute(raw @ disk)",
    "recompute(int8)",
)
ROWS = (PLAIN, CHECKPOINT, SAVE_ON_CPU, BITSANDBYTES, *(Row(text, "ours", text) for text in _OURS))


def parse_policies(options: list[str]) -> list[Row]:
    """Rows from ``NAME=TEXT`` options.

    Raises
    ------
    ConfigError : no equals sign, an empty half, or a name that is taken
    PolicyError : TEXT does not parse
    """
    from actstore.policy import parse

    rows: list[Row] = []
    taken = {row.name for row in ROWS}
    for option in options:
        name, equals, text = (part.strip() for part in option.partition("="))
        if not (equals and name and text):
            raise ConfigError(f"--policy {option!r} is not NAME=TEXT; write for example --policy 'mine=int8 @ disk'")
        if name in taken:
            raise ConfigError(f"--policy {option!r}: a row is already called {name!r}; choose another name")
        taken.add(name)
        parse(text)
        rows.append(Row(name, "ours", text))
    return rows


def select(rows: list[Row], names: list[str]) -> list[Row]:
    """Those of `rows` that `names` lists, plain always first and included; all where `names` is empty.

    Raises
    ------
    ConfigError : a name that no row has; near ones are listed
    """
    known = {row.name: row for row in rows}
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
            raise ConfigError(f"no row is called {name!r}; near ones: {', '.join(near)}")
    return [row for row in rows if row == PLAIN or not names or row.name in names]
