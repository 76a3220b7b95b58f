"""The command line: `actstore`, or `python -m actstore`."""
