"""Traces of Python code in the graph: assertions, floats, ``no_grad``, nested calls, unknown sizes."""
