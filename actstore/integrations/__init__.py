"""actstore in training frameworks: a module for each, which imports its framework when it is itself imported."""
