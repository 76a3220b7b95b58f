"""The solver of plans: chains of layers, their timeline, and the search for the best choice."""
