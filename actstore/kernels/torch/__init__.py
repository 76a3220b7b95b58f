"""Kernels as PyTorch operations: for every device, and where no compiler is installed."""
