"""Rewrites of attention: its calls, keys beside the sequence's own, and matrices of scores."""
