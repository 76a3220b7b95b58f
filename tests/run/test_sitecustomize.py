"""Processes that a run starts: actstore joins after torch, and another `sitecustomize` runs as without it."""

import os
import subprocess
import sys

from actstore.run.settings import START, VARIABLE, Settings


def python(folder, code, **variables):
    path = os.pathsep.join([str(START), str(folder), os.getcwd()])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_another_sitecustomize_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('other')")
    assert python(tmp_path, "import sys, sitecustomize; print('torch' in sys.modules)")[0] == "other\nFalse\n"


def test_a_process_joins_when_it_has_imported_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.delenv(VARIABLE, raising=False)
    Settings(policy="raw @ disk", min_bytes="0").export()
    code = (
        "import sys, torch; print('actstore' in sys.modules); torch.nn.Linear(4, 4)(torch.ones(2, 4)).mean().backward()"
    )
    out, said = python(tmp_path, code, **{VARIABLE: os.environ[VARIABLE]})
    assert out == "True\n"
    assert "actstore: Linear, 1 steps" in said
    assert Settings.inherited() == Settings(policy="raw @ disk", min_bytes="0")
    monkeypatch.delenv(VARIABLE)
    assert python(tmp_path, "import sys, torch; print('actstore' in sys.modules)")[0] == "False\n"
