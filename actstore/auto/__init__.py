"""The policy "auto": measures steps, plans, runs the plan, and watches it."""
