"""Nodes of ``torch.fx`` and their fake values: sizes, bytes, arguments, operands."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from .quasi_affine import is_zero, quasi_affine
from .refusals import CannotStream, Refusal

Size = int | torch.SymInt


def value_of(node: Node, output: int | None = None) -> Any:
    """Return the fake value of a node, or of one of its outputs."""
    value: Any = node.meta.get("val")
    return value if output is None else value[output]


def rank_of(node: Node, output: int | None = None) -> int:
    value = value_of(node, output)
    return value.dim() if isinstance(value, torch.Tensor) else 0


def expression_of(number: Any) -> sympy.Expr | None:
    """Return the symbolic expression of a number, or None. A plain number has none, and neither has the size
    of a ragged dimension."""
    symbolic = isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool)
    return getattr(number.node, "expr", None) if symbolic else None


def symbols_in(size: Any) -> list[torch.SymInt]:
    """List the symbols in the expression of a number. A plain number has none, and a number that is a single
    symbol lists none."""
    expr = expression_of(size)
    if expr is None or expr.is_Symbol:
        return []
    return [size.node.shape_env.create_symintnode(s, hint=None) for s in sorted(expr.free_symbols, key=str)]


def names_in(size: Size) -> frozenset[str]:
    """Return the names of the symbols from which a size is computed."""
    expr = expression_of(size)
    return frozenset() if expr is None else frozenset(map(str, expr.free_symbols))


def numbers_of(value: object) -> list[object]:
    """List the numbers that define a fake value: itself, or the sizes and strides of a tensor. Strides are
    listed for strided tensors alone."""
    if not isinstance(value, torch.Tensor):
        return [value]
    return [*value.shape, *(value.stride() if value.layout is torch.strided else ())]


def unbound(given: Iterable[object], read: Iterable[object] = ()) -> set[sympy.Symbol]:
    """Find the symbols in inputs, and in other values read, that no input binds. An input binds a symbol if
    it is that symbol, or has it as a size or a stride. Code compiled for these inputs binds no other
    symbols: an input of size ``2 s`` does not bind ``s``."""
    numbers = [n for value in given for n in numbers_of(value)]
    found = [e for e in map(expression_of, numbers) if e is not None]
    used = [e for v in read for n in numbers_of(v) if (e := expression_of(n)) is not None]
    bound = {e for e in found if e.is_Symbol}
    return {s for e in (*found, *used) for s in e.free_symbols} - bound


UNKNOWN_SIZE = Refusal(
    "sizes",
    "A size is known only while the graph runs, and not from the sizes of inputs",
    "Use mark_dynamic in place of mark_unbacked, torch.nonzero_static in place of torch.nonzero, and padded "
    "tensors in place of nested ones",
)


def hint(size: Size) -> int:
    """Return a size as a number: itself, or the length at which the graph was traced. Raises `CannotStream`
    for a size that is known only while the graph runs, and for the ragged size of a nested tensor."""
    if isinstance(size, int):
        return size
    if size.node.is_nested_int():
        raise CannotStream(UNKNOWN_SIZE)
    if size.node.expr.is_Integer:  # depended on data, and an assertion has fixed it since
        return int(size.node.expr)
    if size.node.hint is None:
        raise CannotStream(UNKNOWN_SIZE)
    return int(size.node.hint)


def is_equal(a: Size, b: Size) -> bool:
    """Are two sizes equal at every length for which the graph is used, not only at the traced one?"""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    first, second = (s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in (a, b))
    if first == second:
        return True
    if not any(e.has(sympy.Function) for e in (first, second)):
        return False
    left = difference(first, second)
    return is_zero(left, guards_of(a) or guards_of(b))


def are_equal(left: Sequence[Size], right: Sequence[Size]) -> bool:
    """Are two shapes equal at every length?"""
    return len(left) == len(right) and all(map(is_equal, left, right))


def are_alike(a: Node, b: Node) -> bool:
    """Do two values have the same dtype, and the same shape at every length?"""
    one, other = value_of(a), value_of(b)
    return one.dtype == other.dtype and are_equal(one.shape, other.shape)


def is_known(size: Size) -> bool:
    """Is a size known before the graph runs?"""
    return isinstance(size, int) or size.node.hint is not None


def differs_by_a_number(a: Size, b: Size) -> bool:
    """Do two sizes differ by the same number at every length?"""
    if isinstance(a, int) and isinstance(b, int):
        return True
    first, second = (s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in (a, b))
    return is_equal(a, b) or difference(first, second).is_number


def guards_of(size: Size) -> tuple[sympy.Expr, ...]:
    """Return what torch.compile checks about sizes before it runs the graph of this size."""
    return tuple(g.expr for g in size.node.shape_env.guards) if isinstance(size, torch.SymInt) else ()


def difference(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Subtract two expressions of sizes. The result is zero if both round to blocks in different ways."""
    found = simplified(a - b)
    return quasi_affine(found) if found.has(sympy.Function) else found


def quotient(size: Size, part: Size) -> Size | None:
    """Divide two sizes; None unless the division leaves no remainder at every length."""
    if isinstance(size, int) and isinstance(part, int):
        return None if size % part else size // part
    exprs = (s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in (size, part))
    (given, *_) = (s for s in (size, part) if isinstance(s, torch.SymInt))
    found = divided_exactly(*map(simplified, exprs))
    if found is None:
        return None
    if found.is_Integer:
        return int(found)
    return given.node.shape_env.create_symintnode(found, hint=hint(size) // hint(part))


@functools.lru_cache(4096)
def simplified(expr: sympy.Expr) -> sympy.Expr:
    """Simplify an expression of sizes by carrying out divisions without a remainder. ``T * T // T`` becomes
    ``T``. A view with a size of -1 gives such expressions."""
    before = None
    while expr != before:  # nested divisions, the innermost first
        before, expr = expr, expr.replace(lambda e: type(e).__name__ == "FloorDiv", divided).expand()
    return expr


def divided(division: sympy.Expr) -> sympy.Expr:
    found = divided_exactly(*division.args)
    return division if found is None else found


@functools.lru_cache(4096)
def divided_exactly(size: sympy.Expr, part: sympy.Expr) -> sympy.Expr | None:
    """Divide two expressions; None if the division leaves a denominator."""
    found = sympy.cancel(size / part)
    return found if found.as_numer_denom()[1] == 1 else None


@functools.lru_cache(4096)
def parted(expr) -> tuple[object, int, int]:
    """Split a size's expression into ``factor * part + rest``, where ``factor`` and ``rest`` are numbers.
    Returns ``(part, factor, rest)``; the size determines ``part``, which other sizes may contain. The part
    of ``2 (h // 4) (w // 4) + 1`` is the product ``(h // 4) (w // 4)``. An expression without this form is
    returned as ``(expr, 1, 0)``."""
    rest, product = expr.as_independent(*expr.free_symbols, as_Add=True)
    factor, part = product.as_coeff_Mul()
    return (part, int(factor), int(rest)) if rest.is_Integer and factor.is_Integer else (expr, 1, 0)


def values_of(node: Node) -> tuple[Any, ...]:
    """Return the fake values of a node as a tuple: one, or those of an operator with several results."""
    value = value_of(node)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def sizes_of(nodes: Iterable[Node]) -> list[Size]:
    """List the sizes of the tensors that nodes compute, and the symbols in these sizes."""
    sizes = [s for n in nodes for v in values_of(n) if isinstance(v, torch.Tensor) for s in v.shape]
    return [*sizes, *(symbol for s in sizes for symbol in symbols_in(s))]


def cannot_tell(inputs: Iterable[object], sizes: Iterable[object]) -> list[Any]:
    """Find the sizes that the sizes of the inputs, given as fake values, do not determine."""
    sizes_of = (v.shape if isinstance(v, torch.Tensor) else [v] for v in inputs)
    given = {
        parted(s.node.expr)[0]: sympy.Dummy(integer=True, positive=True)  # a symbol: some divide by it
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
    """Is a node a view, without memory of its own?"""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def written_arguments(target: object, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Any]:
    """List the arguments of a call that an op writes into, by its schema."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    given = {a.name: v for a, v in zip(target._schema.arguments, args)} | {**kwargs}
    infos = {a.name: a.alias_info for a in target._schema.arguments if a.name in given}
    return [given[name] for name, info in infos.items() if info is not None and info.is_write]


def written_by(node: Node) -> list[Node]:
    """List the values that a node writes into, by the schema of its op."""
    written = written_arguments(node.target, node.args, node.kwargs)
    return [value for value in written if isinstance(value, Node)]


def viewed(node: Node, among: Collection[Node] | None = None) -> Node:
    """Find the value that a view reads, through views of views.

    Any other node is returned itself, and so is a view of a number.

    among  the views that are followed, by default all: a sweep writes a view that it keeps into memory
           of its own
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
    """Return the name of an op without its overload: ``mm`` for ``aten.mm.default``. It is empty for any
    other node."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def is_tangent(node: Node) -> bool:
    """Is this input of a joint graph the gradient of an output? It is recognized by the name that AOTAutograd
    gives it, as in AOTAutograd's own partitioners (torch/_functorch/partitioners.py, `_is_tangent`)."""
    return node.op == "placeholder" and node.target.startswith("tangents")


def is_tensor(node: Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def is_item(node: Node) -> bool:
    """Is a node one result of an operator that has several?"""
    return node.target is operator.getitem


def is_floating(node: Node) -> bool:
    return is_tensor(node) and value_of(node).dtype.is_floating_point


def arguments(node: Node) -> dict[str, Any]:
    """Map the schema names of a node's arguments to their values, with defaults filled in."""
    found = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    found.update({a.name: v for a, v in zip(node.target._schema.arguments, node.args)})
    found.update(node.kwargs)
    return found


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Collect these nodes and all nodes that they are computed from."""
    found, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


ORIGIN = "streambp_origin"  # the key of node.meta that `metadata_for` writes and `origin_of` reads


def origin_of(node: Node) -> str:
    """Return the name, in the traced graph, of the node that this one was written for. It is the node's own
    name, unless a pass wrote the node."""
    return node.meta.get(ORIGIN, node.name)


def metadata_for(node: Node, value: object = None) -> dict[str, Any]:
    """Build the metadata of a node that a pass writes in place of another.

    It keeps the user's line and the origin of the other node.

    value  the fake value of the new node; by default that of the other
    """
    return {**node.meta, ORIGIN: origin_of(node), "val": node.meta.get("val") if value is None else value}


def origin_metadata(node: Node) -> dict[str, Any]:
    """Build the metadata of nodes that stand for this one in a chunk body: the user's line and the origin. It
    has no fake value, because a chunk's values have other sizes."""
    return {"stack_trace": node.meta.get("stack_trace"), ORIGIN: origin_of(node)}


def copied(module: GraphModule) -> GraphModule:
    """Copy a graph, with its names and meta values, into a module of its own."""
    graph, nodes = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(module.graph, nodes))
    for old, new in nodes.items():
        new.meta = dict(old.meta)
    return GraphModule(module, graph)


def tensor_operands(node: Node) -> tuple[Node, ...]:
    """List the tensor operands in argument order, with lists flattened. A signature has one entry for
    each."""
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
    """Choose the dtype of an accumulator: float32 for half precision, otherwise the same dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def takes_kernel(node: Node) -> bool:
    """Does the node's op have an argument that names its kernel?"""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(
        a.name == "kernel" for a in target._schema.arguments
    )


def draws_random(node: Node) -> bool:
    """Does this node draw random numbers? Attention does so only with dropout, although its kernels are
    always tagged as random."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = arguments(node)
    return "dropout_p" not in given or given["dropout_p"] != 0


def outputs_of(module: GraphModule) -> tuple[object, ...]:
    """Return the outputs of a graph as a flat tuple."""
    return tuple(next(n for n in reversed(module.graph.nodes) if n.op == "output").args[0])
