"""`ActivationStore`: its arguments, its report, its advice, and `make_plan`."""
