"""Regions that run again in backward."""
