"""A newcomer's first minutes: the wheel in an empty environment, the first lines of README, what is missing, types."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.release.environment import call
from tests.release.test_wheel import metadata

__all__ = ["metadata"]

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
batches = [(torch.randn(16, 64, 64), torch.randint(10, (16, 64))) for _ in range(2)]
"""
PLANNED = """
store = actstore.ActivationStore(model, "auto(7MiB)")
for x, y in 8 * batches:
    with store:
        loss = model(x, y)
    loss.backward()
print(store.plan)
"""
EXAMPLE = Path(__file__).parent / "example_codec"
EXTENDED = """
import actstore

store = actstore.ActivationStore(model, "bf16 @ shelf")
with store:
    loss = model(*batches[0])
loss.backward()
print(store.report())
"""
NUMBA = "numba is not installed. Run pip install 'actstore[cpu]'."
SCIPY = "no bound: scipy is not installed (pip install 'actstore[plan]')"


def first_code(text: str) -> str:
    """The first block of Python in a page."""
    return re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]


@pytest.mark.promise
def test_the_first_lines_of_readme_run_and_print_the_report(bare, metadata):
    script = bare.folder / "newcomer.py"
    script.write_text(MODEL + first_code(metadata.get_payload()) + PLANNED)
    said = bare.run(script)
    assert re.search(r"^blocks\.0\.attn .* int8$", said, re.MULTILINE), said
    assert re.search(r"^blocks\.0-1\.mlp\S* x2 .* int8$", said, re.MULTILINE)
    held = float(re.search(r"held at the end of forward: ([\d.]+)% of what plain autograd holds", said)[1])
    assert 5 < held < 40
    assert f"int8 runs on cpu as PyTorch operations: {NUMBA}" in said
    assert SCIPY in " ".join(said.split())  # it is wrapped


def test_with_scipy_a_plan_has_a_bound(bare):
    pytest.importorskip("scipy")
    script = bare.folder / "planned.py"
    script.write_text(MODEL + "import actstore\n" + PLANNED)
    bare.lend("scipy")
    try:
        said = bare.run(script)
    finally:
        bare.take_back("scipy")
    assert re.search(r"predicted [\d.]+ ms, bound [\d.]+ ms, within", said), said
    assert "scipy" not in said


def test_the_command_line_runs_scripts_and_names_what_a_picture_misses(bare):
    command = bare.python.with_name("actstore")
    script = bare.folder / "trained.py"
    script.write_text(MODEL + "for x, y in batches:\n    model(x, y).backward()\nprint('trained')\n")
    said = call(command, "run", "--policy", "@blocks : recompute", script, cwd=bare.folder)
    assert re.search(r"^trained$", said, re.MULTILINE), said
    assert re.search(r"^blocks\.0-1 x2 .* recompute$", said, re.MULTILINE), said
    drawn = call(command, "bench", "--plot", "x.png", cwd=bare.folder, fails=True)
    assert "--plot needs matplotlib, which is not installed. Run pip install 'actstore[bench]'" in drawn


USER = """
from collections.abc import Callable

import torch
from torch import Tensor, nn

import actstore
from actstore import ActivationStore, Encode, Host, Keep, Report, Rules, Window
from actstore.codecs import Int8, Zmask
from actstore.policy import Decision, Site, Spec
from actstore.results import Choice, GraphPlan


def policy(site: Site, spec: Spec) -> Decision:
    return Encode(Zmask(Int8(affine=True))) if "mlp" in site.name and spec.dtype is torch.float32 else Keep()


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Report:
    store = ActivationStore(model, policy, tiers=[Host("1GiB"), Window(when_full="keep")])
    for x, y in batches:
        with store as entered:
            loss: Tensor = model(x, y)
        torch.autograd.backward(loss)
        name: str = entered.report().sites[0].site
    rules: Rules = Rules([("head", Keep())], default=Encode(Int8()))
    step: Callable[[int], str] = ActivationStore(model, rules)(lambda count: name * count)
    ratio: float = actstore.encode(torch.zeros(3), "int8").ratio
    plan: actstore.Plan | GraphPlan | Choice | None = store.plan
    return store.report() if plan is None and ratio and step(1) else ActivationStore(model, rules).report()
"""


def test_an_installed_package_offers_its_codec_and_its_tier(bare):
    call(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", bare.folder, EXAMPLE, cwd=bare.folder)
    pip = (sys.executable, "-m", "pip", "--python", bare.python)
    wheel = bare.folder / "example_codec-1.0-py3-none-any.whl"
    call(*pip, "install", "--no-deps", "--no-index", wheel, cwd=bare.folder)
    script = bare.folder / "extended.py"
    script.write_text(MODEL + EXTENDED)
    try:
        said = bare.run(script)
    finally:
        call(*pip, "uninstall", "--yes", "example-codec", cwd=bare.folder)
    assert re.search(r"^blocks\.0-1\.mlp\.1 x2 .* bf16 @ shelf$", said, re.MULTILINE), said
    assert "no codec is called 'bf16'" in bare.run(script, fails=True)


WRONG = """import actstore
from actstore import ActivationStore
store = ActivationStore()
ActivationStore(min_bytes=[1])
actstore.Window(when_full="maybe")
report: int = store.report()
"""


def test_types_reach_a_user_of_the_wheel(bare):
    """mypy, strict, over a program that uses the installed package; each wrong line is one error."""
    pytest.importorskip("mypy")
    config = bare.folder / "mypy.ini"
    config.write_text("[mypy]\nstrict = true\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")  # they take a minute

    def check(text: str, *, fails: bool) -> str:
        (bare.folder / "program.py").write_text(text)
        options = ["--config-file", config, "--cache-dir", "cache", "--python-executable", bare.python]
        return call(sys.executable, "-m", "mypy", *options, "program.py", cwd=bare.folder, fails=fails)

    shutil.copytree(EXAMPLE / "example_codec", bare.folder / "example_codec")
    assert check(USER + "from example_codec import Bf16, Shelf\n", fails=False).startswith("Success: no issues found")
    said = check(WRONG, fails=True)
    assert [int(line.split(":")[1]) for line in said.splitlines()[:-1]] == [4, 5, 6], said
