"""Execution of a plan: loops over chunks, checks of masks, ownership of gradients, simulation of memory."""
