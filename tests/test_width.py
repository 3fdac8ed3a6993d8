"""A program knows which of its values are wider at full length than a streamed program may hold."""

import operator
from dataclasses import replace

import pytest
import torch
from graphs import Written, causal_layer

from streambp_compile.passes.analyze import analyze
from streambp_compile.passes.ir import Mark, Program
from streambp_compile.passes.partition import partition
from streambp_compile.passes.verify import IllegalResult, verify_program
from streambp_compile.passes.width import KEYS, bytes_needed, too_wide, widest_at_full_length, width

aten, streambp = torch.ops.aten, torch.ops.streambp
LENGTH, WIDTH = 5, 8


def attention(factor: int, narrowed: bool = True):
    """Attention with values wider than ``x`` by a factor, and what is returned of it."""
    write = Written()
    x, w = (
        write.given("x", torch.randn(1, LENGTH, WIDTH)),
        write.given("w", torch.randn(WIDTH, factor * WIDTH)),
    )
    query = write("query", aten.unsqueeze.default, x, 1)
    flat = write("flat", aten.view.default, x, [LENGTH, WIDTH])
    values = write(
        "values", aten.view.default, write("wide", aten.mm.default, flat, w), [1, 1, LENGTH, factor * WIDTH]
    )
    both = write("both", streambp.attention.default, query, query, values, None, True, 1.0, 0)
    y = write("out", operator.getitem, both, 0)
    if narrowed:
        y = write("y", aten.mean.dim, y, [3])
    write.graph.output((y,))
    analysis = analyze(write.graph, LENGTH, {x: (Mark(1),)})
    return partition(write.graph, analysis, (y,)), analysis


def test_values_of_attention_may_be_several_times_as_wide():
    program, analysis = attention(KEYS)
    assert program.too_wide == ()
    verify_program(program, analysis)


def test_wider_values_are_declared():
    program, analysis = attention(KEYS + 1)
    assert [n.name for n in program.too_wide] == ["values"]
    verify_program(program, analysis)
    with pytest.raises(IllegalResult, match="wider than a streamed program may hold"):
        verify_program(replace(program, too_wide=()), analysis)


def test_what_the_region_returns_is_no_wider_than_asked():
    program, _ = attention(KEYS + 1, narrowed=False)
    assert program.too_wide == ()


def test_rows_that_could_be_computed_again_may_be_twice_as_wide():
    """The same values, written for a later sweep that reads them row by row."""
    program, analysis = attention(4)
    sweep = program.sweeps[0]
    wide = next(n for n in sweep.nodes if n.name == "wide")
    kept = replace(program, sweeps=(replace(sweep, writes=(*sweep.writes, wide)),), kept=(wide,))
    assert width(wide, analysis) == 4 * WIDTH
    assert too_wide(kept, analysis) == (wide,)


def test_a_layer_holds_nothing_too_wide():
    write, seeds, _, gradients = causal_layer()
    analysis = analyze(write.graph, LENGTH, seeds)
    program = partition(write.graph, analysis, gradients)
    assert isinstance(program, Program) and program.too_wide == ()


def test_operations_at_full_length_hold_what_is_alive_at_a_time():
    write = Written()
    x, table = write.given("x", torch.randn(1, LENGTH, WIDTH)), write.given("table", torch.randn(100, WIDTH))
    wide = write("wide", aten.exp.default, write("wider", aten.mul.Tensor, table, table))
    row = write("row", aten.sum.dim_IntList, wide, [0])
    y = write("y", aten.add.Tensor, x, row)
    write.graph.output((y,))
    analysis = analyze(write.graph, LENGTH, {x: (Mark(1),)})
    program = partition(write.graph, analysis, (y,))
    taken, first = widest_at_full_length(program)
    assert (taken, first.name) == (2 * 100 * WIDTH * 4, "wider")
    assert bytes_needed(program, analysis) == LENGTH * WIDTH * 4
