"""Plans under a budget for compiled regions."""
