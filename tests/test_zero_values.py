"""Values that are zero together, against all masks and choices of a few tokens."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace

from streambp_compile.passes.zero_values import Entries, condition_of, zeros_of

EXPERTS, TOKENS = 3, 3
MASKS = [torch.tensor(m).view(2, 2) for m in itertools.product((False, True), repeat=4)]
CHOICES = [torch.tensor(c).view(TOKENS, 1) for c in itertools.product(range(EXPERTS), repeat=TOKENS)]


def one_hot(c):
    return F.one_hot(c, EXPERTS)


SAME = {
    "any": (lambda m: m.any(), MASKS),
    "any along": (lambda m: m.any(-1), MASKS),
    "one column": (lambda m: m[:, 1].any(), MASKS),
    "one row": (lambda m: m.select(0, 1), MASKS),
    "a column of the transposed": (lambda m: m.t()[1].sum(), MASKS),
    "sum": (lambda m: torch.sum(m) > 0, MASKS),
    "sum of numbers": (lambda m: m.float().sum(-1).view(2, 1), MASKS),
    "at least one": (lambda m: m.sum() >= 1, MASKS),
    "one number": (lambda c: (c == 1).any(-1), CHOICES),
    "counted": (lambda c: torch.bincount(c.flatten(), minlength=EXPERTS)[1], CHOICES),
    "one-hot": (lambda c: one_hot(c).permute(2, 1, 0)[1] == 1, CHOICES),
    "one-hot, summed": (
        lambda c: torch.greater(one_hot(c).permute(2, 1, 0).sum(dim=(-1, -2)), 0)[1],
        CHOICES,
    ),
    "one-hot, kept": (lambda c: one_hot(c).sum((0, 1), keepdim=True)[:, :, 1], CHOICES),
}


def traced(function, example):
    module = symbolic_trace(function)
    values = {}
    for node in module.graph.nodes:
        args = torch.fx.node.map_arg(node.args, values.get)
        kwargs = torch.fx.node.map_arg(node.kwargs, values.get)
        if node.op == "placeholder":
            values[node] = example
        elif node.op == "call_method":
            values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        elif node.op == "call_function":
            values[node] = node.target(*args, **kwargs)
        node.meta["example_value"] = values.get(node)
    return module.graph.output_node().args[0]


def is_zero(entries: Entries) -> bool:
    value = entries.node.meta["example_value"]
    if entries.number is not None:
        return not (value == entries.number).any()
    return not (value if entries.at is None else value.select(*entries.at)).any()


@pytest.mark.parametrize("name", SAME)
def test_zero_together(name):
    function, examples = SAME[name]
    for example in examples:
        node = traced(function, example)
        entries, way = zeros_of(Entries(node))
        assert entries.node.op == "placeholder" and way[0] is node
        assert is_zero(entries) == is_zero(Entries(node))
        assert is_zero(Entries(node)) == (not entries.mask().meta["example_value"].any())


OTHERS = {
    "all": lambda m: m.all(),
    "several": lambda m: m.sum() > 1,
    "differences": lambda m: (m.long() - 1).sum(),
    "wrapped": lambda m: m.sum(dtype=torch.int8),
    "every other": lambda m: m[:, ::2].any(),
    "not": lambda m: ~m,
}


@pytest.mark.parametrize("name", OTHERS)
def test_zero_by_itself(name):
    """What is zero elsewhere, too, is not said to be zero with the mask."""
    for example in MASKS:
        entries, _ = zeros_of(Entries(traced(OTHERS[name], example)))
        assert entries.node.op != "placeholder"


CONDITIONS = {
    "any": lambda m: m.any(),
    "none": lambda m: m.sum() == 0,
    "less than one": lambda m: m[0].sum() < 1,
    "not any": lambda m: m.any().logical_not(),
    "not none": lambda m: torch.logical_not(m.sum() == 0),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_where_all_is_zero(name):
    for example in MASKS:
        node = traced(CONDITIONS[name], example)
        entries, _, if_zero = condition_of(node)
        assert entries.node.op == "placeholder"
        assert bool(node.meta["example_value"]) == (if_zero is is_zero(entries))
