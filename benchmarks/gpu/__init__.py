"""Benchmarks and tests that need a GPU: `make gpu`."""
