"""`actstore run` over scripts that know of no store: their results, output, exit codes, reports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
RUN = ["-m", "actstore", "run"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def python(*words, code=0, folder=None):
    """What a Python process prints, output and errors apart."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACTSTORE")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other)


def compare(folder, script, *flags, options, launch=(), run=RUN):
    """Run a script alone and under a run; compare the weights, and return what the run printed to stderr."""
    plain, stored = folder / "plain.pt", folder / "stored.pt"
    python(*launch, SCRIPTS / script, plain, *flags, folder=folder)
    _, said = python(*run, "--min-bytes", "0", *options, SCRIPTS / script, stored, *flags, folder=folder)
    assert equal(torch.load(plain), torch.load(stored))
    return said


def test_a_plain_loop(tmp_path):
    report = tmp_path / "report.json"
    options = ["--policy", "@blocks : recompute", "--every", "2", "--report", report]
    said = compare(tmp_path, "loop.py", options=options)
    assert re.search(r"^body\.blocks\.0-2 x3 .* recompute$", said, re.MULTILINE), said
    assert re.findall(r"^actstore: Model, step (\d+): held .* steps/s$", said, re.MULTILINE) == ["2", "4"]
    [found] = json.loads(report.read_text())
    assert (found["model"], found["steps"], found["policy"]) == ("Model", 6, "@blocks : recompute")
    assert 0 < found["held_bytes"] < 0.2 * found["saved_bytes"]


def test_a_loop_that_calls_parts_of_the_model(tmp_path):
    said = compare(tmp_path, "loop.py", "--parts", options=["--policy", "@blocks : recompute; * : raw @ disk"])
    assert "actstore: Model, 6 steps" in said
    assert re.search(r"^body\.blocks\.0-2 x3 .* recompute$", said, re.MULTILINE), said
    assert re.search(r"^head .* raw @ disk$", said, re.MULTILINE), said


def test_two_models(tmp_path):
    said = compare(tmp_path, "gan.py", options=["--policy", "raw @ disk"])
    assert re.findall(r"^actstore: (\w+), 8 steps", said, re.MULTILINE) == ["Discriminator", "Generator"]


@pytest.mark.parametrize("inside", [False, True], ids=["torchrun in the run", "runs in torchrun"])
def test_processes_that_a_launcher_starts(tmp_path, inside):
    policy, report = ["--policy", "raw @ disk", "--report", tmp_path / "report.json"], tmp_path / "report.json"
    if inside:
        run, options = [*TORCHRUN, *RUN], policy
    else:
        run, options = RUN, [*policy, *TORCHRUN]
    said = compare(tmp_path, "ranks.py", options=options, launch=TORCHRUN, run=run)
    assert said.count("DistributedDataParallel, 3 steps") == 1, "rank 0 tells"
    for path in (report, tmp_path / "report.rank1.json"):
        [found] = json.loads(path.read_text())
        assert found["stored_bytes"] > 0


@pytest.mark.more
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    ("flags", "options", "line"),
    [
        pytest.param([], ["--policy", "recompute"], "", marks=pytest.mark.slow),
        pytest.param(["--checkpointing"], ["--policy", "raw @ disk"], "stays on", marks=pytest.mark.slow),
        (["--checkpointing"], ["--policy", "recompute", "--replace-checkpointing"], "checkpointing is off now"),
    ],
)
def test_the_trainer_of_transformers(tmp_path, flags, options, line):
    said = compare(tmp_path, "trainer.py", *flags, options=options)
    assert line in said
    assert "LlamaForCausalLM, 4 steps" in said


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ultralytics") is None, reason="needs ultralytics")
@pytest.mark.parametrize("policy", ["raw @ disk", "@blocks : recompute"])
def test_ultralytics(tmp_path, policy):
    said = compare(tmp_path, "yolo.py", options=["--policy", policy])
    assert re.findall(r"DetectionModel, (\d) steps", said)[-1] == "3", "two batches, and one for its strides"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
@pytest.mark.parametrize("flags", [[], ["--checkpointing"]], ids=["", "checkpointing"])
def test_trl_grpo(tmp_path, flags):
    said = compare(tmp_path, "grpo.py", *flags, options=["--policy", "raw @ disk"])
    assert said.count("LlamaForCausalLM, 2 steps") == 1, "the reference model has no store"


TRAIN = """
import torch
model = torch.nn.Linear(512, 512)
model(torch.randn(256, 512)).mean().backward()
"""


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (TRAIN + "raise SystemExit(3)", 3, r"Linear, 1 steps"),
        (TRAIN + "raise SystemExit('message')", 1, r"Linear, 1 steps[\s\S]*message"),
        (
            TRAIN + "raise ValueError('wrong')",
            1,
            r'Linear, 1 steps[\s\S]*last\):\n  File ".*script.py", line 5, in <module>',
        ),
        (TRAIN + "raise KeyboardInterrupt", 130, r"Linear, 1 steps[\s\S]*KeyboardInterrupt"),
        (TRAIN.replace("512)\nmodel", "512).eval()\nmodel"), 0, "no model ran forward in training mode"),
        ("print('nothing')", 0, "no model ran forward in training mode"),
    ],
    ids=["exit", "exit with words", "error", "interrupt", "evaluation", "nothing"],
)
def test_ends_of_scripts(tmp_path, text, code, said):
    _, errors = python(*RUN, "--policy", "raw @ disk", script(tmp_path, text), code=code)
    assert re.search(said, errors), errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["missing.py"],
            "actstore: missing.py: no such file. Give a script such as train.py, or a module as -m NAME.\n",
        ),
        ([], "actstore: no script was given. Write actstore run"),
        (["--polcy", "int8", "script.py"], "actstore: --polcy: unknown option."),
        (["--policy", "int9", "script.py"], "int9"),
        (["--policy", "nothing.* : int8", "script.py"], "actstore: pattern 'nothing.*' matches no module"),
        (["--policy", "int8", "--budget", "1GiB", "script.py"], "Give one of them"),
        (["--report", "no/such/folder.json", "script.py"], "--report no/such/folder.json"),
        (["ls"], "must be a Python script"),
    ],
)
def test_what_is_refused_is_one_line(tmp_path, options, said):
    script(tmp_path, TRAIN)
    _, errors = python(*RUN, *options, folder=tmp_path, code=2)
    assert said in errors
    assert "Traceback" not in errors


def test_a_script_is_the_main_module_with_its_own_arguments(tmp_path):
    text = """
import sys, multiprocessing, helper
import torch

class Net(torch.nn.Linear):
    pass

def work(queue):
    queue.put(Net.__module__)

if __name__ == "__main__":
    print(sys.argv[1:], helper.VALUE, sys.path[0] == helper.__file__.rpartition("/")[0])
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
"""
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    path = script(tmp_path, text)
    assert python(*RUN, path, "--policy", "x", "-m", "y")[0] == python(path, "--policy", "x", "-m", "y")[0]
    out, _ = python(*RUN, "-m", "script", "--budget", "z", folder=tmp_path)
    assert out == python("-m", "script", "--budget", "z", folder=tmp_path)[0]


def test_a_forked_process_has_stores_of_its_own(tmp_path):
    text = (
        TRAIN
        + """
import os, sys
child = os.fork()
model(torch.randn(256, 512)).mean().backward()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    )
    _, said = python(*RUN, "--policy", "raw @ disk", script(tmp_path, text))
    assert sorted(re.findall(r"Linear, (\d) steps", said)) == ["1", "2"]


def test_verify_compares_the_first_step_and_goes_on(tmp_path):
    words = ["--min-bytes", "0", "--verify", "--policy"]
    loop = SCRIPTS / "loop.py", tmp_path / "out.pt"
    out, said = python(*RUN, *words, "recompute", *loop)
    assert "Equal: the step with the store is plain training, bit for bit." in said
    assert "trained" in out
    out, said = python(*RUN, *words, "int8", *loop)
    assert "Within tolerance" in said
    assert "trained" in out


def test_inspect_shows_the_lines_of_the_first_step_and_stops(tmp_path):
    out, _said = python(*RUN, "--min-bytes", "0", "--inspect", SCRIPTS / "loop.py", tmp_path / "out.pt")
    assert re.search(r"body\.blocks\.0-2\.mlp\.\d\s+loop.py:20 ", out), out
    assert "To lower the plain peak" in out
    assert "trained" not in out
    assert not (tmp_path / "out.pt").exists()
