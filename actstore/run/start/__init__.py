"""Folder for PYTHONPATH: Python imports `sitecustomize` from it when a process starts."""
