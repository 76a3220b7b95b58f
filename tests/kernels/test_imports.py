"""What is loaded when, and what happens where a compiler is missing; each in a process of its own."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_numba_is_loaded_by_the_first_int8_and_cupy_never():
    run("""
        import sys, torch
        import actstore, actstore.codecs
        from actstore.codecs import Int8, Raw
        loaded = lambda: {"numba", "llvmlite", "cupy"} & set(sys.modules)
        assert not loaded()
        x, out = torch.ones(64), torch.empty(512, dtype=torch.uint8)
        Raw().encode(x, out)
        Raw().decode(out, x)
        assert not loaded()
        Int8().encode(x, out)
        assert loaded() == {"numba", "llvmlite"}
    """)


def test_kernels_leave_scipys_blas_out_until_a_function_of_the_users_needs_it():
    run("""
        import sys, torch
        import numpy as np
        from actstore.codecs import Int8
        Int8().encode(torch.ones(64), torch.empty(512, dtype=torch.uint8))
        assert "numba.np.arraymath" in sys.modules
        assert "scipy.linalg" not in sys.modules
        import numba
        from numba.np import arraymath, linalg
        assert arraymath.ensure_blas is linalg.ensure_blas
        a = np.arange(9.0).reshape(3, 3)
        assert (numba.njit(lambda a: np.dot(a, a))(a) == a @ a).all()
        assert "scipy.linalg.cython_blas" in sys.modules
    """)


def test_without_numba_pytorch_does_it_and_says_so_once():
    run("""
        import sys, torch, warnings
        sys.modules["numba"] = None
        from actstore.codecs import Int8
        x, out, back = torch.linspace(-1, 1, 200), torch.empty(512, dtype=torch.uint8), torch.empty(200)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for codec in (Int8(), Int8(32), Int8()):
                codec.encode(x, out)
                codec.decode(out, back)
        assert (back - x).abs().max() < 0.01
        (warning,) = caught
        assert "int8 runs on cpu as PyTorch operations" in str(warning.message)
        assert "actstore[cpu]" in str(warning.message)
    """)


def test_without_cupy_kernels_for_cuda_say_what_to_install():
    run("""
        import sys
        sys.modules["cupy"] = None
        import torch
        from actstore.errors import KernelUnavailable
        from actstore.kernels.cuda.codecs import int8, raw
        for kernels, options in ((int8, {"group": 128, "round": "nearest", "keep": False}), (raw, {})):
            try:
                kernels(torch.float32, torch.device("cuda", 0), **options)
            except KernelUnavailable as error:
                assert "actstore[cuda" in str(error) and error.package.startswith("cupy-cuda")
            else:
                raise AssertionError
    """)


@pytest.mark.parametrize("device_type", ["meta", "xpu"])
def test_other_devices_run_as_pytorch_operations(device_type):
    run(f"""
        import torch
        from actstore.codecs import Int8, Raw
        from actstore.codecs.dispatch import find_kernels
        for codec in (Raw(), Int8()):
            kernels = find_kernels(codec, torch.float32, torch.device("{device_type}"))
            assert kernels.encode.__module__ == f"actstore.kernels.torch.{{codec.name}}"
    """)
