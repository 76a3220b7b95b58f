"""The planner: quality and speed of its plans."""
