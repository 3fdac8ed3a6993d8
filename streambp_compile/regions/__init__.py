"""Regions of the graph: its cuts, and each region compiled, linked to the others, in parts of a batch."""
