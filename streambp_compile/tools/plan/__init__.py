"""Will a training step fit, and how long will it take?

``python -m streambp_compile.plan`` answers without weights and without a device.
"""
