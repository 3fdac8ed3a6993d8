"""The device that regions are compiled for, and the rates that it reaches."""
