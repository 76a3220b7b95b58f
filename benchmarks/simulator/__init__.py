"""Simulated training steps on machines that are not here."""
