"""The long run: `make bench-all`."""
