"""Nodes of ``torch.fx`` and their fake values: sizes, bytes, arguments, operands."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from .refusals import CannotStream, Refusal

Size = int | torch.SymInt


def value_of(node: Node, output: int | None = None) -> Any:
    """The fake value of a node, or of one of its outputs."""
    value: Any = node.meta.get("val")
    return value if output is None else value[output]


def rank_of(node: Node, output: int | None = None) -> int:
    value = value_of(node, output)
    return value.dim() if isinstance(value, torch.Tensor) else 0


def expression_of(number: Any) -> sympy.Expr | None:
    """The expression of sizes that a number is; None of a plain number, and of the size of a ragged
    dimension."""
    symbolic = isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool)
    return getattr(number.node, "expr", None) if symbolic else None


def symbols_in(size: Any) -> list[torch.SymInt]:
    """The symbols that a number is an expression of; none of a plain number, and none of a symbol itself."""
    expr = expression_of(size)
    if expr is None or expr.is_Symbol:
        return []
    return [size.node.shape_env.create_symintnode(s, hint=None) for s in sorted(expr.free_symbols, key=str)]


def numbers_of(value: object) -> list[object]:
    """The numbers that tell a fake value: it is one, or they are its sizes and strides."""
    if not isinstance(value, torch.Tensor):
        return [value]
    return [*value.shape, *(value.stride() if value.layout is torch.strided else ())]


def unbound(given: Iterable[object], read: Iterable[object] = ()) -> set[sympy.Symbol]:
    """The symbols in inputs, and in what else is read, that no input is, nor has as a size or a stride.

    What compiles code for these inputs binds no others: of an input of size ``2 s`` it does not tell ``s``.
    """
    numbers = [n for value in given for n in numbers_of(value)]
    found = [e for e in map(expression_of, numbers) if e is not None]
    used = [e for v in read for n in numbers_of(v) if (e := expression_of(n)) is not None]
    bound = {e for e in found if e.is_Symbol}
    return {s for e in (*found, *used) for s in e.free_symbols} - bound


UNKNOWN_SIZE = Refusal(
    "sizes",
    "A size is known only while the graph runs, and not from the sizes of inputs",
    "Use mark_dynamic in place of mark_unbacked, and torch.nonzero_static in place of torch.nonzero",
)


def hint(size: Size) -> int:
    """The size as a number: itself, or the length at which the graph was traced. Raises `CannotStream`."""
    if isinstance(size, int):
        return size
    if size.node.expr.is_Integer:  # the data told it once, and something has asserted what it is since
        return int(size.node.expr)
    if size.node.hint is None:
        raise CannotStream(UNKNOWN_SIZE)
    return int(size.node.hint)


def is_equal(a: Size, b: Size) -> bool:
    """Equal at every length, not only at the traced one."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    first, second = (s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in (a, b))
    if first == second:
        return True
    return any(e.has(sympy.Function) for e in (first, second)) and simplified(first - second) == 0


def differs_by_a_number(a: Size, b: Size) -> bool:
    """Are there as many more of these than of those at every length?"""
    if isinstance(a, int) and isinstance(b, int):
        return True
    first, second = (s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in (a, b))
    return first == second or simplified(first - second).is_number


def simplified(expr: sympy.Expr) -> sympy.Expr:
    """An expression of sizes with divisions without a remainder carried out: ``T * T // T`` is T, as a view
    with a -1 in it has it."""
    before = None
    while expr != before:  # divisions by divisions, the innermost first
        before, expr = expr, expr.replace(lambda e: type(e).__name__ == "FloorDiv", divided).expand()
    return expr


def divided(division: sympy.Expr) -> sympy.Expr:
    quotient = sympy.cancel(division.args[0] / division.args[1])
    return quotient if quotient.as_numer_denom()[1] == 1 else division


@functools.lru_cache(4096)
def parted(expr) -> tuple[object, int, int]:
    """``factor * part + rest`` of a size's expression, with numbers taken out, so that what it tells is found
    in other sizes: of ``2 (h // 4) (w // 4) + 1`` the product."""
    rest, product = expr.as_independent(*expr.free_symbols, as_Add=True)
    factor, part = product.as_coeff_Mul()
    return (part, int(factor), int(rest)) if rest.is_Integer and factor.is_Integer else (expr, 1, 0)


def values_of(node: Node) -> tuple[Any, ...]:
    """The fake values of a node: one, or those of an operator with several results."""
    value = value_of(node)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def sizes_of(nodes: Iterable[Node]) -> list[Size]:
    """The sizes of the tensors that nodes compute, and the symbols that these are expressions of."""
    sizes = [s for n in nodes for v in values_of(n) if isinstance(v, torch.Tensor) for s in v.shape]
    return [*sizes, *(symbol for s in sizes for symbol in symbols_in(s))]


def cannot_tell(inputs: Iterable[object], sizes: Iterable[object]) -> list[Any]:
    """The sizes that those of the inputs, given as fake values, do not tell."""
    sizes_of = (v.shape if isinstance(v, torch.Tensor) else [v] for v in inputs)
    given = {
        parted(s.node.expr)[0]: sympy.Dummy(integer=True, positive=True)  # no number: some divide by it
        for v in sizes_of
        for s in v
        if isinstance(s, torch.SymInt) and not s.node.expr.is_number
    }
    known = set(given.values())
    wanted = {s.node.expr: s for s in sizes if isinstance(s, torch.SymInt)}
    return [s for expr, s in wanted.items() if expr not in given and expr.subs(given).free_symbols - known]


def shape_of(node: Node, output: int | None = None) -> tuple[int, ...]:
    return tuple(hint(s) for s in value_of(node, output).shape)


def is_view(node: Node) -> bool:
    """Takes no memory of its own."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def viewed(node: Node, among: Collection[Node] | None = None) -> Node:
    """What a view is of, through views of views; any other node itself, as is a view of a number.

    among  those views that are followed (all): a sweep writes a view that it keeps into memory of its own
    """
    while is_view(node) and node.all_input_nodes and (among is None or node in among):
        node = node.all_input_nodes[0]
    return node


def bytes_of(value: torch.Tensor) -> int:
    count = 1
    for size in value.shape:
        count *= hint(size)
    return count * value.dtype.itemsize


def op_name(node: Node) -> str:
    """``mm`` of ``aten.mm.default``; nothing of what is no op."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def is_tangent(node: Node) -> bool:
    """Is this input of a joint graph the gradient of an output? By the name that AOTAutograd gives it, as its
    own partitioners tell (torch/_functorch/partitioners.py, `_is_tangent`)."""
    return node.op == "placeholder" and node.target.startswith("tangents")


def is_tensor(node: Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def is_item(node: Node) -> bool:
    """Is it one result of an operator that has several?"""
    return node.target is operator.getitem


def is_floating(node: Node) -> bool:
    return is_tensor(node) and value_of(node).dtype.is_floating_point


def arguments(node: Node) -> dict[str, Any]:
    """Arguments by their schema names, defaults filled in."""
    found = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    found.update({a.name: v for a, v in zip(node.target._schema.arguments, node.args)})
    found.update(node.kwargs)
    return found


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and all that they are made of."""
    found, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


ORIGIN = "streambp_origin"  # the key of node.meta that `metadata_for` writes and `origin_of` reads


def origin_of(node: Node) -> str:
    """The name, in the traced graph, of the node that this one was written for: its own, unless a pass wrote
    it."""
    return node.meta.get(ORIGIN, node.name)


def metadata_for(node: Node, value: object = None) -> dict[str, Any]:
    """Metadata of a node that a pass writes in place of another: the user's line and the origin of that.

    value  the fake value of the new node; by default that of the other
    """
    return {**node.meta, ORIGIN: origin_of(node), "val": node.meta.get("val") if value is None else value}


def origin_metadata(node: Node) -> dict[str, Any]:
    """Metadata of nodes that a chunk body has for this one: the user's line and the origin. Their values are
    of other sizes."""
    return {"stack_trace": node.meta.get("stack_trace"), ORIGIN: origin_of(node)}


def copied(module: GraphModule) -> GraphModule:
    """A module of its own for a copy of the graph, with its names and meta values."""
    graph, nodes = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(module.graph, nodes))
    for old, new in nodes.items():
        new.meta = dict(old.meta)
    return GraphModule(module, graph)


def tensor_operands(node: Node) -> tuple[Node, ...]:
    """The tensor operands in argument order, lists flattened; a signature has one entry for each."""
    found: list[Node] = []

    def visit(arg: object) -> None:
        if isinstance(arg, Node):
            if isinstance(value_of(arg), (torch.Tensor, tuple, list)):
                found.append(arg)
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                visit(item)

    for arg in (*node.args, *node.kwargs.values()):
        visit(arg)
    return tuple(found)


def total_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulators are float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def takes_kernel(node: Node) -> bool:
    """Is the kernel of its op chosen by name?"""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(
        a.name == "kernel" for a in target._schema.arguments
    )


def draws_random(node: Node) -> bool:
    """Does this node draw random numbers? Attention only with dropout, although its kernels are tagged so."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = arguments(node)
    return "dropout_p" not in given or given["dropout_p"] != 0


def outputs_of(module: GraphModule) -> tuple[object, ...]:
    """What a graph returns, flat."""
    return tuple(next(n for n in reversed(module.graph.nodes) if n.op == "output").args[0])
