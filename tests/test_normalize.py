"""One spelling: what normalisation removes, and what it leaves alone."""

import pytest
import torch
import torch.nn.functional as F
from graphs import joint_of, traced

from streambp_compile import internals
from streambp_compile.passes.ir import is_tangent
from streambp_compile.passes.normalization.normalize import normalize

streambp = torch.ops.streambp


def joint(**attention):
    def attend(x):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads * 2, heads, heads, **attention)

    return joint_of(attend, torch.randn(1, 6, 8, requires_grad=True))[0]


def targets(module) -> set[str]:
    return {str(n.target) for n in module.graph.nodes}


def test_fused_attention_is_replaced_and_nothing_of_it_stays():
    found = targets(normalize(joint(is_causal=True)))
    assert {"streambp.attention.default", "streambp.attention_backward.default"} <= found
    assert not any("flash" in name for name in found)


def test_only_a_mask_that_is_proved_causal_becomes_causality():
    def attend(x, stored):
        rows = torch.arange(6)
        made = torch.where(rows[None, :] <= rows[:, None], 0.0, float("-inf")).expand(1, 1, 6, 6)
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return sum(
            F.scaled_dot_product_attention(heads * 2, heads, heads, attn_mask=mask) for mask in (made, stored)
        )

    graph = normalize(
        joint_of(attend, torch.randn(1, 6, 8, requires_grad=True), torch.zeros(1, 1, 6, 6))[0]
    ).graph
    proved, stored = graph.find_nodes(op="call_function", target=streambp.attention.default)
    assert proved.args[3] is None and proved.args[4]
    assert stored.args[3] is not None and not stored.args[4]


def test_the_given_graph_is_left_alone_and_a_normal_one_stays_as_it_is():
    given = joint(is_causal=True)
    before = str(given.graph)
    once = normalize(given)
    assert str(given.graph) == before
    assert str(normalize(once).graph) == str(once.graph)


def test_sizes_are_asked_of_inputs_that_a_forward_has():
    """The gradient of flat rows has their number as its own size; a mean asks for a number of elements."""

    def flat(x, w):
        y = (x @ w).flatten(0, 1)
        return y / (x @ w).square().cos().numel() * y.shape[0]

    given = torch.randn(2, 6, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    graph = normalize(joint_of(flat, *given, dynamic=True)[0]).graph
    sizes = [n for n in graph.nodes if "sym_" in str(n.target)]
    assert sizes and all(n.args[0].op == "placeholder" and not is_tangent(n.args[0]) for n in sizes)


@pytest.mark.parametrize(
    "given",
    [
        dict(dim=(0, 1)),
        dict(dim=(0, 1), correction=0, keepdim=True),
        dict(dim=(1, -1)),
        dict(dim=None),
        dict(dim=1, correction=3),
    ],
)
def test_a_variance_of_tokens_is_made_of_sums(given):
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    for function in (torch.var, torch.var_mean):
        graph = traced(lambda x: function(x, **given), x)
        torch.testing.assert_close(graph(x), function(x, **given))
        assert not any("var" in str(n.target) for n in graph.graph.nodes)


@pytest.mark.filterwarnings("ignore:var")
def test_a_variance_of_one_row_is_no_number():
    x = torch.randn(1, 1, 3)
    assert traced(lambda x: x.var((0, 1)), x)(x).isnan().all() and x.var((0, 1)).isnan().all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_statistics_of_a_layer_norm_have_the_precision_that_a_gpu_gives_them(dtype):
    """Torch's decomposition rounds them to half precision on a CPU alone, so that its backward would keep
    other values than a GPU's."""
    x, weight = torch.randn(5, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    graph = internals.make_fx(
        lambda x: torch.native_layer_norm(x, (16,), weight, None, 1e-5),
        decomposition_table=internals.decompositions(),
    )(x)
    out, mean, deviation = graph(x)
    assert out.dtype == dtype and mean.dtype == deviation.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(out, torch.native_layer_norm(x, (16,), weight, None, 1e-5)[0])


def test_transposed_gradients_of_one_weight_are_added_before_they_are_transposed():
    def tied(x, weight):
        return torch.nn.functional.linear(torch.nn.functional.linear(x, weight).tanh(), weight)

    given = (torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True))
    module = normalize(joint_of(tied, *given)[0])
    products = {n for n in module.graph.nodes if n.target is torch.ops.aten.mm.default}
    added = [n for n in module.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert any(products.issuperset(n.all_input_nodes) for n in added)
