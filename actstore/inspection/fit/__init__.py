"""Prediction of a step's memory under policies: the step runs dry, and its operators compute nothing."""
