"""Compiled kernels and their fallbacks: a module for each codec in `cpu/` and `torch/`, functions of `cuda/codecs.py`.

`cpu` runs on the CPU by numba, `cuda` through CuPy, `torch` anywhere. They write the same bytes.
"""
