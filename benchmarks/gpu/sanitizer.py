"""Run of each kernel of each codec under compute-sanitizer: ``python -m benchmarks.gpu.sanitizer``.

Outside of it (``--trips``) this is a small program: every codec with every option that its oracle lists encodes and
decodes tensors of odd sizes. PyTorch's allocator is switched off, so that a byte past a buffer is past its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from actstore.base.spec import Spec
from actstore.codecs.dispatch import KernelCodec
from benchmarks.gpu import place as gpu_place
from benchmarks.gpu.place import Place
from tests.oracles import find
from tests.oracles.samples import DTYPES, EVERY_DTYPE, elements

TOOLS = ("memcheck", "racecheck", "synccheck")
SHAPES = ((1,), (33, 65), (2, 1025))
KEY = 0x1234_5678_9ABC_DEF0
FINDING_EXIT_CODE = 9  # exit code of the sanitizer for a finding


def trips(place: Place) -> int:
    """Encode and decode on the device; return the number of trips."""
    done, device = 0, place.device
    for codec in find.variants()[:: place.sized(1, 12)]:
        if not isinstance(codec, KernelCodec):
            continue
        dtypes = [dtype for dtype in EVERY_DTYPE if codec.accepts(getattr(torch, dtype))]
        for dtype in [dtype for dtype in dtypes if dtype in DTYPES] or dtypes[:1]:
            for shape in SHAPES:
                source = elements("normal", dtype, torch.Size(shape).numel()).reshape(shape).to(device)
                payload = torch.empty(codec.size(Spec.of(source)).nbytes, dtype=torch.uint8, device=device)
                codec.encode(source, payload, KEY)
                codec.decode(payload, torch.empty_like(source), KEY)
                done += 1
    return done


def sanitizer() -> str | None:
    """Return the program; None where CUDA's tools are not installed."""
    roots = [root for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    places = [os.environ.get("PATH", ""), *(f"{root}/bin" for root in roots)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def run(program: str, path: Path | None = None) -> int:
    """Run each tool in turn; return the exit code, and a line with the findings."""
    environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    said: dict[str, str] = {}
    failed = False
    for tool in TOOLS:
        command = [
            program,
            "--tool",
            tool,
            "--error-exitcode",
            str(FINDING_EXIT_CODE),
            sys.executable,
            "-m",
            "benchmarks.gpu.sanitizer",
            "--trips",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        print(done.stdout, done.stderr, flush=True)
        failed |= done.returncode != 0
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", done.stdout + done.stderr)
        said[tool] = summary[-1] if summary else f"exit code {done.returncode}"
        if path is not None:
            path.write_text(json.dumps({"said": said, "clean": not failed, "tools": list(TOOLS)}) + "\n")
        print("; ".join(f"{name}: {words}" for name, words in said.items()), flush=True)
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu_place.add_options(parser)
    parser.add_argument("--json", type=Path, help="write what each tool said to this file")
    parser.add_argument("--trips", action="store_true", help="run the kernels, without the sanitizer")
    options = parser.parse_args()
    place = gpu_place.place_of(options)
    if options.trips or not place.on_gpu:
        done = trips(place)
        place.synchronize()
        print(f"{done} trips{'' if options.trips else ' on a CPU, without the sanitizer'}")
        return 0
    program = sanitizer()
    if program is None:
        print("not run: compute-sanitizer is not installed (it comes with the CUDA toolkit)")
        return 0
    return run(program, options.json)


if __name__ == "__main__":
    sys.exit(main())
