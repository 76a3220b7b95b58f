"""The solver behind plans: chains of layers, their timeline, and the search for the best choice."""
