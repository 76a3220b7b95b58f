"""Figures of README and docs, written into the pages from the files in results/."""
