"""Graphs so long that freeing them by recursion would overflow the stack."""

import resource
import subprocess
import sys

import pytest

STACK_NBYTES = 2**20

SCRIPT = """
import sys
import torch
from actstore import ActivationStore

x = torch.ones(64, requires_grad=True)
y = x
with ActivationStore(policy=sys.argv[1], min_bytes=0) as store:
    for _ in range(20_000):
        y = y.sin()
loss = y.sum()
del y
loss.backward()
del loss
print("freed", {site.note for site in store.report().sites})
"""


def _small_stack():
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_NBYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))


@pytest.mark.parametrize("policy", ["int8", "raw"])
def test_a_graph_of_many_nodes_is_freed(policy):
    """PyTorch frees nodes that Python has looked at one inside the other: of a long chain only some are looked at."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, policy],
        preexec_fn=_small_stack,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "freed" in done.stdout
    assert "one of more than 2048 in one forward" in done.stdout
