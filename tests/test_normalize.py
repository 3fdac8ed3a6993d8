"""One spelling: what normalisation removes, and what it leaves alone."""

import torch
import torch.nn.functional as F
from graphs import joint_of
from streambp_compile.passes.normalize import normalize

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
        return sum(F.scaled_dot_product_attention(heads * 2, heads, heads, attn_mask=mask) for mask in (made, stored))

    graph = normalize(joint_of(attend, torch.randn(1, 6, 8, requires_grad=True), torch.zeros(1, 1, 6, 6))[0]).graph
    proved, stored = graph.find_nodes(op="call_function", target=streambp.attention.default)
    assert proved.args[3] is None and proved.args[4]
    assert stored.args[3] is not None and not stored.args[4]


def test_the_given_graph_is_left_alone_and_a_normal_one_stays_as_it_is():
    given = joint(is_causal=True)
    before = str(given.graph)
    once = normalize(given)
    assert str(given.graph) == before
    assert str(normalize(once).graph) == str(once.graph)
