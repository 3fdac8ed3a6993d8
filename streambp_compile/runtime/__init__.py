"""What runs a plan: loops over chunks, checks of masks, whose a gradient is, and the simulation of memory."""
