"""The graph as Dynamo hands it over: found token axes, rewrites before autograd, regions as modules of
their own."""
