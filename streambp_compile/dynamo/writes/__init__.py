"""Values that are written into: inputs, buffers, parts of a value, and views of them."""
