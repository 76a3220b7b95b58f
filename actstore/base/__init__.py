"""Modules that depend on nothing but PyTorch and `actstore.errors`."""
