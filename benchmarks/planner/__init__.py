"""Planner: quality and speed of its plans."""
