"""Rows of operands that a row of a call is made of, asked of the table before autograd."""

import pytest
import torch
import torch.nn.functional as F
from test_aten import graph_of

from streambp_compile.dynamo.reading import row_ties
from streambp_compile.dynamo.reading.aten import to_aten

X, W = torch.randn(2, 12, 8), torch.randn(8, 8)
CALLS = {
    "pointwise": (lambda x, w: x.tanh(), [{"x": 0}, {"x": 1}, {"x": 2}]),
    "linear": (lambda x, w: F.linear(x, w), [{"x": 0}, {"x": 1}, {"w": 0}]),
    "norm": (lambda x, w: F.layer_norm(x, (8,)), [{"x": 0}, {"x": 1}, {}]),
    "softmax": (lambda x, w: x.log_softmax(1), [{"x": 0}, {}, {"x": 2}]),
    "split": (lambda x, w: x.unflatten(-1, (2, 4)), [{"x": 0}, {"x": 1}, {}, {}]),
    "moved": (lambda x, w: x.transpose(0, 2), [{"x": 2}, {"x": 1}, {"x": 0}]),
    "shifted": (lambda x, w: F.pad(x, (0, 0, 1, -1)), [{"x": 0}, {}, {"x": 2}]),
    "by place": (lambda x, w: x.tril(), [{"x": 0}, {}, {}]),
    "running": (lambda x, w: x.cumsum(1), [{"x": 0}, {}, {"x": 2}]),
    "with itself": (lambda x, w: w @ w, [{}, {}]),
    "looked up": (lambda x, w: F.embedding(x[..., 0].long() * 0, w), [{}, {}, {"w": 1}]),
}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.quick
def test_rows_of_a_call(name):
    function, expected = CALLS[name]
    result = to_aten(graph_of(function, X, W)).graph.output_node().args[0][0]
    found = [row_ties.operand_dims(result, dim) for dim in range(len(expected))]
    short = {"l_x_": "x", "l_w_": "w"}
    named = [{short[a.name]: at for a, at in dims.items() if a.name in short} for dims in found]
    assert named == expected


def test_a_call_that_has_a_row_is_not_traced(monkeypatch):
    monkeypatch.setattr(row_ties, "TIES", {})
    monkeypatch.setattr(row_ties, "in_operators", lambda *call: pytest.fail("it was traced"))
    result = to_aten(graph_of(lambda x: x.transpose(0, 1), X)).graph.output_node().args[0][0]
    assert row_ties.operand_dims(result, 1) == {result.args[0]: 0}
