"""Measurements: live memory to the byte, gradient differences, and the table of peers."""
