"""Attention has one spelling: what the user wrote, before a device or a kernel is known."""

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from models import VOCABULARY, Layer, Mixing, MixingLayer, gradients, ids_of, worst_error
from torch import Tensor, nn
from torch.fx import symbolic_trace

import streambp_compile
from streambp_compile import NotStreamed
from streambp_compile.dynamo.attention import attention_calls as attention

EXACT = 1e-10
BATCH, HEADS, TOKENS, WIDTH = 2, 4, 13, 8
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def operands(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


def with_gradients(function, given: list[Tensor], *args, **kwargs) -> list[Tensor]:
    out = function(*given, *args, **kwargs)
    return [out.detach(), *torch.autograd.grad((out * out.detach().cos()).sum(), given)]


def heads(count: int, width: int = WIDTH) -> tuple[int, ...]:
    return BATCH, count, TOKENS, width


@pytest.mark.parametrize(
    "sizes, given",
    [
        ((heads(4), heads(4), heads(4)), dict(is_causal=True)),
        ((heads(4), heads(4), heads(4)), dict(attn_mask=CAUSAL, scale=0.3)),
        (
            (heads(4), heads(4), heads(4)),
            dict(attn_mask=torch.randn(BATCH, 1, TOKENS, TOKENS, dtype=torch.float64)),
        ),
        ((heads(4), heads(2), heads(2)), dict(is_causal=True, enable_gqa=True)),
        (
            (heads(4), heads(1), heads(1)),
            dict(attn_mask=CAUSAL.expand(BATCH, 1, TOKENS, TOKENS), enable_gqa=True),
        ),
        ((heads(4), (BATCH, 4, 5, WIDTH), (BATCH, 4, 5, WIDTH)), {}),
        (((6, TOKENS, WIDTH),) * 3, dict(is_causal=True)),
        (((6, TOKENS, WIDTH),) * 3, dict(attn_mask=CAUSAL.expand(6, TOKENS, TOKENS))),
        (((2, 3, 2, TOKENS, WIDTH),) * 3, dict(is_causal=True)),
        (((2, 3, 2, TOKENS, WIDTH),) * 3, dict(attn_mask=CAUSAL)),
        ((heads(4), heads(1), heads(1)), dict(attn_mask=CAUSAL.expand(BATCH, 1, TOKENS, TOKENS))),
    ],
    ids=[
        "causal",
        "boolean",
        "additive",
        "grouped",
        "one key head",
        "other keys",
        "no heads",
        "no heads, masked",
        "five dimensions",
        "five dimensions, masked",
        "broadcast key head, masked",
    ],
)
@pytest.mark.quick
def test_it_is_the_function_of_torch(sizes, given):
    tensors = operands(*sizes)
    ours, truth = (
        with_gradients(f, tensors, **given)
        for f in (attention.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_row_that_may_attend_to_nothing_gives_zeros():
    tensors, mask = operands(*[heads(4)] * 3), CAUSAL.clone()
    mask[3] = False
    out, *grads = with_gradients(attention.scaled_dot_product_attention, tensors, attn_mask=mask)
    assert (
        (out[:, :, 3] == 0).all()
        and (grads[0][:, :, 3] == 0).all()
        and not any(t.isnan().any() for t in grads)
    )


def test_a_mask_holds_under_dropout():
    query, key, value = operands(*[heads(4)] * 3)
    out = attention.scaled_dot_product_attention(query, key, value, attn_mask=CAUSAL, dropout_p=0.5)
    (later,) = torch.autograd.grad(out[:, :, 4].sum(), value)
    assert later[:, :, :5].norm() > 0 == later[:, :, 5:].norm()


def test_causality_beside_a_mask_is_both():
    tensors, padding = operands(*[heads(4)] * 3), torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    padding[1, ..., 9:] = False
    ours = with_gradients(attention.scaled_dot_product_attention, tensors, attn_mask=padding, is_causal=True)
    truth = with_gradients(F.scaled_dot_product_attention, tensors, attn_mask=CAUSAL & padding)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "given",
    [
        dict(dropout_p=0.5),
        dict(attn_mask=torch.zeros(TOKENS, TOKENS, dtype=torch.float64, requires_grad=True)),
    ],
    ids=["dropout", "learned mask"],
)
def test_what_no_fused_operator_does_is_written_out(given):
    def ops_of(*tensors):
        graph = torch.fx.experimental.proxy_tensor.make_fx(
            lambda *t: attention.scaled_dot_product_attention(*t, **given)
        )(*tensors)
        return {str(n.target) for n in graph.graph.nodes}

    found = ops_of(*operands(*[heads(4)] * 3))
    assert "streambp.attention.default" not in found and any("softmax" in name for name in found)


def causal(batch, head, row, column):
    return row >= column


def nearer(score, batch, head, row, column):
    return score - 0.1 * (row - column) * (head + 1)


def document(batch, head, row, column, documents):
    return (row >= column) & (documents[batch, row] == documents[batch, column])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("score_mod", [None, nearer])
@pytest.mark.parametrize("mask_mod, packed", [(causal, False), (document, True)], ids=["causal", "packed"])
def test_flex_attention_is_its_mask_and_its_scores(score_mod, mask_mod, packed):
    query, key, value = (t.detach() for t in operands(heads(4), heads(2), heads(2)))
    documents = (torch.arange(TOKENS) // 4).expand(BATCH, TOKENS)
    buffers = (documents,) if packed else ()
    mask = flex.create_block_mask(
        lambda b, h, row, column: mask_mod(b, h, row, column, *buffers),
        BATCH,
        None,
        TOKENS,
        TOKENS,
        device="cpu",
    )
    truth = flex.flex_attention(query, key, value, score_mod=score_mod, block_mask=mask, enable_gqa=True)
    scores = symbolic_trace(score_mod or (lambda score, batch, head, row, column: score))
    (out,) = attention.flex_attention(
        query, key, value, scores, (symbolic_trace(mask_mod),), WIDTH**-0.5, None, (), buffers
    )
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)


class Attended(nn.Module):
    """Two layers around a function of queries, keys and values, and a head."""

    def __init__(self, mix, width: int = 32):
        super().__init__()
        self.mix, self.embed, self.out = mix, nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.parts = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for part in self.parts:
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in part(x.tanh()).chunk(3, -1))
            x = x + self.mix(q, k, v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("score_mod", [None, pytest.param(nearer, marks=pytest.mark.slow)])
def test_flex_attention_streams(score_mod, interpreted, monkeypatch):
    """torch has no backward of it on a CPU, and says so before any backend is asked; as mask and scores it
    has one."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)

    def mix(q, k, v):
        mask = flex.create_block_mask(causal, None, None, q.shape[2], q.shape[2], device="cpu")
        return flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)

    def written(q, k, v):
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        bias = 0 if score_mod is None else -0.1 * distance * torch.arange(1, HEADS + 1)[:, None, None]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.where(distance >= 0, bias + 0 * q[0, 0, 0, 0].detach(), -torch.inf)
        )

    model, ids = Attended(mix).double(), ids_of(2, 61)
    report = streambp_compile.explain(model, ids, streambp_options={"chunk_size": 16, "strict": True})
    assert str(report).count("keys [-inf,0]: causal, proved") == 2 and "sort" not in str(
        report.split[0].graph
    )
    torch._dynamo.reset()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    found = gradients(model, lambda: step(ids))
    model.mix = written
    assert worst_error(found, gradients(model, lambda: model(ids))) < EXACT


def test_a_region_that_is_refused_has_the_attention_of_torch(interpreted):
    """Its queries and keys change places with the tokens: no rule lets that stream."""

    def mix(q, k, v):
        return F.scaled_dot_product_attention(
            q, k.cumprod(-1).median(2, keepdim=True).values + k, v, is_causal=True
        )

    model, ids = Attended(mix).double(), ids_of(2, 61)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    with pytest.warns(NotStreamed, match="median"):
        found = gradients(model, lambda: step(ids))
    assert worst_error(found, gradients(model, lambda: model(ids))) < EXACT
    torch._dynamo.reset()
    with pytest.warns(NotStreamed, match="median"):
        report = streambp_compile.explain(model, ids)
    refused = [r for r in report.regions if r.refusal is not None]
    assert refused and all(
        "streambp.attention" not in str(r.joint.graph) and "attention" in str(r.joint.graph) for r in refused
    )


def test_the_layout_that_the_user_was_given_stays(interpreted):
    """Uneven widths make torch lay the result out by heads, and a view may rest on that."""

    def mix(q, k, v):
        out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 4)), is_causal=True)
        return out.view(q.shape[0], HEADS, -1).view_as(out)[..., : v.shape[-1]]

    model, ids = Attended(mix).double(), ids_of(2, 61)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.quick
def test_layer_of_the_models_is_one_operator():
    layer = Layer(32, 4)
    graphs = []
    torch.compile(
        layer, backend=lambda graph, inputs: graphs.append(attention.one_attention(graph)) or graph
    )(torch.randn(1, 8, 32))
    assert [n.target for n in graphs[0].graph.nodes].count(attention.scaled_dot_product_attention) == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("chosen", [False, True], ids=["from the mask", "chosen otherwise"])
@torch.no_grad()
def test_blocks_that_do_not_come_from_the_mask_are_no_mask_of_ours(chosen, fresh_dynamo):
    """A kernel skips the blocks that are left out, whatever the function of the mask says."""
    seen = []

    def attend(x: Tensor) -> Tensor:
        mask = flex.create_block_mask(causal, None, None, 256, 256, device="cpu")
        if chosen:
            mask = flex.BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, mask_mod=causal)
        return flex.flex_attention(x, x, x, block_mask=mask)

    def backend(graph, inputs):
        seen.extend(n.target for n in attention.one_attention(graph).graph.nodes)
        return graph

    torch.compile(attend, backend=backend)(torch.randn(1, 2, 256, 16))
    assert (attention.flex_attention in seen) != chosen and (
        torch.ops.higher_order.flex_attention in seen
    ) == chosen


class Padded(nn.Module):
    """Layers that see no padding: torch's own, and the function with a mask of one row for all queries."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        layer = nn.TransformerEncoderLayer(32, HEADS, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mix, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        seen = torch.arange(ids.shape[1]) < lengths[:, None]
        x = self.encoder(self.embed(ids), src_key_padding_mask=~seen)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, seen[:, None, None, :])
        logits = self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_padding_is_a_mask_of_one_row(interpreted):
    model, batch = Padded().double(), (ids_of(2, 61), torch.tensor([61, 40]))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    truth = gradients(model, lambda: model(*batch))
    assert worst_error(gradients(model, lambda: step(*batch)), truth) < EXACT


def test_views_of_a_result_that_lies_in_memory_as_queries_do(interpreted):
    """Torch's own layers keep tokens before sequences, and view the result in that order."""

    def mix(queries, keys, values):
        heads = [t.transpose(0, 1).contiguous().unflatten(-1, (HEADS, -1)) for t in (queries, keys, values)]
        q, k, v = (t.permute(1, 2, 0, 3) for t in heads)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
        return out.view(out.shape[0] * out.shape[1], -1).view(queries.shape[1], -1, WIDTH).transpose(0, 1)

    model, ids = Mixing(WIDTH, MixingLayer(mix, WIDTH)).double(), ids_of(2, 41)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    truth = gradients(model, lambda: model(ids))
    assert worst_error(gradients(model, lambda: step(ids)), truth) < EXACT
