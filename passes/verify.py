"""What makes each type legal; run on every result that leaves a pass."""

from __future__ import annotations

from torch.fx import Graph, Node

from .ir import HERE, Analysis, Tokens, hint, is_tensor, shape_of
from .partition import Program


class IllegalResult(AssertionError):
    """A pass broke its contract: a defect of this package, not of the user's model."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise IllegalResult(message)


def verify_analysis(graph: Graph, analysis: Analysis) -> None:
    """Every value has a fact, and every token dimension has the size that its fact says."""
    length = hint(analysis.length)
    for node in graph.nodes:
        if node.op == "output":
            continue
        check(node in analysis.facts, f"{node} has no fact")
        fact = analysis.facts[node]
        if isinstance(fact, Tokens) and is_tensor(node):
            size = shape_of(node)[fact.rows.dim]
            rows = size // (fact.rows.outer * fact.rows.inner)
            stored = (
                node.op == "placeholder" and fact.keys is not None
            )  # a mask made for more tokens than there are
            check(
                rows == length + fact.hi - fact.lo or stored and rows >= length,
                f"{node}: {rows} rows, but its fact says {fact}",
            )
            check(
                size == rows * fact.rows.outer * fact.rows.inner, f"{node}: {size} is no multiple of its rows"
            )


def verify_program(program: Program, analysis: Analysis) -> None:
    """Everything is computed before it is read, and what a sweep reads beyond its rows was kept or is fed."""
    ready: set[Node] = set(program.given)
    noted: set[Node] = set()
    for stage, nodes in enumerate(program.whole):
        for node in nodes:
            for operand in node.all_input_nodes:
                check(operand in ready, f"{node} reads {operand} before it exists")
            ready.add(node)
        if stage == len(program.sweeps):
            break
        sweep = program.sweeps[stage]
        inside: set[Node] = set()
        check(
            noted.issuperset(sweep.resumed), f"{sweep.resumed} go on from states that no sweep before noted"
        )
        noted.update(sweep.noted)
        for node in sweep.nodes:
            scans = any(edge.role == "carry" for edge in analysis.edges[node])
            check(
                not scans or node in sweep.scans or node in sweep.resumed, f"{node} scans, and has no state"
            )
            for edge in analysis.edges[node]:
                operand = edge.operand
                check(operand in ready or operand in inside, f"{node} reads {operand} before it exists")
                if edge.role in ("keys", "halo") and operand in inside and operand not in ready:
                    check(
                        operand in sweep.fed and edge.role == "keys",
                        f"{node} reads {operand} beyond its chunk",
                    )
                if operand in inside and operand in sweep.keysums and operand not in ready:
                    check(
                        sweep.settled
                        and (edge.role == "carry" or edge.role == "rows" and edge.reach == HERE),
                        f"{operand} is read before it is final",
                    )
                check(
                    not (operand in inside and operand in sweep.sums),
                    f"{node} reads the unfinished sum {operand}",
                )
            inside.add(node)
        ready.update(sweep.writes)
        ready.update(sweep.sums)
        ready.update(sweep.keysums)
    for output in program.outputs:
        check(not isinstance(output, Node) or output in ready, f"output {output} is never made")
