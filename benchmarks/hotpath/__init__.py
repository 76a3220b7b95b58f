"""Python cost of one saved tensor."""
