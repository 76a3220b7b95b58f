"""Compiled kernels and their fallbacks: a module per codec and back end, with `kernels(dtype, device, **options)`.

`<codec>_cpu` runs on the CPU, `<codec>_cuda` through CuPy, `<codec>_torch` anywhere. They write the same bytes.
"""
