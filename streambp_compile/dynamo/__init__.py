"""Everything that reads or rewrites Dynamo's graph before autograd: token axes, rewrites, regions as
modules."""
