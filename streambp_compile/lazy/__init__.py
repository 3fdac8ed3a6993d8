"""Lazy outputs: tensors that are computed when they are read, and the operations recorded on them."""
