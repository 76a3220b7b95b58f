"""Callbacks for training frameworks: one module each, which imports its framework."""
