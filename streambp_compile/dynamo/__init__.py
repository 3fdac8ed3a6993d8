"""Dynamo's graph: token axes are found, spellings rewritten before autograd, regions made into modules."""
