"""Python drivers inside AOTAutograd's graphs.

AOTAutograd compiles graphs, and a driver is a loop in Python. A graph module therefore holds one call of
the driver with the meta values that AOTAutograd reads; "compiling" that module returns the driver.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, GraphModule, Node


class Driver:
    """A named function of a list of arguments that a graph module calls."""

    streambp_driver = True

    def __init__(self, name: str, take: Callable[[list], list]):
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__
        self.take = take

    def __call__(self, *args):
        return self.take(list(args))

    def __deepcopy__(self, _memo):
        return self


def one_call(owner: GraphModule, inputs, function: Callable, outputs) -> GraphModule:
    """Build a graph module that calls one function, with the meta values that AOTAutograd reads."""
    graph = Graph()
    placeholders = []
    for node in inputs:
        new = graph.placeholder(node.name)
        new.meta = dict(node.meta)
        placeholders.append(new)
    call = graph.call_function(function, tuple(placeholders))
    results = []
    for i, out in enumerate(outputs):
        if not isinstance(out, Node):
            results.append(out)
            continue
        item = graph.call_function(lambda values, index: values[index], (call, i))
        item.meta = dict(out.meta)
        results.append(item)
    graph.output(tuple(results))
    return GraphModule(owner, graph)


def driver_of(module: GraphModule) -> Callable | None:
    """Find the function that a module made by `one_call` calls; None for any other module."""
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "streambp_driver", False):
            return boxed(node.target)
    return None


def boxed(function: Callable) -> Callable:
    """Convert a driver to AOTAutograd's boxed convention: one list of arguments, which the callee empties."""

    def call(args: list) -> list:
        taken = list(args)
        args.clear()
        return function.take(taken)

    call._boxed_call = True
    return call
