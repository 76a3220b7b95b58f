"""The soak ends where it began, and would tell if it did not."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks at the process in /proc")

# Each leaves something behind now and then, in the way that a bug would.
PLANTED = {
    "a handle that forgets to free its payload": (
        "from actstore.store import store; store.Finalizer = lambda *_: None",
        "live bytes",
    ),
    "a buffer that is never given back": (
        "from actstore.transfer.buffers import Buffers\n"
        "give, lost = Buffers.give, []\n"
        "def keep(self, buffer, after, holder=None):\n"
        "    lost.append(buffer.memory.fill_(1))\n"
        "    if holder is not None: holder.buffer = None\n"
        "Buffers.give = keep",
        "memory",
    ),
    "a tier that is not closed": (
        "from actstore.store.tierset import TierSet; TierSet.close = lambda self: kept.append(self)",
        "threads",
    ),
    "a file that keeps its bytes": (
        "from actstore.tiers.file import NamelessFile; NamelessFile.close = lambda self: kept.append(self)",
        "bytes on disk",
    ),
    "parcels that somebody remembers": (
        "from actstore.transfer.traffic import Traffic\n"
        "strand = Traffic.evict\n"
        "def evict(self, parcel):\n"
        "    kept.append(parcel)\n"
        "    strand(self, parcel)\n"
        "Traffic.evict = evict",
        "objects",
    ),
}


def soak(steps: int, planted: str = "") -> subprocess.CompletedProcess[str]:
    script = f"import sys\nfrom tests.system import soak\nkept = []\n{planted}\nsys.exit(soak.main())"
    return subprocess.run(
        [sys.executable, "-c", script, "--steps", str(steps)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_two_thousand_steps_leave_nothing():
    found = soak(2000)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stderr == ""


@pytest.mark.parametrize(
    "name", [*list(PLANTED)[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in list(PLANTED)[1:])]
)
def test_a_planted_leak_is_seen(name):
    planted, what = PLANTED[name]
    found = soak(200, planted)
    assert found.returncode == 1, found.stdout + found.stderr
    assert f"BROKEN {what}" in found.stderr
