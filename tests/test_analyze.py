"""What every value carries, and how every edge reads: the table of a small causal layer as text, and the
corners."""

import operator

import pytest
import torch
from graphs import Written, causal_layer
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from streambp_compile.passes.analyze import analyze
from streambp_compile.passes.ir import CannotStream, Mark, Summed, quotient, target_name
from streambp_compile.passes.verify import verify_analysis

aten, prims = torch.ops.aten, torch.ops.prims

TABLE = """
x                            b [t] d                  rows
w                            shared                   whole
dy                           b [t] d                  rows
flat                         (b [t]) h                rows    x rows
projected                    (b [t]) h                rows    flat rows
keys                         b h [t] e                rows    projected rows
query                        b h [t] e                rows    x rows
both                         b h [t] e | b h [t]      rows    \
query rows, keys keys [-inf,0], keys keys [-inf,0]
out                          b h [t] e                rows    both rows
lse                          b h [t]                  rows    both rows
mixed                        b [t] d                  rows    out rows
y                            b [t] d                  rows    x rows, mixed rows
dout                         b h [t] e                rows    dy rows
grads                        b h [t] e | b h [t] e | b h [t] e mixed   \
dout rows, query rows, keys keys [-inf,0], keys keys [-inf,0], out rows, lse rows
dquery                       b h [t] e                rows    grads rows
dk                           b h [t] e                keysum  grads rows
dv                           b h [t] e                keysum  grads rows
dkeys                        b h [t] e                rows    dk rows, dv rows
dprojected                   (b [t]) h                rows    dkeys rows
rows_first                   b (b [t])                rows    flat rows
dw                           sum                      sum     rows_first rows, dprojected rows
turned                       shared                   whole
dflat                        (b [t]) h                rows    dprojected rows
of_query                     b [t] d                  rows    dquery rows
beside                       b [t] d                  rows    dy rows, of_query rows
of_keys                      b [t] d                  rows    dflat rows
dx                           b [t] d                  rows    beside rows, of_keys rows
"""


def test_the_table_of_a_causal_layer():
    write, seeds, *_ = causal_layer()
    found = analyze(write.graph, 5, seeds)
    verify_analysis(write.graph, found)
    assert found.table() == TABLE.strip()


def test_without_causality_every_key_is_reached():
    write, seeds, *_ = causal_layer(causal=False)
    assert analyze(write.graph, 5, seeds).table() == TABLE.strip().replace("[-inf,0]", "[-inf,+inf]")


SHIFTED = """
logits                       [t] h                    rows
labels                       [t]                      rows
seen                         [t] h  rows 0…T-1        rows    logits rows
following                    [t]  rows 1…T            rows    labels rows
column                       [t] h  rows 1…T          rows    following rows
picked                       [t] h  rows 0…T-1        rows    seen rows, column halo [1,1]
loss                         sum                      sum     picked rows
"""


def test_labels_shifted_by_one_are_read_one_row_ahead_where_they_meet_the_logits():
    write = Written()
    logits, labels = (
        write.given("logits", torch.randn(5, 8)),
        write.given("labels", torch.zeros(5, dtype=torch.int64)),
    )
    seen, following = (
        write("seen", aten.slice.Tensor, logits, 0, 0, 4),
        write("following", aten.slice.Tensor, labels, 0, 1, 5),
    )
    picked = write(
        "picked", aten.gather.default, seen, 1, write("column", aten.unsqueeze.default, following, 1)
    )
    write.graph.output((write("loss", aten.sum.default, picked),))
    found = analyze(write.graph, 5, {logits: (Mark(0),), labels: (Mark(0),)})
    assert found.table() == SHIFTED.strip()


CREATED = """
x                            [t] h                    rows
filled                       [t] h                    rows
more                         [t] h                    rows    x rows, filled rows
square                       shared                   whole
product                      [t] h                    rows    more rows
"""


def test_created_values_carry_tokens_only_where_their_readers_do():
    """Five by five both: one meets rows of tokens, the other is a matrix of weights."""
    write = Written()
    x = write.given("x", torch.randn(5, 5))
    more = write("more", aten.add.Tensor, x, write("filled", aten.full.default, [5, 5], 1.0))
    write.graph.output(
        (write("product", aten.mm.default, more, write("square", aten.full.default, [5, 5], 1.0)),)
    )
    assert analyze(write.graph, 5, {x: (Mark(0),)}).table() == CREATED.strip()


def test_what_is_made_of_sums_is_a_sum():
    write = Written()
    x = write.given("x", torch.randn(5, 8))
    tail = write("tail", aten.log.default, write("total", aten.sum.default, x))
    write.graph.output((tail,))
    assert analyze(write.graph, 5, {x: (Mark(0),)}).facts[tail] == Summed()


def test_an_op_without_a_rule_is_refused_where_tokens_meet_it_with_the_users_line():
    write = Written()
    x, weight = write.given("x", torch.randn(5, 5)), write.given("weight", torch.randn(5, 5))
    harmless = write("harmless", aten.linalg_inv_ex.default, weight)
    write.graph.output((harmless,))
    analyze(write.graph, 5, {x: (Mark(0),)})
    with write.graph.inserting_before(next(iter(reversed(write.graph.nodes)))):
        harmful = write("harmful", aten.linalg_inv_ex.default, x)
    with pytest.raises(CannotStream, match="No rule describes") as caught:
        analyze(write.graph, 5, {x: (Mark(0),)})
    assert caught.value.refusal.where == ""
    harmful.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    y = torch.linalg.inv(x)'
    with pytest.raises(CannotStream, match="model.py:7: y = torch.linalg.inv"):
        analyze(write.graph, 5, {x: (Mark(0),)})


def test_the_graph_is_left_alone():
    write, seeds, *_ = causal_layer()
    before, keys = str(write.graph), {n: set(n.meta) for n in write.graph.nodes}
    first, second = (analyze(write.graph, 5, seeds).table() for _ in range(2))
    assert str(write.graph) == before and keys == {n: set(n.meta) for n in write.graph.nodes}
    assert first == second


def test_one_of_several_results_has_the_name_of_its_operator():
    write = Written()
    parts = write("parts", aten.split.Tensor, write.given("x", torch.randn(6, 2)), 3)
    assert target_name(write("part", operator.getitem, parts, 0)) == "aten.split.Tensor"


def symbol(env: ShapeEnv, name: str, size: int) -> torch.SymInt:
    source = ConstantSource(name)
    found = env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(found, hint=size, source=source)


def test_sizes_divide_without_a_remainder():
    env = ShapeEnv()
    batch, length = (symbol(env, "batch", 4), symbol(env, "length", 61))
    assert quotient(batch * length, length).node.expr == batch.node.expr
    assert quotient(batch * (length - 1), length - 1).node.expr == batch.node.expr
    assert quotient(6 * length, length) == 6 and quotient(6, 3) == 2
    assert quotient(length, batch) is None and quotient(length, 2) is None and quotient(7, 2) is None


def test_rows_of_a_batch_that_changes():
    """Rows of several sequences are located at any batch; a size that only equals them now leaves a rest."""
    env = ShapeEnv()
    batch, length = (symbol(env, "batch", 4), symbol(env, "length", 61))
    mark, beyond, rest = Mark(0, outer=4).located(batch * (length - 1), length)
    assert mark == Mark(0, outer=4) and mark.at(lambda size: 9) == Mark(0, outer=9)
    assert beyond == -1 and rest.node.expr == 0
    _, _, rest = Mark(0, outer=4).located(batch * batch + 228, length)
    assert rest.node.expr != 0
