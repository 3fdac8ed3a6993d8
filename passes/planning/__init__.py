"""Planning: devices as data, the time of a sweep on a device, and the choice of chunk lengths."""
