"""Everything that reads or rewrites Dynamo's graph before autograd: token axes, and rewrites by subject."""
