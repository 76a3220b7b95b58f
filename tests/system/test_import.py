"""What `import actstore` loads, and what a policy adds; each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONAL = ["cupy", "numba", "llvmlite", "bitsandbytes", "kvikio", "scipy", "matplotlib", "rich", "typer"]
COMPILERS = ["torch._dynamo", "torch._inductor"]
LAZY_ROOMS = ["accuracy", "auto", "compiled", "inspection", "plan"]
MAX_MODULES = 115  # each takes 0.4 ms of CPU time
MAX_DATACLASSES = 30  # each takes 0.5 ms


def loaded(code):
    """Run code in a process of its own, after torch; return the modules that it loaded, and its dataclasses."""
    script = f"""
import dataclasses, json, sys
import torch
before, made, plain = set(sys.modules), [], dataclasses._process_class
def counted(cls, *args, **kwargs):
    made.append(f"{{cls.__module__}}.{{cls.__qualname__}}")
    return plain(cls, *args, **kwargs)
dataclasses._process_class = counted
{code}
print(json.dumps([sorted(set(sys.modules) - before), made]))
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return json.loads(run.stdout)


def rooms_of(modules):
    return {name.split(".")[1] for name in modules if name.startswith("actstore.")}


def test_importing_actstore_loads_few_modules():
    modules, dataclasses = loaded("import actstore")
    own = [name for name in modules if name.split(".")[0] == "actstore"]
    assert len(own) <= MAX_MODULES, own
    assert len(dataclasses) <= MAX_DATACLASSES, dataclasses
    assert not {*OPTIONAL, *COMPILERS} & {*modules}
    assert not {*LAZY_ROOMS} & rooms_of(modules)
    foreign = {name.split(".")[0] for name in modules} - {"actstore", *sys.stdlib_module_names}
    assert foreign <= {"torch"}, foreign


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ("int8", set()),
        ("raw @ disk", {"actstore.tiers.disk"}),
        ("recompute", {"actstore.recompute.recomputed_module"}),
        ("auto(1GiB)", {"actstore.auto.controller", "actstore.plan.plan"}),
    ],
)
def test_a_policy_loads_what_it_needs(policy, parts):
    modules, _ = loaded(f"""
import actstore
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
store = actstore.ActivationStore(model, {policy!r}, min_bytes=0, observe=[actstore.SampleErrors(every=0)])
with store:
    loss = model(torch.ones(2, 8)).sum()
loss.backward()
""")
    optional = {
        "auto.controller",
        "plan.plan",
        "recompute.recomputed_module",
        "tiers.disk",
        "tiers.group",
        "session.report",
    }
    assert {f"actstore.{name}" for name in optional} & {*modules} == parts
    assert not {"compiled", "inspection"} & rooms_of(modules)
    assert not {*COMPILERS} & {*modules}


def test_a_policy_loads_what_it_needs_under_fake_tensors():
    modules, _ = loaded("""
import actstore
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    actstore.ActivationStore(torch.nn.Sequential(torch.nn.Linear(2, 2)), "0 : recompute(int8)")
    import actstore.recompute.operators  # asks PyTorch for the gradient of a tie
""")
    assert "actstore.recompute.operators" in modules


def test_public_names_are_imported_when_they_are_used():
    import actstore

    assert all(getattr(actstore, name) is not None for name in actstore.__all__)
    assert {*actstore.__all__} <= {*dir(actstore)}
    with pytest.raises(AttributeError, match=r"actstore.*nothing"):
        _ = actstore.nothing
