"""Rows of the benchmark: their names and requirements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError

ALL = "all"
ANSWER_LIMIT_S = 900.0
COMPILE_LIMIT_S = 300.0


@dataclass(frozen=True)
class Row:
    """One way to train the workload.

    Attributes
    ----------
    name : its name in the table
    kind : plain | peer | ours
    policy : text for ActivationStore; kind ours only
    package : a package that must be installed for it
    made_by : class in actstore.bench.peers.libraries; kind peer only
    share : budget of a plan, as a fraction of the bytes that plain autograd holds; kind ours only, 0 for no plan
    compiled : compiled parts of the model: blocks | parts (of the blocks) | graph (the whole, with the policy in its
        graphs), or empty; kind ours only
    needs_gpu : the row's behavior without a GPU; empty where it needs none
    usual : whether it runs when the user chooses no rows: few do, to take three minutes on two cores
    limit_s : seconds that an answer may take
    """

    name: str
    kind: str
    policy: str = ""
    package: str = ""
    made_by: str = ""
    share: float = 0.0
    compiled: str = ""
    needs_gpu: str = ""
    usual: bool = True
    limit_s: float = ANSWER_LIMIT_S

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def missing(self, work: Workload) -> str:
        """Return the reason why this row cannot run here; empty where it can."""
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.needs_gpu and not work.on_cuda:
            return f"it moves activations off a GPU; on a CPU {self.needs_gpu}"
        return ""


def _offload(name: str, package: str, made_by: str, without_gpu: str) -> Row:
    return Row(name, "peer", package=package, made_by=made_by, needs_gpu=without_gpu, usual=False)


PLAIN = Row("plain", "plain")
CHECKPOINT = Row("torch checkpoint", "peer", made_by="Checkpoint")
BITSANDBYTES = Row("bitsandbytes 8-bit", "peer", package="bitsandbytes", made_by="BitsAndBytes")
_COMPILE = Row("compile", "peer", made_by="Compiled", usual=False, limit_s=COMPILE_LIMIT_S)
_COMPILERS = (_COMPILE, replace(_COMPILE, name="compile, budget 0.5", made_by="CompiledBudget"))
COMPILERS = frozenset(row.name for row in _COMPILERS)
PEERS = (
    CHECKPOINT,
    Row("checkpoint every k-th", "peer", made_by="EveryKth", usual=False),
    Row("selective checkpoint", "peer", made_by="Selective", usual=False),
    Row("checkpoint_sequential", "peer", made_by="Sequential", usual=False),
    Row("save_on_cpu", "peer", made_by="SaveOnCpu", usual=False),
    BITSANDBYTES,
    *_COMPILERS,
    Row("torch_remat, attention kept", "peer", package="torch_remat", made_by="Remat", usual=False),
    Row("DeepSpeed checkpoint", "peer", package="deepspeed", made_by="DeepSpeed", usual=False),
    _offload("Transformers offload", "", "Offloaded", "the inputs stay where they are"),
    _offload("DeepSpeed cpu_checkpointing", "deepspeed", "DeepSpeedCpu", "its backward fails"),
    _offload("torchtune offload", "torchtune", "Torchtune", "it asks for a CUDA stream and raises"),
    _offload("TRL offload", "trl", "Trl", "it asks for an accelerator and raises"),
)


def _ours(policy: str, *, usual: bool = True) -> Row:
    """Return the row of a policy; its name has commas between rules, since `--rows` splits at semicolons."""
    return Row(policy.replace(";", ","), "ours", policy, usual=usual)


def plan(share: float, compiled: bool = False) -> Row:
    """Return the row of a plan whose budget is this share of plain's saved bytes, `compiled` in the model's graph."""
    row = Row(f"auto {100 * share:g} %", "ours", share=share, usual=False)
    if not compiled:
        return row
    return replace(row, name=f"{row.name} in the graph", compiled="graph", limit_s=COMPILE_LIMIT_S)


_USUAL = ("derive", "raw @ disk", "int8", "int4", "recompute", "recompute(int8)")
_UNUSUAL = (
    "keep",
    "derive(int8)",
    "int8 @ disk",
    "raw @ host",
    "expack",
    "int8 @ host",
    "recompute(raw @ disk)",
    "recompute(segment=2)",
    "@blocks : recompute; * : derive",
)
OURS = (
    *(_ours(text) for text in _USUAL),
    replace(plan(0.5), usual=True),
    *(_ours(text, usual=False) for text in _UNUSUAL),
    plan(0.75),
    plan(0.25),
    Row("recompute, compiled", "ours", "recompute", compiled="parts", usual=False, limit_s=COMPILE_LIMIT_S),
    Row("int8, compiled", "ours", "unprotected int8", compiled="blocks", usual=False, limit_s=COMPILE_LIMIT_S),
    Row("int8 in the graph", "ours", "int8", compiled="graph", usual=False, limit_s=COMPILE_LIMIT_S),
)
ROWS = (PLAIN, *PEERS, *OURS)


def rows_for(policies: tuple[str, ...]) -> list[Row]:
    """Return all rows of a model with these policies of its parts."""
    return [*ROWS, *(_ours(text, usual=False) for text in policies)]


def parse_policies(options: list[str], rows: list[Row]) -> list[Row]:
    """Return rows from ``NAME=TEXT`` options, to run beside `rows`.

    Raises
    ------
    ConfigError : no equals sign, an empty half, or a name that is taken
    PolicyError : TEXT does not parse
    """
    from actstore.policy import parse

    found: list[Row] = []
    taken = {row.name for row in rows} | {ALL}
    for option in options:
        name, equals, text = (part.strip() for part in option.partition("="))
        if not (equals and name and text):
            raise ConfigError(f"--policy {option!r} is not NAME=TEXT. Write for example --policy 'mine=int8 @ disk'.")
        if name in taken:
            raise ConfigError(f"--policy {option!r}: a row is already called {name!r}. Choose another name.")
        taken.add(name)
        parse(text)
        found.append(Row(name, "ours", text))
    return found


def select(rows: list[Row], names: list[str]) -> list[Row]:
    """Return the rows that `names` lists, plain always included and first.

    An empty `names` selects the usual rows; "all" selects every row.

    Raises
    ------
    ConfigError : a name that no row has; near ones are listed
    """
    known = {row.name: row for row in rows}
    for name in names:
        if name not in known and name != ALL:
            near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
            raise ConfigError(f"no row is called {name!r}. Near ones: {', '.join(near)}.")
    if ALL in names:
        return rows
    return [row for row in rows if row == PLAIN or (row.name in names if names else row.usual)]
