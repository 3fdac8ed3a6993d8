"""The rule oracle: every row of the table against what its op does when it is run.

A signature is believed only after (a) its labels fit the values, (b) perturbing one entry moved no output row that the ties do not
allow, and (c) running on a piece gave a piece of the whole, and pieces of a sum added up to it.
"""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from graphs import single
from torch.utils._pytree import tree_map

from streambp_compile.passes.analyze import reshaped
from streambp_compile.passes.ir import EVERYWHERE, HERE, CannotStream, Mark, tensor_operands
from streambp_compile.passes.rules import TABLE, overload, rule_of

aten, prims, streambp = torch.ops.aten, torch.ops.prims, torch.ops.streambp


@dataclass(frozen=True)
class Index:
    """An index operand: perturbed to other numbers below ``bound``."""

    values: torch.Tensor
    bound: int


def x(*shape, dtype=torch.float64):
    """Random numbers in a random dense layout."""
    order = random.sample(range(len(shape)), len(shape))
    value = torch.randn([shape[d] for d in order], dtype=torch.float64)
    value = value.permute([order.index(d) for d in range(len(shape))])
    return value > 0 if dtype is torch.bool else value.to(dtype)


def pick(bound, *shape):
    return Index(torch.randint(bound, shape), bound)


def attention_operands(mask, groups=1, causal=True, rows=5, keys=5):
    q, k, v = x(2, 2 * groups, rows, 4), x(2, 2, keys, 4), x(2, 2, keys, 4)
    m = x(*mask) if mask else None
    return q, k, v, m, causal, 0.5


def attention(mask=None, groups=1, causal=True):
    return lambda: (streambp.attention.default, (*attention_operands(mask, groups, causal), 0), {})


def attention_backward(mask=None, groups=1, causal=True):
    def make():
        q, k, v, m, c, scale = attention_operands(mask, groups, causal)
        out, lse = streambp.attention(q, k, v, m, c, scale, 0)
        return streambp.attention_backward.default, (x(*out.shape), q, k, v, out, lse, m, c, scale), {}

    return make


def call(name, *args, **kwargs):
    """A sample: arguments are values, or functions that make them anew."""
    def made(a):
        return a() if callable(a) else a

    return lambda: (overload(name), tuple(tree_map(made, a) for a in args), {k: tree_map(made, v) for k, v in kwargs.items()})


def t(*shape, dtype=torch.float64):
    return lambda: x(*shape, dtype=dtype)


def i(bound, *shape):
    return lambda: pick(bound, *shape)


BOOL = torch.bool
PLACE = dict(dtype=torch.float64, device=torch.device("cpu"))

SAMPLES = {
    # pointwise
    **{n: [call(n, t(3, 4, 5)), call(n, t(3))] for n in (
        "aten::clone", "aten::detach", "aten::alias", "aten::_to_copy", "aten::lift_fresh_copy", "aten::zeros_like", "aten::ones_like",
        "aten::_conj")},
    "aten::copy": [call("aten::copy", t(3, 4), t(3, 4)), call("aten::copy", t(3, 4), t(4)), call("aten::copy", t(3, 4), t(3, 1))],
    "prims::convert_element_type": [call("prims::convert_element_type", t(3, 4), torch.float32)],
    "aten::where.self": [call("aten::where.self", t(3, 4, dtype=BOOL), t(3, 4), t(3, 4)),
                         call("aten::where.self", t(3, 1, dtype=BOOL), t(4), t(2, 1, 1)),
                         call("aten::where.self", t(3, 4, dtype=BOOL), t(3, 4), t())],
    "aten::masked_fill.Scalar": [call("aten::masked_fill.Scalar", t(3, 4), t(3, 4, dtype=BOOL), -1.0),
                                 call("aten::masked_fill.Scalar", t(2, 3, 4), t(3, 1, dtype=BOOL), -1.0)],
    "aten::masked_fill.Tensor": [call("aten::masked_fill.Tensor", t(2, 3, 4), t(3, 4, dtype=BOOL), t())],
    "aten::threshold_backward": [call("aten::threshold_backward", t(3, 4), t(3, 4), 0)],
    **{n: [call(n, t(3, 4), t(3, 4)), call(n, t(2, 3, 1), t(2, 3, 4))] for n in (
        "aten::gelu_backward", "aten::silu_backward", "aten::tanh_backward", "aten::sigmoid_backward")},
    "aten::fill.Scalar": [call("aten::fill.Scalar", t(3, 4), 2.0)],
    "aten::full_like": [call("aten::full_like", t(3, 4), 2.0)],
    # views
    **{n: [call(n, t(3, 4, 5), [12, 5]), call(n, t(12, 5), [3, 4, 5]), call(n, t(3, 20), [3, 4, 5]), call(n, t(3, 4, 1), [3, 1, 4])]
       for n in ("aten::_unsafe_view", "aten::reshape")},
    "aten::view": [call("aten::view", lambda: torch.randn(s, dtype=torch.float64), o) for s, o in (
        ((3, 4, 5), [12, 5]), ((3, 4, 5), [3, 20]), ((12, 5), [3, 4, 5]), ((3, 20), [3, 4, 5]), ((3, 4, 1), [3, 1, 4]), ((4, 4, 4), [16, 4]))],
    "aten::unsqueeze": [call("aten::unsqueeze", t(3, 4), d) for d in (0, 1, 2, -1, -3)],
    "aten::squeeze": [call("aten::squeeze", t(1, 3, 1, 4))],
    "aten::squeeze.dim": [call("aten::squeeze.dim", t(1, 3, 1, 4), d) for d in (0, 1, -2)],
    "aten::squeeze.dims": [call("aten::squeeze.dims", t(1, 3, 1, 4), d) for d in ([0, 2], [0], [-2, 1])],
    "aten::permute": [call("aten::permute", t(3, 4, 5), d) for d in ([2, 0, 1], [0, 2, 1], [-1, 0, 1])],
    "aten::t": [call("aten::t", t(3, 4)), call("aten::t", t(3))],
    "aten::numpy_T": [call("aten::numpy_T", t(3, 4))],
    "aten::transpose.int": [call("aten::transpose.int", t(3, 4, 5), *d) for d in ((0, 1), (1, 2), (-1, 0))],
    "aten::expand": [call("aten::expand", t(3, 1), [3, 4]), call("aten::expand", t(4), [3, 4]), call("aten::expand", t(3, 4), [2, 3, 4])],
    "aten::repeat": [call("aten::repeat", t(3, 4), r) for r in ([2, 1], [1, 2], [2, 1, 1], [1, 1])],
    "aten::slice.Tensor": [call("aten::slice.Tensor", t(3, 6), *a) for a in (
        (1, 1, 5), (1, -2), (1, 0, -1), (0, 1, 9), (1, 1, 6, 2), (-1, 2), ())],
    "aten::select.int": [call("aten::select.int", t(3, 4, 5), *a) for a in ((1, 2), (-1, -1), (0, 0))],
    "aten::constant_pad_nd": [call("aten::constant_pad_nd", t(3, 4), *a) for a in (
        ([1, 2],), ([0, 1], 7.0), ([-1, 2],), ([-1, 0],), ([0, 0, 1, 0],), ([1, 0, -1, -1], 2.0))],
    "aten::slice_scatter": [call("aten::slice_scatter", t(3, 6), t(*s), *a) for s, a in (
        ((3, 4), (1, 1, 5)), ((3, 2), (1, -2)), ((2, 6), (0, 1, 9)), ((3, 3), (1, 0, 6, 2)), ((3, 6), (1,)))],
    "aten::cat": [call("aten::cat", [t(3, 4), t(3, 2)], 1), call("aten::cat", [t(3, 4), t(1, 4)]), call("aten::cat", [t(3, 4), t(3, 4)], -1),
                  call("aten::cat", [t(0), t(3, 4)], 1)],
    "aten::split.Tensor": [call("aten::split.Tensor", t(3, 5), 2, 1), call("aten::split.Tensor", t(4, 5), 3)],
    "aten::split_with_sizes": [call("aten::split_with_sizes", t(3, 5), [2, 3], -1)],
    "aten::unbind.int": [call("aten::unbind.int", t(3, 4, 5), d) for d in (0, 1, -1)],
    "aten::chunk": [call("aten::chunk", t(3, 5), 2, 1)],
    "aten::flip": [call("aten::flip", t(3, 4), d) for d in ([0], [1], [-1, 0])],
    "aten::roll": [call("aten::roll", t(3, 4), [1], [1]), call("aten::roll", t(3, 4), [2])],
    "aten::as_strided": [],  # refuses: see test_as_strided_refuses
    # matrix products
    "aten::mm": [call("aten::mm", t(3, 4), t(4, 5)), call("aten::mm", t(4, 4), t(4, 4))],
    "aten::bmm": [call("aten::bmm", t(2, 3, 4), t(2, 4, 5))],
    "aten::mv": [call("aten::mv", t(3, 4), t(4))],
    "aten::dot": [call("aten::dot", t(4), t(4))],
    "aten::vdot": [call("aten::vdot", t(4), t(4))],
    "aten::addmm": [call("aten::addmm", t(5), t(3, 4), t(4, 5)), call("aten::addmm", t(3, 5), t(3, 4), t(4, 5)),
                    call("aten::addmm", t(3, 1), t(3, 4), t(4, 5), beta=2, alpha=3)],
    "aten::baddbmm": [call("aten::baddbmm", t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)), call("aten::baddbmm", t(1, 5), t(2, 3, 4), t(2, 4, 5))],
    # reductions
    "aten::sum": [call("aten::sum", t(3, 4)), call("aten::sum", t(3, 4, dtype=BOOL))],
    "aten::sum.dim_IntList": [call("aten::sum.dim_IntList", t(3, 4, 5), *a) for a in (
        ([1],), ([-1], True), ([0, 2],), (None,), ([], True))],
    **{n: [call(n, t(3, 4, 5), [1]), call(n, t(3, 4, 5), [-1, 0], True), call(n, t(3, 4), [0])] for n in (
        "aten::mean.dim", "aten::amax", "aten::amin", "aten::logsumexp")},
    **{n: [call(n, t(3, 4, dtype=BOOL), 1), call(n, t(3, 4, dtype=BOOL), 0, True)] for n in ("aten::any.dim", "aten::all.dim")},
    **{n: [call(n, t(3, 4, 2, dtype=BOOL), [1]), call(n, t(3, 4, 2, dtype=BOOL), [0, -1], True), call(n, t(3, 4, dtype=BOOL))]
       for n in ("aten::any.dims", "aten::all.dims")},
    **{n: [call(n, t(3, 4), 1), call(n, t(3, 4), -2, True), call(n, t(3, 4))] for n in ("aten::argmax", "aten::argmin")},
    "aten::prod.dim_int": [call("aten::prod.dim_int", t(3, 4), 1), call("aten::prod.dim_int", t(3, 4), 0, True)],
    **{n: [call(n, t(3, 4))] for n in ("aten::mean", "aten::max", "aten::min", "aten::prod")},
    **{n: [call(n, t(3, 4, dtype=BOOL))] for n in ("aten::any", "aten::all")},
    **{n: [call(n, t(3, 4), 1), call(n, t(3, 4), 0, True)] for n in ("aten::max.dim", "aten::min.dim")},
    **{n: [call(n, t(3, 4, 2), [1]), call(n, t(3, 4, 2), [-1, 0], correction=0, keepdim=True), call(n, t(3, 4))]
       for n in ("aten::var_mean.correction", "aten::var.correction")},
    "aten::topk": [call("aten::topk", t(3, 5), 2), call("aten::topk", t(5, 3), 2, 0)],
    "aten::sort": [call("aten::sort", t(3, 5)), call("aten::sort", t(3, 5), 0)],
    "aten::sort.stable": [call("aten::sort.stable", t(3, 5), stable=True), call("aten::sort.stable", t(3, 5), stable=True, dim=0)],
    **{n: [call(n, t(3, 4, 5), d, False) for d in (-1, 1)] for n in ("aten::_softmax", "aten::_log_softmax")},
    "aten::_safe_softmax": [call("aten::_safe_softmax", t(3, 4), -1)],
    **{n: [call(n, t(3, 4, 5), t(3, 4, 5), d, torch.float64) for d in (-1, 1)] for n in (
        "aten::_softmax_backward_data", "aten::_log_softmax_backward_data")},
    **{n: [call(n, t(3, 4), 1), call(n, t(3, 4), 0), call(n, t(4, 3, 2), -2)] for n in (
        "aten::cumsum", "aten::logcumsumexp", "aten::cumprod")},
    # look-ups
    "aten::embedding": [call("aten::embedding", t(7, 3), i(7, 2, 4)), call("aten::embedding", t(7, 3), i(7, 4), 2)],
    "aten::embedding_dense_backward": [
        call("aten::embedding_dense_backward", t(2, 4, 3), i(7, 2, 4), 7, -1, False),
        call("aten::embedding_dense_backward", t(4, 3), i(7, 4), 7, 2, False),
        call("aten::embedding_dense_backward", t(6, 3), i(2, 6), 2, -1, True)],
    "aten::index_select": [call("aten::index_select", t(3, 5), 1, i(5, 4)), call("aten::index_select", t(3, 5), 0, i(3, 6))],
    "aten::index.Tensor": [
        call("aten::index.Tensor", t(5, 4), [i(5, 3)]), call("aten::index.Tensor", t(3, 5), [None, i(5, 4)]),
        call("aten::index.Tensor", t(5, 6, 4), [i(5, 2, 3), i(6, 3)]), call("aten::index.Tensor", t(5, 4, 6), [i(5, 3), None, i(6, 3)]),
        call("aten::index.Tensor", t(5, 4, 6), [i(5, 3, 1), None, i(6, 2)]), call("aten::index.Tensor", t(5, 6, 4), [i(5, 3, 1), i(6, 1, 3)]),
        call("aten::index.Tensor", t(4, 5, 6, 2), [None, i(5, 3), i(6, 3)])],
    "aten::gather": [call("aten::gather", t(3, 5), 1, i(5, 3, 4)), call("aten::gather", t(3, 5), 1, i(5, 2, 4)),
                     call("aten::gather", t(5, 3), -2, i(5, 4, 3)), call("aten::gather", t(3, 5), 1, i(5, 3, 5))],
    "aten::scatter.value": [call("aten::scatter.value", t(3, 5), 1, i(5, 3, 2), 1.0), call("aten::scatter.value", t(3, 5), 1, i(5, 2, 2), 1.0)],
    "aten::scatter.src": [call("aten::scatter.src", t(3, 5), 1, i(5, 3, 1), t(3, 1)), call("aten::scatter.src", t(3, 5), 1, i(5, 2, 1), t(3, 4))],
    "aten::scatter_add": [call("aten::scatter_add", t(3, 5), 1, i(5, 3, 2), t(3, 2)), call("aten::scatter_add", t(3, 5), 0, i(3, 4, 5), t(4, 5)),
                          call("aten::scatter_add", t(3, 5), 1, i(5, 2, 2), t(3, 4))],
    "aten::scatter_reduce.two": [call("aten::scatter_reduce.two", t(3, 5), 1, i(5, 3, 2), t(3, 2), "sum"),
                                 call("aten::scatter_reduce.two", t(3, 5), 1, i(5, 2, 2), t(2, 2), "amax", include_self=False)],
    **{n: [call(n, lambda: torch.zeros(7, 3, dtype=torch.float64), [i(7, 4)], t(4, 3), True), call(n, t(7, 3), [i(7, 4)], t(4, 3), True),
           call(n, t(7, 3), [i(7, 4)], t(4, 3)), call(n, t(4, 7), [None, i(7, 3)], t(4, 3), True), call(n, t(7, 3), [i(7, 4)], t(), True),
           call(n, t(7, 6, 3), [i(7, 2, 4), i(6, 4)], t(2, 4, 3), True), call(n, t(7, 3), [i(7, 4)], t(1, 3), True)]
       for n in ("aten::index_put", "aten::_unsafe_index_put")},
    "aten::index_add": [call("aten::index_add", t(3, 5), 1, i(5, 2), t(3, 2)), call("aten::index_add", t(7, 3), 0, i(7, 4), t(4, 3), alpha=2)],
    # creation
    "aten::full": [call("aten::full", [3, 4], 2.0, **PLACE)],
    **{n: [call(n, [3, 4], **PLACE)] for n in ("aten::zeros", "aten::ones")},
    "aten::empty.memory_format": [call("aten::empty.memory_format", [3, 4], **PLACE)],
    "aten::scalar_tensor": [call("aten::scalar_tensor", 2.0, **PLACE)],
    **{n: [call(n, t(3, 4), [5, 3])] for n in ("aten::new_zeros", "aten::new_ones", "aten::new_empty")},
    "aten::new_full": [call("aten::new_full", t(3, 4), [5, 3], 2.0)],
    "prims::iota": [call("prims::iota", 5, start=2, step=3, dtype=torch.int64, device=torch.device("cpu"), requires_grad=False)],
    # attention
    "streambp::attention": [attention(), attention(groups=3), attention(causal=False), attention((1, 1, 5, 5), causal=False),
                            attention((2, 4, 5, 5), groups=2, causal=False), attention((2, 1, 5, 5), groups=2)],
    "streambp::attention_backward": [attention_backward(), attention_backward(groups=3), attention_backward(causal=False),
                                     attention_backward((2, 1, 5, 5), causal=False), attention_backward((1, 4, 5, 5), 2)],
}

UNFILLED = {overload("aten::empty.memory_format"), overload("aten::new_empty")}  # nothing to compare: whatever was in memory

# Rules that tie less than their op does. Each costs memory, never exactness.
WIDER_THAN_NEEDED = {}


def unwrapped(made):
    """Arguments as the op takes them, and the bounds of index operands, in the order of the operands."""
    target, args, kwargs = made
    bounds = []

    def open_(a):
        if isinstance(a, Index):
            bounds.append(a.bound)
            return a.values
        if isinstance(a, torch.Tensor):
            bounds.append(None)
        return a

    def leaf(a):
        return isinstance(a, (Index, torch.Tensor))

    return target, tree_map(open_, args, is_leaf=leaf), tree_map(open_, kwargs, is_leaf=leaf), bounds


def sample_of(name, number, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    return Sample(*unwrapped(SAMPLES[name][number]()))


class Sample:
    """One call, its node, its signature, and ways to run it again with other operands."""

    def __init__(self, target, args, kwargs, bounds):
        self.target, self.args, self.kwargs, self.bounds = target, args, kwargs, bounds
        self.graph, self.node = single(target, args, kwargs)
        self.operands = [n.meta["val"] for n in tensor_operands(self.node)]
        self.rule = rule_of(self.node)
        self.signature = self.rule.signature(self.node)
        self.outputs = listed(self.node.meta["val"])

    def run(self, operands, shape=None):
        """The op on other operands; ``shape`` replaces its shape argument."""
        left = iter(operands)
        args, kwargs = tree_map(lambda a: next(left) if isinstance(a, torch.Tensor) else a, (self.args, self.kwargs))
        if shape is not None and self.rule.shape_arg is not None:
            args = tuple(list(shape) if k == self.rule.shape_arg else a for k, a in enumerate(args))
        return listed(self.target(*args, **kwargs))

    def perturbed(self, operand, dim, row):
        """The operands with one row along ``dim`` of one of them changed everywhere."""
        value = self.operands[operand].clone()
        rows = value.select(dim, row)
        if value.dtype is torch.bool:
            rows.logical_not_()
        elif value.is_floating_point():
            rows.add_(torch.randn_like(rows) * 3)
        else:
            rows.add_(torch.randint(1, max(self.bounds[operand], 2), rows.shape)).remainder_(self.bounds[operand])
        return [value if k == operand else o for k, o in enumerate(self.operands)]


def listed(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


def moved_rows(before, after, dim):
    """Which rows along a dimension changed in a bit."""
    same = (before == after) | (before.isnan() & after.isnan())
    others = [d for d in range(before.dim()) if d != dim]
    return {k for k in range(before.shape[dim]) if not same.select(dim, k).all()} if others else {
        k for k in range(before.shape[0]) if not same[k]}


def cases():
    for name, samples in SAMPLES.items():
        for number in range(len(samples)):
            yield pytest.param(name, number, id=f"{name}-{number}")


def test_every_row_of_the_table_has_a_sample():
    assert {overload(n) for n in SAMPLES} >= set(TABLE)
    assert set(TABLE) >= {overload(n) for n in SAMPLES}


@pytest.mark.parametrize("name,number", cases())
def test_labels_fit_the_values(name, number):
    """(a) One label for every dimension there is; dimensions of one label have one size."""
    sample = sample_of(name, number, 0)
    signature = sample.signature
    assert len(signature.operands) == len(sample.operands)
    assert len(signature.outputs) == len(sample.outputs)
    sizes = {}
    for value, labels in (*zip(sample.operands, signature.operands), *zip(sample.outputs, signature.outputs)):
        assert len(labels) == value.dim(), f"{len(labels)} labels for {tuple(value.shape)}"
        named = [label for label in labels if label is not None]
        assert len(set(named)) == len(named), f"a label twice in {labels}"
        for label, size in zip(labels, value.shape):
            if label is not None and not any(signature.offsets.get(label, ())):
                assert sizes.setdefault(label, size) == size, f"{label!r} has sizes {sizes[label]} and {size}"
    for value, labels in zip(sample.operands, signature.operands):
        for label, size in zip(labels, value.shape):
            untied = label is None and size > 1 and not signature.reshape
            assert not untied or signature.contracts == "all", "rows tied to nothing cannot be added up"


@pytest.mark.parametrize("name,number", cases())
def test_perturbing_moves_no_other_rows(name, number):
    """(b) Entry j of an operand may move output row i only where the reach of i covers j."""
    seen, declared = {}, {}
    for seed in range(3):
        sample = sample_of(name, number, seed)
        signature = sample.signature
        if signature.reshape or sample.target in UNFILLED:
            continue
        for k, (value, labels) in enumerate(zip(sample.operands, signature.operands)):
            for dim, label in enumerate(labels):
                for row in range(value.shape[dim]):
                    after = sample.run(sample.perturbed(k, dim, row))
                    for before, now, out in zip(sample.outputs, after, signature.outputs):
                        for other, place in enumerate(out):
                            reach = allowed(signature, label, place)
                            if reach is None:
                                continue
                            offsets = signature.offsets.get(label, ())
                            shift = offsets[k] if k < len(offsets) and label == place else 0
                            for moved in moved_rows(before, now, other):
                                distance = row - moved - shift
                                if label == signature.rows and place == signature.keys:
                                    distance = -distance  # query i moves key j's gradient: the key's distance from the query
                                assert reach.lo <= distance <= reach.hi, (
                                    f"operand {k} dim {dim} row {row} moved output row {moved}: outside {reach}")
                                seen.setdefault((label, place), set()).add(distance)
                                declared[label, place] = (reach, value.shape[dim])
    for (label, place), distances in seen.items():
        reach, size = declared[label, place]
        lo, hi = max(reach.lo, 1 - size), min(reach.hi, size - 1)
        assert (min(distances), max(distances)) == (lo, hi), f"reach {reach} of {label!r} is wider than what moved: {sorted(distances)}"


def allowed(signature, label, place):
    """The distances (operand row minus output row) over which a label may move another, or None if nothing is claimed."""
    if label is None or place is None:
        return None
    if label == place:
        if label == signature.keys and signature.rows is None:
            return EVERYWHERE  # normalised along it
        return signature.reach.get(label, HERE) if signature.rows is None else HERE
    if signature.rows is not None and {label, place} == {signature.rows, signature.keys}:
        return signature.reach[signature.keys]
    return None


@pytest.mark.parametrize("name,number", cases())
def test_pieces_are_pieces_of_the_whole(name, number):
    """(c) A tie of zero reach: the op on a slice is a slice of the op. A sum: pieces add up."""
    sample = sample_of(name, number, 0)
    signature = sample.signature
    if signature.reshape or sample.target in UNFILLED or sample.target is prims.iota.default:
        return
    labels = {label for ls in (*signature.operands, *signature.outputs) for label in ls if label is not None}
    for label in sorted(labels, key=str):
        places = [ls.index(label) if label in ls else None for ls in signature.operands]
        outs = [ls.index(label) if label in ls else None for ls in signature.outputs]
        if label in (signature.rows, signature.keys) or label in signature.reach or any(signature.offsets.get(label, ())):
            continue
        if any(o is not None for o in outs):
            assert_sliced(sample, label, places, outs)
        elif signature.contracts == "sum" and signature.rows is None:
            assert_summed(sample, label, places)


def cuts(size):
    return [(0, size // 2), (size // 2, size)] if size > 1 else [(0, size)]


def piece(values, places, start, stop):
    return [v if d is None else v.narrow(d, start, stop - start) for v, d in zip(values, places)]


def assert_sliced(sample, label, places, outs):
    size = next(v.shape[d] for v, d in zip(sample.outputs, outs) if d is not None)
    for start, stop in cuts(size):
        wanted = piece(sample.outputs, outs, start, stop)
        got = sample.run(piece(sample.operands, places, start, stop), shape=wanted[0].shape)
        for a, b, d in zip(got, wanted, outs):
            if d is not None:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m: f"{label!r} [{start}:{stop}]: {m}")


def assert_summed(sample, label, places):
    size = next(v.shape[d] for v, d in zip(sample.operands, places) if d is not None)
    parts = [sample.run(piece(sample.operands, places, *cut)) for cut in cuts(size)]
    for whole, *pieces in zip(sample.outputs, *parts):
        torch.testing.assert_close(sum(pieces), whole, rtol=1e-12, atol=1e-12, msg=lambda m: f"sum over {label!r}: {m}")


def test_ties_are_not_missed():
    """A dimension whose rows never mix, but that a rule leaves untied, is memory given away: none is, but those listed."""
    found = set()
    for name, samples in SAMPLES.items():
        for number in range(len(samples)):
            found |= {(name, *miss) for miss in missed_ties(name, number)}
    assert {miss[0] for miss in found} == set(WIDER_THAN_NEEDED), sorted(found)


def missed_ties(name, number):
    """Pairs of dimensions that always move together, row for row, though their labels differ."""
    together, untied = None, set()
    for seed in range(2):
        sample = sample_of(name, number, seed)
        signature = sample.signature
        if signature.reshape or sample.target in UNFILLED or signature.rows is not None:
            return set()
        now = set()
        for k, (value, labels) in enumerate(zip(sample.operands, signature.operands)):
            for dim, label in enumerate(labels):
                if value.shape[dim] < 2:
                    continue
                moves = [sample.run(sample.perturbed(k, dim, row)) for row in range(value.shape[dim])]
                for o, (before, out) in enumerate(zip(sample.outputs, signature.outputs)):
                    for other, place in enumerate(out):
                        if before.shape[other] != value.shape[dim] or label is not None and label == place:
                            continue
                        if all(moved_rows(before, after[o], other) == {row} for row, after in enumerate(moves)):
                            now.add((k, dim, o, other))
        together = now if together is None else together & now
    return together | untied


# Views that merge and split dimensions: their ties come from the sizes

@pytest.mark.parametrize("old,new,dim,want", [
    ((2, 6, 4), (12, 4), 1, Mark(0, 2, 1)), ((2, 6, 4), (2, 24), 1, Mark(1, 1, 4)), ((2, 6, 4), (48,), 1, Mark(0, 2, 4)),
    ((2, 6, 4), (2, 6, 2, 2), 1, Mark(1)), ((2, 6, 4), (2, 1, 6, 4), 1, Mark(2)), ((2, 6, 4), (2, 3, 2, 4), 1, None),
    ((6, 6), (36,), 0, Mark(0, 1, 6)), ((6, 6), (36,), 1, Mark(0, 6, 1)), ((6, 6, 6), (6, 36), 1, Mark(1, 1, 6)),
    ((6, 6, 6), (36, 6), 1, Mark(0, 6, 1)), ((2, 6), (2, 6, 1), 1, Mark(1)), ((4, 3), (6, 2), 0, None)])
def test_a_reshape_carries_the_mark(old, new, dim, want):
    assert reshaped(Mark(dim), old, new) == want


@pytest.mark.parametrize("seed", range(60))
def test_a_reshape_moves_the_rows_its_mark_says(seed):
    """Random shapes of few primes (so that sizes coincide), reshaped and back: row t stays row t."""
    draw = random.Random(seed)
    old = [draw.choice((1, 2, 2, 3, 4, 6)) for _ in range(draw.randint(1, 4))]
    new = [1]
    for prime in sorted(factors(math.prod(old)), key=lambda _: draw.random()):
        if draw.random() < 0.5:
            new.insert(draw.randint(0, len(new)), prime)
        else:
            new[draw.randrange(len(new))] *= prime
    value = torch.arange(math.prod(old)).reshape(old)
    for dim, size in enumerate(old):
        mark = reshaped(Mark(dim), tuple(old), tuple(new))
        if mark is None or size == 1:
            continue
        assert new[mark.dim] == mark.outer * size * mark.inner
        split = value.reshape(new).unflatten(mark.dim, (mark.outer, size, mark.inner))
        for row in range(size):
            assert set(split.select(mark.dim + 1, row).flatten().tolist()) == set(value.select(dim, row).flatten().tolist())
        back = reshaped(mark, tuple(new), tuple(old))
        assert back is None or back == Mark(dim)


def factors(number):
    found, prime = [], 2
    while number > 1:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return found


# Ops known by their tag

def pointwise_ops():
    for packet in dir(aten):
        if not isinstance(getattr(aten, packet), torch._ops.OpOverloadPacket):
            continue
        for variant in getattr(aten, packet).overloads():
            op = getattr(getattr(aten, packet), variant)
            if torch.Tag.pointwise in op.tags and not op._schema.is_mutable and op not in TABLE:
                yield pytest.param(op, id=str(op).removeprefix("aten."))


INTEGER = ("shift", "bitwise", "xor", "gcd", "lcm")


def drawn(op):
    """Arguments for a pointwise op from its schema: tensors that broadcast, twos for scalars, defaults for the rest."""
    shapes = iter(([3, 1, 5], [4, 5], [3, 4, 1]))
    integer = any(word in str(op) for word in INTEGER)
    args, kwargs, bounds = [], {}, []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            shape = next(shapes)
            value = torch.randint(1, 4, shape) if integer else torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1
            value = value.long() if "mvlgamma" not in str(op) else value + 3
            value = value if integer else torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1 + 3 * ("mvlgamma" in str(op))
            if "where" in str(op) and not args or "native_dropout_backward" in str(op) and argument.name == "mask":
                value = value > 0.5
            args.append(value)
            bounds.append(4 if integer else None)
        elif argument.has_default_value():
            continue
        elif kind == "str":
            kwargs[argument.name] = "trunc"
        elif argument.kwarg_only:
            kwargs[argument.name] = "trunc" if "rounding" in argument.name else 2
        else:
            args.append(2)
    return tuple(args), kwargs, bounds


@pytest.mark.parametrize("op", pointwise_ops())
def test_an_op_tagged_pointwise_is(op):
    sample = Sample(op, *drawn(op))
    signature = sample.signature
    assert len(signature.outputs) == len(sample.outputs)
    for k, (value, labels) in enumerate(zip(sample.operands, signature.operands)):
        for dim, label in enumerate(labels):
            for row in range(value.shape[dim]):
                for before, after, out in zip(sample.outputs, sample.run(sample.perturbed(k, dim, row)), signature.outputs):
                    if label is not None:
                        assert moved_rows(before, after, out.index(label)) <= {row}
    for dim in range(3):
        places = [ls.index(dim) if dim in ls else None for ls in signature.operands]
        assert_sliced(sample, dim, places, [dim] * len(sample.outputs))


def test_as_strided_refuses():
    _, node = single(aten.as_strided.default, (torch.randn(6), [2, 3], [3, 1]), {})
    with pytest.raises(CannotStream, match="as_strided"):
        rule_of(node).signature(node)


def test_an_op_without_a_rule_is_refused_by_name():
    _, node = single(aten.sort.values_stable if False else aten.unfold.default, (torch.randn(6), 0, 2, 1), {})
    with pytest.raises(CannotStream, match="aten.unfold.default"):
        rule_of(node)
