"""How long chunks are: devices as data, the time that a sweep takes on one, and the choice."""
