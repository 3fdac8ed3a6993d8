"""Checks of what is legal after each pass: the written form of every contract between passes.

Each function checks one type as it leaves the pass that makes it. A result that breaks a clause is a
defect of this package, never of the user's model.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from .ir import (
    ACCUMULATORS,
    EVERYWHERE,
    FILLED,
    HERE,
    Analysis,
    Binding,
    BindingRole,
    Body,
    Direction,
    Fusion,
    Kind,
    Plan,
    Program,
    Role,
    Sweep,
    Tokens,
    cannot_tell,
    computed_by,
    draws_random,
    hint,
    is_tensor,
    numbers_told,
    part_nodes,
    part_results,
    parts_of,
    shape_of,
    sizes_of,
    takes_kernel,
    tensor_operands,
    unbound,
    value_of,
    values_of,
    viewed,
    written_by,
)
from .rules import form_of, rule_of
from .rules.facets import Form
from .token_propagation import reshaped
from .width import too_wide


class IllegalResult(AssertionError):
    """A broken contract of a pass: a defect of this package, not of the user's model."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise IllegalResult(message)


def verify_normalized(graph: Graph) -> None:
    """Verify that a normal graph is a list of pure calls, each with a fake value.

    - A node is an input, a constant, a call of an operator, or the output.
    - A call has a fake value, unless its operator returns nothing, and writes into none of its arguments.
    """
    for node in graph.nodes:
        check(
            node.op in ("placeholder", "get_attr", "call_function", "output"), f"{node} is a {node.op} node"
        )
        if node.op == "call_function":
            check("val" in node.meta or returns_nothing(node), f"{node} has no fake value")
            check(not written_by(node), f"{node} writes into its arguments")


def returns_nothing(node: Node) -> bool:
    """Does a node call an operator without results, such as an assertion on the device?"""
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns


def verify_analysis(graph: Graph, analysis: Analysis) -> None:
    """Verify that every value has a fact, and every node with tokens a rule and all its edges.

    - A token dimension has the size that its fact says.
    - A reshape has the rows that it reads of its operand, in their order.
    - Rows that meet are in one order.
    - A node of kind rows or keysum has outputs with rows; a sum has none.
    - An edge by rows, halo, keys or carry reads a value with rows; one by halo or keys does not read an
      operator with several results.
    - Random numbers are drawn by their place alone, so that every chunk can draw its own again.
    """
    for node in graph.nodes:
        if node.op == "output":
            continue
        check(node in analysis.facts, f"{node} has no fact")
        verify_size(node, analysis)
        kind, facts = analysis.kinds[node], parts_of(analysis.facts[node])
        rows = [isinstance(f, Tokens) for f in facts]
        check(kind is not Kind.SUM or not any(rows), f"{node} is a sum, and has rows")
        check(kind not in (Kind.ROWS, Kind.KEYSUM) or any(rows), f"{node} is {kind}, and has no rows")
        check(not draws_random(node), f"{node} draws random numbers, and not by their place")
        if kind is not Kind.WHOLE and node.op == "call_function" and node.target is not operator.getitem:
            rule_of(node)
            operands = tuple(edge.operand for edge in analysis.edges[node])
            check(operands == tensor_operands(node), f"{node} has edges {operands}")
            if form_of(node) is Form.RESHAPE:
                verify_reshape(node, analysis)
            else:
                verify_order(node, analysis)
        for edge in analysis.edges[node]:
            fact = analysis.facts[edge.operand]
            carries = any(isinstance(f, Tokens) for f in parts_of(fact))
            check(edge.role is Role.WHOLE or carries, f"{node} reads {edge.role} of {edge.operand}")
            beyond = edge.role in (Role.KEYS, Role.HALO)
            check(
                not beyond or is_tensor(edge.operand),
                f"{node} reads rows of {edge.operand}, and no item of it",
            )


def verify_reshape(node: Node, analysis: Analysis) -> None:
    """Verify that a reshape has the rows that it reads of its operand. They are the same rows, or all are
    shifted by a constant."""
    edge, fact = analysis.edges[node][0], analysis.facts[node]
    read = analysis.facts[edge.operand]
    shift = edge.reach.lo if edge.role is Role.HALO else 0
    if isinstance(read, Tokens) and isinstance(fact, Tokens):
        same = (read.lo - shift, read.hi - shift) == (fact.lo, fact.hi)
        check(same, f"{node} has other rows than {edge.operand}")
        moved = reshaped(read.rows, shape_of(edge.operand), shape_of(node))
        check(moved == fact.rows, f"{node} has rows in another order than {edge.operand}")


def verify_order(node: Node, analysis: Analysis) -> None:
    """Verify that rows that an operation reads one by one, and its result's rows, are laid out alike."""
    near = [
        e
        for e in analysis.edges[node]
        if e.role is Role.ROWS or e.role is Role.HALO and e.reach != EVERYWHERE
    ]
    read = [analysis.facts[e.operand] for e in near]
    made = parts_of(analysis.facts[node]) if analysis.kinds[node] is Kind.ROWS else ()
    orders = {(f.rows.outer, f.rows.inner / f.rows.block) for f in (*read, *made) if isinstance(f, Tokens)}
    check(len(orders) < 2, f"{node} meets rows in different orders")


def verify_size(node: Node, analysis: Analysis) -> None:
    """Verify that the token dimension of a value has the size that its fact says."""
    fact, length = analysis.facts[node], hint(analysis.length)
    if not isinstance(fact, Tokens) or not is_tensor(node):
        return
    size, step = shape_of(node)[fact.rows.dim], fact.rows.step
    rows, length = size // step, fact.rows.count(length)
    # a mask may be stored for more tokens than there are
    stored = node.op == "placeholder" and fact.keys is not None and rows >= length
    check(rows == length + fact.hi - fact.lo or stored, f"{node}: {rows} rows, but its fact says {fact}")
    check(size == rows * step, f"{node}: {size} is no multiple of its rows")


def verify_program(program: Program, analysis: Analysis) -> None:
    """Verify that a program computes everything before it is read.

    - Its inputs determine the sizes of all that it computes, at any length.
    - A value that a sweep reads beyond its own rows is at full length, or is appended in that sweep.
    - A sum is read after its sweep; a key sum is read in it only where its rows are final.
    - A scan has a state, which is carried along or was saved by an earlier sweep.
    - A value that another one is written over is not read any more, and no view of it is a result.
    - A value at full length that is wider than a streamed program may hold is declared as such.
    - A value that is kept, written or added up is a tensor; of an operator with several results, it is
      an item.
    """
    verify_told(program, analysis)
    stored = (*program.kept, *program.statistics, *(n for s in program.sweeps for n in stored_by(s)))
    for node in stored:
        check(is_tensor(node), f"{node} is kept, and is no value but an operator with several results")
    ready, saved = set(program.inputs), set[Node]()
    whole = {n for nodes in program.full_length for n in nodes}
    for step, nodes in enumerate(program.full_length):
        for node in nodes:
            check_read(node, node.all_input_nodes, ready)
            ready.add(node)
        if step == len(program.sweeps):
            break
        sweep = program.sweeps[step]
        check(
            saved.issuperset(sweep.restored_states), f"no sweep saves the states of {sweep.restored_states}"
        )
        saved.update(sweep.saved_states)
        verify_sweep(sweep, ready, analysis)
        ready.update((*sweep.writes, *sweep.sums, *sweep.keysums))
        gone = {source for _, source in sweep.in_place}
        views = [n for n in sweep.writes if viewed(n) in gone]
        check(not views, f"{views} are views of values that their sweep writes over")
        ready = {n for n in ready if viewed(n, whole) not in gone}
    undeclared = set(too_wide(program, analysis)).difference(program.too_wide)
    check(not undeclared, f"{undeclared} are wider than a streamed program may hold")
    for output in program.outputs:
        check(not isinstance(output, Node) or output in ready, f"output {output} is never computed")


def verify_told(program: Program, analysis: Analysis) -> None:
    """Verify that the inputs of a program determine the number of tokens and all computed sizes."""
    inputs = [value_of(n) for n in program.inputs if n.op != "get_attr"]
    untold = cannot_tell(inputs, [analysis.length, *sizes_of(computed_by(program))])
    check(not untold, f"no input of a program tells the sizes {untold}")


def stored_by(sweep: Sweep) -> Iterator[Node]:
    """Yield the values that a sweep leaves for later steps, and those whose memory it takes over."""
    yield from (*sweep.writes, *sweep.sums, *sweep.keysums)
    for pair in sweep.in_place:
        yield from pair


def check_read(node: Node, operands: Iterable[Node], ready: set[Node]) -> None:
    for operand in operands:
        check(operand in ready, f"{node} reads {operand} before it exists")


def verify_sweep(sweep: Sweep, ready: set[Node], analysis: Analysis) -> None:
    """Verify that a sweep reads values that are ready, and only the chunk's part of its own nodes."""
    inside: set[Node] = set()
    states = {*sweep.scans, *sweep.restored_states}
    for node in sweep.nodes:
        edges = analysis.edges[node]
        scans = any(edge.role is Role.CARRY for edge in edges)
        check(not scans or node in states, f"{node} is a scan without a state")
        check_read(node, (e.operand for e in edges), ready | inside)
        for edge in (e for e in edges if e.operand in inside and e.operand not in ready):
            operand, own_rows = edge.operand, edge.role is Role.ROWS and edge.reach == HERE
            check(operand not in sweep.summed, f"{node} reads the unfinished sum {operand}")
            if edge.role in (Role.KEYS, Role.HALO):
                appended = operand in sweep.appended and edge.role is Role.KEYS
                check(appended, f"{node} reads {operand} beyond its chunk")
            if operand in sweep.keysums:
                final = operand in sweep.final_keysums and (own_rows or edge.role is Role.CARRY)
                check(final, f"{node} reads {operand} before it is final")
        inside.add(node)
    check(inside.issuperset((*sweep.writes, *sweep.summed, *sweep.keysums)), "a sweep writes what it lacks")
    check(set(sweep.writes).issuperset(sweep.appended), "a sweep appends what it does not write")
    descends = sweep.direction is Direction.DESCENDING
    check(not sweep.final_keysums or descends, "key sums are final in descending sweeps alone")


def verify_plan(plan: Plan, program: Program) -> None:
    """Verify that every sweep has a chunk length, and every attention a kernel. Sweeps that share states have
    the same chunk length."""
    check(len(plan.chunks) == len(program.sweeps), f"{len(plan.chunks)} chunk lengths")
    check(all(chunk >= 1 for chunk in plan.chunks), f"chunks of {plan.chunks} tokens")
    shared = {c for c, s in zip(plan.chunks, program.sweeps) if s.saved_states or s.restored_states}
    check(len(shared) <= 1, f"states are saved and restored by chunks of {sorted(shared)} tokens")
    for node in (n for part in (*program.full_length, *(s.nodes for s in program.sweeps)) for n in part):
        check(not takes_kernel(node) or node in plan.kernels, f"{node} has no kernel")
    check(len(plan.full_length) == len(program.full_length), f"{len(plan.full_length)} steps at full length")
    for step, nodes in enumerate(program.full_length):
        verify_step(plan, nodes, step)


def verify_chunks(plan: Plan, program: Program, analysis: Analysis) -> None:
    """Verify that chunks hold whole blocks of all values that they read and make."""
    for chunk, sweep in zip(plan.chunks, program.sweeps):
        block = analysis.block(sweep.nodes)
        check(chunk % block == 0, f"chunks of {chunk} tokens part blocks of {block}")


def verify_step(plan: Plan, nodes: Sequence[Node], step: int) -> None:
    """Verify that each value at full length is computed once, after the values that it reads."""
    waiting = set(nodes)
    for part in plan.full_length[step]:
        fused = isinstance(part, Fusion)
        own = part_nodes(part)
        for node in own:
            check(node in waiting, f"{node} is computed twice, or not in step {step}")
            operands = node.all_input_nodes
            ready = waiting.isdisjoint(map(viewed, operands) if fused else operands)
            check(ready, f"{node} is computed before what it reads")
            waiting.discard(node)
        hidden = set(own).difference(part_results(part))
        for node in waiting:
            check(hidden.isdisjoint(node.all_input_nodes), f"{node} reads from inside a compiled function")
    check(not waiting, f"{waiting} are never computed")


def verify_bound(graph: Graph) -> None:
    """Verify that every symbol of a size in a graph that is compiled is bound. An input binds it, or the node
    that finds it while the graph runs."""
    given = [value_of(n) for n in graph.nodes if n.op == "placeholder"]
    read = [v for n in graph.nodes for v in values_of(n)]
    found = {s for n in graph.nodes for s in n.meta.get("unbacked_bindings") or ()}
    verify_inputs(given, read, found)


def verify_inputs(
    given: Iterable[object], read: Iterable[object] = (), found: Container[object] = ()
) -> None:
    """Verify that the inputs of compiled code bind every symbol in them, and in other values that it reads.

    An input binds a symbol if it is that symbol, or has it as a size or a stride.

    found  symbols that the code finds itself
    """
    missing = [s for s in unbound(given, read) if s not in found]
    check(not missing, f"no input of compiled code binds the sizes {sorted(missing, key=str)}")


def verify_bindings(bindings: Sequence[Binding]) -> None:
    """Verify that the inputs of a body bind every symbol in them; its nodes read no other symbols."""
    verify_inputs(number for binding in bindings for number in numbers_told(binding))


def verify_fused_body(body: Body, fusion: Fusion) -> None:
    """Verify that a function at full length slices no input, and writes into its results alone."""
    nodes = list(body.graph.graph.nodes)
    bindings = dict(zip((n for n in nodes if n.op == "placeholder"), body.bindings))
    check(len(bindings) == len(body.bindings), "inputs of a function differ from its bindings")
    legal = (BindingRole.WHOLE, BindingRole.SCALAR, BindingRole.RESULT)
    check(all(b.role in legal for b in body.bindings), "a function at full length cuts an input")
    results = {n for n, b in bindings.items() if b.role is BindingRole.RESULT}
    written = {a for n in nodes if n.op == "call_function" for a in written_by(n)}
    check(written == results, f"a function at full length writes into {written}, and is to fill {results}")
    check(len(results) == len(fusion.results), "results of a function are missing")
    verify_bindings(body.bindings)


def verify_body(body: Body, sweep: Sweep, analysis: Analysis) -> None:
    """Verify that a chunk body is a function of its bindings, with values as long as a chunk.

    - Its inputs are the bindings, in order; it has no constants and returns nothing.
    - Every symbol in the sizes of its inputs is an input by itself, or a size of one.
    - A value with rows comes in at full length only where a node reads rows around the chunk.
    - No size inside depends on the number of all tokens.
    - It writes only into buffers, accumulators and states, and over the inputs that the sweep declares. It
      fills all buffers.
    """
    nodes = list(body.graph.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    check(len(inputs) == len(body.bindings), f"{len(inputs)} inputs for {len(body.bindings)} bindings")
    check(not any(n.op == "get_attr" for n in nodes), "a chunk body has a constant")
    check(nodes[-1].op == "output" and not nodes[-1].all_input_nodes, "a chunk body returns something")
    halos = {e.operand for n in sweep.nodes for e in analysis.edges[n] if e.role is Role.HALO}
    for binding in body.bindings:
        if binding.role is BindingRole.WHOLE and binding.source is not None:
            rows = isinstance(analysis.facts[binding.source], Tokens)
            check(not rows or binding.source in halos, f"{binding.source} comes in at full length")
    check_sizes(dict(zip(inputs, body.bindings)).items())
    verify_bindings(body.bindings)
    check_writes(nodes, dict(zip(inputs, body.bindings)), sweep)


def check_sizes(inputs: Iterable[tuple[Node, object]]) -> None:
    """Verify that no size, which is an item of a list, depends on the number of all tokens."""
    lengths = [n for n, b in inputs if re.fullmatch(r"scalar +length(_\d+)?", str(b))]
    for node in lengths:
        for user in node.users:
            sized = any(node in a for a in user.args if isinstance(a, (list, tuple)))
            check(not sized, f"{user} is as long as all tokens")
            if getattr(user.target, "__module__", "") == "_operator":
                lengths.append(user)


def check_writes(nodes: list[Node], bindings: Mapping[Node, Binding], sweep: Sweep) -> None:
    """Verify that a body writes only into memory that the driver provides for it, and fills all buffers."""
    taken = {source for _, source in sweep.in_place}
    written = {a for n in nodes if n.op == "call_function" for a in written_by(n)}
    for node in written:
        binding = bindings.get(node)
        if binding is None:
            raise IllegalResult(f"a chunk body writes into {node}, which is its own")
        role, source = binding.role, binding.source
        over = role is BindingRole.ROWS and source in taken
        legal = over or role in (*FILLED, *ACCUMULATORS, BindingRole.CARRY)
        check(legal, f"a chunk body writes into {node}, which is only read")
    for node, binding in bindings.items():
        filled = binding.role not in FILLED or node in written
        check(filled, f"the buffer {node} is never written")
