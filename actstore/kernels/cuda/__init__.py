"""Kernels for CUDA: compiled from `csrc/` by CuPy and NVRTC, launched on the current stream."""
