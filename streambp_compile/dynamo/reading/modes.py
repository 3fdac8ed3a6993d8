"""Modes (autocast, gradients) that the user's code switches, replayed in a graph of a part of it."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from ... import internals
from .values import AUTOCAST


def is_switch(node: Node) -> bool:
    """Does a node only switch a mode, or log that a feature of torch is used?"""
    return node.op == "call_function" and node.target in internals.MODE_SWITCHES


def is_gradient_switch(node: Node) -> bool:
    return node.target is internals.set_grad_enabled


def write_inference_as_no_grad(module: GraphModule) -> GraphModule:
    """Write ``torch.inference_mode`` inside a graph as switches of gradients, its only effect there."""
    before: dict[Node, bool] = {}
    recorded = True
    for node in list(module.graph.nodes):
        if node.target is internals.enter_inference:
            before[node], recorded = recorded, not node.args[0]
        elif node.target is internals.exit_inference:
            recorded = before[node.args[0]]
        elif is_gradient_switch(node):
            recorded = bool(node.args[0])
            continue
        else:
            continue
        with module.graph.inserting_before(node):
            module.graph.call_function(internals.set_grad_enabled, (recorded,)).meta = dict(node.meta)
    for node in reversed(module.graph.nodes):
        if node.target in (internals.enter_inference, internals.exit_inference):
            module.graph.erase_node(node)
    return module


def note_autocast(module: GraphModule) -> GraphModule:
    """Note the autocast that each node runs under: elsewhere it may compute in another dtype."""
    active: dict[Node, tuple] = {}
    for node in module.graph.nodes:
        if node.target is internals.enter_autocast:
            active[node] = node.args
        elif node.target is internals.exit_autocast:
            del active[node.args[0]]
        elif active:
            node.meta[AUTOCAST] = tuple(active.values())
    return module


GradientModes = dict[Node, bool]  # node → are gradients recorded there?


def gradient_modes(graph: Graph) -> GradientModes:
    modes, recorded = GradientModes(), True
    for node in graph.nodes:
        recorded = bool(node.args[0]) if is_gradient_switch(node) else recorded
        modes[node] = recorded
    return modes


class Switches:
    """The modes (autocast, gradients) of the whole graph, replayed in a region's graph. Each node then runs
    under the same modes in both."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.active: list[Node] = []  # nodes of the whole graph that switched to a mode which still holds
        self.replayed: list[tuple[Node, Node]] = []  # those that hold in the region's graph, and their copies

    def meet(self, node: Node) -> None:
        """Update the active modes, if a node of the whole graph switches one."""
        if is_gradient_switch(node):
            self.active = [s for s in self.active if not is_gradient_switch(s)]
            self.active += [] if node.args[0] else [node]
        elif node.target is internals.enter_autocast:
            self.active.append(node)
        elif node.target is internals.exit_autocast:
            self.active = [s for s in self.active if s is not node.args[0]]

    def write(self) -> None:
        """Close modes that no longer hold, and open those that now do."""
        common = 0
        while (
            common < min(len(self.active), len(self.replayed))
            and self.replayed[common][0] is self.active[common]
        ):
            common += 1
        while len(self.replayed) > common:
            self.undo(*self.replayed.pop())
        for switch in self.active[common:]:
            copy = self.graph.call_function(switch.target, switch.args, switch.kwargs)
            self.replayed.append((switch, copy))

    def undo(self, switch: Node, copy: Node) -> None:
        if is_gradient_switch(switch):
            before = next((s.args[0] for s, _ in reversed(self.replayed) if is_gradient_switch(s)), True)
            self.graph.call_function(internals.set_grad_enabled, (before,))
        else:
            self.graph.call_function(internals.exit_autocast, (copy,))

    def close(self) -> None:
        self.active = []
        self.write()
