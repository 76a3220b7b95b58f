"""Long run: `make bench-all`."""
