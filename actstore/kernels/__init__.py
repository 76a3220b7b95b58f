"""Compiled kernels and their fallbacks: one module per codec and back end, each with `kernels(dtype, **options)`.

`<codec>_cpu` runs on the CPU, `<codec>_cuda` through CuPy, `<codec>_torch` anywhere. They write the same bytes.
"""
