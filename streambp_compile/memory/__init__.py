"""Limits of a step's memory, and plans for a chain of regions that keep within them."""
