"""The structure and the state of a user's model: names, blocks, units, weights, random generators."""
