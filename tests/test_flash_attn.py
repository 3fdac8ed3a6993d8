"""flash_attn's operators, by their schemas (flash_attn_interface.py, 2.8): what streams, what is refused."""

import cuda_kernels
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streambp_compile import NotStreamed, explain
from streambp_compile.dynamo.attention.flash_attn import flash_attn_as_attention
from streambp_compile.passes.rules import rule_of

DIM, HEADS, KEY_HEADS, WORDS, LENGTH = 32, 4, 2, 64, 70
COUNTS = (HEADS, KEY_HEADS, KEY_HEADS)


def bias_of(rows: int, left: int, right: int) -> Tensor:
    behind = torch.arange(rows) - torch.arange(rows)[:, None]
    ahead, before = right if right >= 0 else rows, left if left >= 0 else rows
    hidden = (behind > ahead) | (behind < -before)
    return torch.zeros(1, 1, rows, rows, dtype=torch.float64).masked_fill(hidden, float("-inf"))


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias = bias_of(q.shape[1], window_size_left, 0 if causal else window_size_right)
    out, lse = cuda_kernels.attend(*(t.transpose(1, 2) for t in (q, k, v)), bias, None, softmax_scale)
    return out.transpose(1, 2).contiguous(), lse.float(), q.new_empty(0), torch.empty(2, dtype=torch.int64)


@forward.register_fake
def _(q, k, v, *_):
    b, t, h, _ = q.shape
    lse, state = q.new_empty(b, h, t, dtype=torch.float32), q.new_empty(2, dtype=torch.int64)
    return torch.empty_like(q), lse, q.new_empty(0), state


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    bias = bias_of(q.shape[1], window_size_left, 0 if causal else window_size_right)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    lse = cuda_kernels.attend(q, k, v, bias, None, softmax_scale)[1]  # not rounded: eager is the truth here
    dout, out = dout.transpose(1, 2), out.transpose(1, 2)
    found = cuda_kernels.gradients(dout, q, k, v, out, lse, bias, None, softmax_scale)
    for total, part in zip((dq, dk, dv), found):
        total.copy_(cuda_kernels.summed_groups(part, total.transpose(1, 2), torch.float64).transpose(1, 2))
    return torch.empty(1)


@backward.register_fake
def _(dout, *_, **__):
    return torch.empty(1)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias = bias_of_documents(cu_seqlens_q, len(q), window_size_left, 0 if causal else window_size_right)
    out, lse = cuda_kernels.attend(*map(heads_first, (q, k, v)), bias, None, softmax_scale)
    state = torch.empty(2, dtype=torch.int64)
    return out[0].transpose(0, 1).contiguous(), lse[0].float(), q.new_empty(0), state


@varlen.register_fake
def _(q, *_, **__):
    lse, state = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), q.new_empty(2, dtype=torch.int64)
    return torch.empty_like(q), lse, q.new_empty(0), state


def heads_first(t: Tensor) -> Tensor:
    return t.transpose(0, 1)[None]


def bias_of_documents(ends: Tensor, rows: int, left: int, right: int) -> Tensor:
    ids = torch.bucketize(torch.arange(rows), ends[1:].long(), right=True)
    return bias_of(rows, left, right).masked_fill(ids[:, None] != ids, float("-inf"))


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    bias = bias_of_documents(cu_seqlens_q, len(q), window_size_left, 0 if causal else window_size_right)
    q, k, v, dout, out = map(heads_first, (q, k, v, dout, out))
    lse = cuda_kernels.attend(q, k, v, bias, None, softmax_scale)[1]
    found = cuda_kernels.gradients(dout, q, k, v, out, lse, bias, None, softmax_scale)
    for total, part in zip((dq, dk, dv), found):
        summed = cuda_kernels.summed_groups(part, heads_first(total), torch.float64)
        total.copy_(summed[0].transpose(0, 1))
    return torch.empty(1)


@varlen_backward.register_fake
def _(dout, *_, **__):
    return torch.empty(1)


class PackedFlashAttention(torch.autograd.Function):
    """The flow of flash_attn's own function for packed sequences."""

    @staticmethod
    def forward(ctx, q, k, v, ends, longest, causal, window):
        out, lse, _, rng_state = torch.ops.flash_attn._flash_attn_varlen_forward(
            *(q, k, v, ends, ends, longest, longest, 0.0, 0.3),
            causal=causal,
            window_size_left=window[0],
            window_size_right=window[1],
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
            block_table=None,
        )
        ctx.save_for_backward(q, k, v, out, lse, ends, rng_state)
        ctx.longest, ctx.causal, ctx.window = longest, causal, window
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, ends, rng_state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn._flash_attn_varlen_backward(
            *(dout, q, k, v, out, lse, dq, dk, dv, ends, ends, ctx.longest, ctx.longest, 0.0, 0.3),
            *(ctx.causal, *ctx.window, 0.0, None, False),
            rng_state=rng_state,
        )
        return dq, dk, dv, None, None, None, None


def flash_gradients(ctx, dout):
    q, k, v, out, lse, rng_state = ctx.saved_tensors
    width = dout.size(3)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    padded = F.pad(dout, [0, 8 - width % 8]) if width % 8 else dout
    torch.ops.flash_attn._flash_attn_backward(
        padded,
        q,
        k,
        v,
        out,
        lse,
        dq,
        dk,
        dv,
        0.0,
        0.3,
        ctx.causal,
        *ctx.window,
        0.0,
        None,
        False,
        rng_state=rng_state,
    )
    return dq[..., :width], dk[..., :width], dv[..., :width], None, None, None


class FlashAttention(torch.autograd.Function):
    """The flow of flash_attn's own function: it pads widths to multiples of 8, and allocates gradients."""

    @staticmethod
    def forward(ctx, q, k, v, causal, window, options):
        width = q.size(3)
        if width % 8:
            q, k, v = (F.pad(t, [0, 8 - width % 8]) for t in (q, k, v))
        out, lse, _, rng_state = torch.ops.flash_attn._flash_attn_forward(
            q,
            k,
            v,
            options.get("dropout_p", 0.0),
            0.3,
            causal=causal,
            window_size_left=window[0],
            window_size_right=window[1],
            softcap=options.get("softcap", 0.0),
            alibi_slopes=None,
            return_softmax=False,
        )
        ctx.save_for_backward(q, k, v, out, lse, rng_state)
        ctx.causal, ctx.window = causal, window
        return out[..., :width]

    @staticmethod
    def backward(ctx, dout):
        return flash_gradients(ctx, dout)


class Model(nn.Module):
    def __init__(self, causal=True, window=(-1, -1), width=8, **options):
        super().__init__()
        self.causal, self.window, self.options = causal, window, options
        self.embed, self.norm = nn.Embedding(WORDS, DIM), nn.LayerNorm(DIM)
        self.into = nn.ModuleList([nn.Linear(DIM, h * width, bias=False) for h in COUNTS])
        self.out, self.head = nn.Linear(HEADS * width, DIM), nn.Linear(DIM, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        parts = (f(self.norm(x)).unflatten(-1, (n, -1)) for f, n in zip(self.into, COUNTS))
        x = x + self.out(FlashAttention.apply(*parts, self.causal, self.window, self.options).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def both(model: Model, **options) -> tuple[object, float]:
    """What the backend makes of a model, and how far its gradients are from eager's."""
    ids = torch.randint(0, WORDS, (2, LENGTH))
    parameters = list(model.double().parameters())
    truth = torch.autograd.grad(model(ids), parameters)
    step = torch.compile(model, backend="streambp", options=options)
    found = torch.autograd.grad(step(ids), parameters)
    return ids, max(((a - b).norm() / b.norm()).item() for a, b in zip(found, truth))


class Packed(Model):
    """The model of `Model` over packed sequences, ``[1, T]``."""

    def forward(self, ids, ends, longest):
        x = self.embed(ids)
        q, k, v = (f(self.norm(x)).unflatten(-1, (n, -1)).flatten(0, 1) for f, n in zip(self.into, COUNTS))
        mixed = PackedFlashAttention.apply(q, k, v, ends, longest, self.causal, self.window)
        x = x + self.out(mixed.flatten(1)[None])
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.long
@pytest.mark.parametrize("said", (dict(), dict(window=(20, 0)), dict(causal=False)), ids=str)
def test_packed_calls_stream_and_are_exact(said, interpreted):
    model = Packed(**said).double()
    parameters = list(model.parameters())
    step = torch.compile(model, backend="streambp", options=dict(chunk_size=16, strict=True))
    for ends in ((0, 31, 33, 70), (0, 70), (0, 7, 20, 64, 90)):
        ids, ends = torch.randint(0, WORDS, (1, ends[-1])), torch.tensor(ends, dtype=torch.int32)
        given = ids, ends, 70
        truth, found = (torch.autograd.grad(f(*given), parameters) for f in (model, step))
        assert max(((a - b).norm() / b.norm()).item() for a, b in zip(found, truth)) < 1e-10
    report = explain(model, *given, streambp_options={"chunk_size": 16})
    assert ("each row sees consecutive keys" in str(report)) == ("window" not in said)


@pytest.mark.parametrize(
    "said",
    (
        dict(),
        dict(window=(20, 20), width=12),
        *(
            pytest.param(said, marks=pytest.mark.slow)
            for said in (dict(causal=False), dict(causal=False, window=(5, 9)))
        ),
    ),
    ids=str,
)
def test_dense_calls_stream_and_are_exact(said, interpreted):
    _, error = both(Model(**said), chunk_size=16, strict=True)
    assert error < 1e-10


def test_a_window_is_proved(interpreted):
    ids = torch.randint(0, WORDS, (2, LENGTH))
    report = explain(Model(window=(20, 20)), ids, streambp_options={"chunk_size": 16})
    assert "keys [-20,0]: window of 21, proved" in str(report) and "attention kernel: flash_cpu" in str(
        report
    )


def test_what_only_the_kernel_can_do_is_exact_and_refused_by_a_sentence(interpreted):
    with pytest.warns(
        NotStreamed,
        match=r'caps scores .softcap. inside the flash_attn kernel. Choose attn_implementation="sdpa"',
    ):
        _, error = both(Model(softcap=30.0), chunk_size=16)
    assert error < 1e-10


FORWARD = torch.ops.flash_attn._flash_attn_forward.default
VARLEN = torch.ops.flash_attn._flash_attn_varlen_forward.default


def node_of(operator, *args, **kwargs) -> torch.fx.Node:
    graph = torch.fx.Graph()
    given = tuple(graph.placeholder(f"x{i}") if a is ... else a for i, a in enumerate(args))
    return graph.call_function(operator, given, kwargs)


@pytest.mark.parametrize(
    "node, sentence",
    (
        (
            node_of(FORWARD, ..., ..., ..., 0.1, 1.0, True, -1, -1, 0.0, None, False),
            "draws dropout inside the flash_attn kernel",
        ),
        (node_of(FORWARD, ..., ..., ..., 0.0, 1.0, True, -1, -1, 0.0, ..., False), "adds ALiBi slopes"),
        (
            node_of(FORWARD, ..., ..., ..., 0.0, 1.0, True, -1, -1, 0.0, None, True),
            "returns a probability for every pair of tokens",
        ),
        (node_of(VARLEN, ..., ..., ..., ..., ..., 9, 9, 0.0, 1.0, True), "pass position_ids that restart"),
        (node_of(VARLEN, ..., ..., ..., ..., ..., 9, 9, 0.0, 1.0, True, block_table=...), "keys of a cache"),
    ),
    ids=("dropout", "alibi", "probabilities", "other ends", "pages"),
)
@pytest.mark.quick
def test_each_refusal_says_what_to_choose(node, sentence):
    with pytest.raises(Exception, match=sentence) as refused:
        rule_of(node).signature(node)
    assert 'attn_implementation="sdpa"' in str(refused.value)


def test_another_gradient_than_flash_attns_own_is_left_alone(fresh_dynamo):
    class Doubled(FlashAttention):
        @staticmethod
        def backward(ctx, dout):
            return tuple(g if g is None else g * 2 for g in flash_gradients(ctx, dout))

    def functions(graph, _):
        left.extend(
            flash_attn_as_attention(graph).graph.find_nodes(
                op="call_function", target=torch.ops.higher_order.autograd_function_apply
            )
        )
        return graph.forward

    left = []
    parts = [torch.randn(1, 9, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    torch.compile(lambda *t: Doubled.apply(*t, True, (-1, -1), {}), backend=functions)(*parts)
    assert len(left) == 1
