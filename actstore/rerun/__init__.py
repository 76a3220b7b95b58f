"""A user's training step, run again from one state."""
