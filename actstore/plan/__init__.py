"""Planning: which way to wait each layer takes under a budget."""
