"""Plans: the fastest decisions for each unit of a model under a budget."""
