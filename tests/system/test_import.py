import json
import subprocess
import sys
from pathlib import Path

OPTIONAL = ["cupy", "numba", "llvmlite", "bitsandbytes", "kvikio", "scipy", "matplotlib", "rich", "typer"]


def test_importing_actstore_loads_no_optional_package():
    script = f"""
import json, sys, torch
before = set(sys.modules)
import actstore
print(json.dumps([name for name in {OPTIONAL} if name in sys.modules and name not in before]))
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert json.loads(run.stdout) == []
