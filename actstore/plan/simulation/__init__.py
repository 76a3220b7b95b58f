"""The parts of the simulator: events, what a device does in order, its copies."""
