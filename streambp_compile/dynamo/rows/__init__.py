"""Rewrites of rows that are read or written by a mask, an index or a slice."""
