"""Compiled kernels and their fallbacks: a module for each codec in `cpu/` and `torch/`, a function in `cuda/`.

`cpu` runs on the CPU by numba, `cuda` through CuPy, `torch` anywhere. They write the same bytes.
"""
