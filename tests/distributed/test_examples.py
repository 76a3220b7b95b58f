"""The examples run as they say on their first line, and each proves that its store changes nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN, LAUNCH = (Path(sys.executable).with_name(name) for name in ("torchrun", "accelerate"))
SLOW = pytest.mark.slow


def run(*command, **variables):
    """What a command writes; an error where it fails."""
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | own | variables,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def ranks(count, name, *arguments, **variables):
    """An example on `count` processes. A free port: other examples may run beside this one."""
    return run(TORCHRUN, "--standalone", "--nproc-per-node", count, EXAMPLES / f"{name}.py", *arguments, **variables)


def proven(output):
    return "20 steps: all losses and" in output and "weights equal bit for bit to plain training" in output


def test_every_example_is_run_here():
    text = Path(__file__).read_text()
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"common", "llama"}  # parts of the others
    assert {name for name in names if f'"{name}"' not in text} == set()
    for name in names:
        first = (EXAMPLES / f"{name}.py").read_text().partition("\n")[0]
        assert f"examples/{name}.py" in first, first


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("pipeline", 2),
        *(
            pytest.param(*row, marks=SLOW)
            for row in (
                ("ddp", 2),
                ("fsdp", 2),
                ("fsdp", 4),
                ("tensor_parallel", 2),
                ("expert_parallel", 2),
                ("expert_parallel", 4),
                ("context_parallel", 2),
                ("context_parallel", 4),
                ("pipeline", 4),
                ("sharded_tensor_parallel", 4),
            )
        ),
    ],
)
def test_on_several_processes(name, count):
    assert proven(ranks(count, name))


def test_budgets_of_a_machine_are_shared():
    output = ranks(2, "budgets")
    assert proven(output)
    assert "disk: 0 B now, peak 8.0 MiB" in output  # half of the budget
    assert "kept: no room in host > disk" in output


@SLOW
def test_a_killed_rank_changes_no_weight(tmp_path):
    whole = ranks(2, "elastic", tmp_path / "whole")
    torchrun = [TORCHRUN, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, EXAMPLES / "elastic.py"]
    killed = run(*torchrun, tmp_path / "killed", "--kill", 1, 10, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    said = [re.search(r"steps (\d+) to 20, restarts (\d), weights (\w{64})", text) for text in (whole, killed)]
    assert [each[1] for each in said] == ["0", "8"]
    assert [each[2] for each in said] == ["0", "1"]
    assert said[0][3] == said[1][3]


@SLOW
@pytest.mark.timeout(600)  # DeepSpeed compiles an extension
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(stage):
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    assert proven(ranks(2, "deepspeed_zero", "--stage", stage, DS_ACCELERATOR="cpu"))


@SLOW
@pytest.mark.parametrize("mode", ["full", "every second layer", "selective"])
def test_a_training_file_goes_on_from_its_checkpoint(mode):
    assert proven(ranks(4, "titan", "--mode", mode))


@SLOW
def test_accelerate():
    pytest.importorskip("accelerate", reason="needs accelerate")
    assert proven(ranks(2, "accelerate_launch"))
    assert proven(run(LAUNCH, "launch", "--cpu", EXAMPLES / "accelerate_launch.py"))


@SLOW
@pytest.mark.parametrize("name", ["plain", "compiled"])
def test_on_one_process(name):
    assert proven(run(sys.executable, EXAMPLES / f"{name}.py"))
