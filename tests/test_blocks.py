"""Sequences cut into blocks: state-space layers in block form, linear attention, attention in blocks."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Mixing, MixingLayer, Tripled, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor

from benchmarks.zoo import ROWS
from streambp_compile import NotStreamed, explain
from streambp_compile.backend import Chain
from streambp_compile.config import Config
from streambp_compile.passes.ir import Mark, Tokens
from streambp_compile.passes.token_propagation import reshaped
from streambp_compile.reporting.report import Report
from streambp_compile.runtime.runner import Chunk

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10
WIDTH, HEADS, BLOCK = 16, 2, 8
MANY = 13 * BLOCK  # so many blocks that they may be a sequence of their own


def blocks(x: Tensor, pad: int = 0) -> Tensor:
    """``[b, t, …]`` → ``[b, n, l, …]``."""
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad)) if pad else x
    return x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:])


def missing(length: int) -> int:
    return -length % BLOCK


def decays(steps: Tensor) -> Tensor:
    """``[…, l]`` → ``[…, l, l]``: the product of decays between two rows, given their logarithms."""
    count = steps.shape[-1]
    below = torch.ones(count, count, dtype=torch.bool).tril(-1)
    total = steps[..., None].expand(*steps.shape, count).masked_fill(~below, 0).cumsum(-2)
    return total.masked_fill(~below.logical_or(torch.eye(count, dtype=torch.bool)), -torch.inf).exp()


def state_space(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The block form of a state-space layer (Mamba-2, arXiv 2405.21060, section 6), padded to full blocks."""
    length, pad = q.shape[1], missing(q.shape[1])
    steps = blocks(-F.softplus(v.unflatten(-1, (HEADS, -1)).mean(-1) * scale), pad).permute(0, 3, 1, 2)
    q, k, v = (blocks(x.unflatten(-1, (HEADS, -1)), pad) for x in (q, k, v))
    total = steps.cumsum(-1)
    inside = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", q, k, decays(steps), v)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", k, (total[..., -1:] - total).exp(), v)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    between = decays(F.pad(total[..., -1], (1, 0)))
    states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
    before = torch.einsum("bclhn,bchpn,bhcl->bclhp", q, states, total.exp())
    return (inside + before).reshape(q.shape[0], -1, WIDTH)[:, :length]


def retention(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The chunkwise form of retention (arXiv 2307.08621): a loop over blocks carries the state."""
    length, pad = q.shape[1], missing(q.shape[1])
    q, k, v = (blocks(x, pad) for x in (q, k, v))
    places = torch.arange(BLOCK, dtype=q.dtype)
    decay = scale.sigmoid()[0]
    matrix = torch.where(places[:, None] >= places, decay ** (places[:, None] - places).clamp(min=0), 0.0)
    inside = (q @ k.transpose(-1, -2) * matrix) @ v
    made = (k * decay ** (BLOCK - 1 - places)[:, None]).transpose(-1, -2) @ v
    state, states = torch.zeros_like(made[:, 0]), []
    for block in made.unbind(1):
        states.append(state)
        state = state * decay**BLOCK + block
    before = (q * decay ** (places + 1)[:, None]) @ torch.stack(states, 1)
    return (inside + before).flatten(1, 2)[:, :length]


def linear_attention(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Causal linear attention: a cumulative sum over blocks, products inside."""
    length, pad = q.shape[1], missing(q.shape[1])
    q, k, v = (blocks(x, pad) for x in (F.elu(q) + 1, F.elu(k) + 1, v))
    states = (k.transpose(-1, -2) @ v).cumsum(1)
    states = F.pad(states, (0, 0, 0, 0, 1, 0))[:, :-1]
    mixed = (q @ k.transpose(-1, -2)).tril() @ v + q @ states
    return (mixed * scale[0]).reshape(q.shape[0], -1, WIDTH)[:, :length]


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """A gate per feature (GLA, arXiv 2312.06635); a loop over blocks carries a state of keys by values."""
    length, pad = q.shape[1], missing(q.shape[1])
    gates = blocks(F.logsigmoid(k) / 4, pad).cumsum(2)
    q, k, v = (blocks(x, pad) for x in (q, k, v))
    inside = ((q * gates.exp()) @ (k * (-gates).exp()).transpose(-1, -2)).tril() @ v
    made = (k * (gates[:, :, -1:] - gates).exp()).transpose(-1, -2) @ v
    state, states, decay = torch.zeros_like(made[:, 0]), [], gates[:, :, -1].exp()
    for i, block in enumerate(made.unbind(1)):
        states.append(state)
        state = state * decay[:, i, :, None] + block
    before = (q * gates.exp()) @ torch.stack(states, 1)
    return ((inside + before) * scale[0]).flatten(1, 2)[:, :length]


def block_means(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Attention of rows to the means of earlier blocks; rows are turned by their positions."""
    length, pad = q.shape[1], missing(q.shape[1])
    places = torch.arange(length + pad, dtype=q.dtype).view(-1, BLOCK, 1) / length
    q, k, v = (blocks(x, pad) for x in (q, k, v))
    scores = torch.einsum("bnld,bmd->bnlm", q * places.cos(), k.mean(2)) * scale[0]
    later = torch.ones(scores.shape[1], scores.shape[1], dtype=torch.bool).triu()
    weights = scores.masked_fill(later[:, None], -1e9).softmax(-1)
    return (torch.einsum("bnlm,bmd->bnld", weights, v.mean(2)) + v).flatten(1, 2)[:, :length]


def flat(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Attention inside blocks that are sequences of their own (MegaByte, arXiv 2305.07185)."""
    batch, length = q.shape[:2]
    q, k, v = (x.reshape(-1, BLOCK, WIDTH) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * scale[0]
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).reshape(batch, length, WIDTH)


def two_blocks(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Attention to a row's own block and the one before it (Longformer's and LongT5's local attention)."""
    length, pad = q.shape[1], missing(q.shape[1])
    q, k, v = (blocks(x, pad) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1], x], 2) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale[0]
    far = torch.ones(BLOCK, 2 * BLOCK, dtype=torch.bool).triu(BLOCK + 1)
    mixed = scores.masked_fill(far, -torch.inf).softmax(-1) @ v
    return mixed.flatten(1, 2)[:, :length]


def keys_of_blocks(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Attention to the means of earlier blocks, rows whose queries are not cut into blocks (the compressed
    keys of native sparse attention, arXiv 2502.11089)."""
    length, full = q.shape[1], q.shape[1] // BLOCK * BLOCK
    keys, values = (x[:, :full].unflatten(1, (-1, BLOCK)).mean(2) for x in (k, v))
    ends = (torch.arange(full // BLOCK) + 1) * BLOCK
    hidden = ends > torch.arange(length)[:, None]
    scores = (q @ keys.transpose(1, 2) * scale[0]).masked_fill(hidden, -1e9)
    return scores.softmax(-1) @ values + v


def blocks_beside_keys(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The means of blocks stand in front of the keys of an attention."""
    length = q.shape[1]
    keys, values = (torch.cat((x.unflatten(1, (-1, BLOCK)).mean(2), x), 1) for x in (k, v))
    places = torch.arange(length)
    ends = torch.cat(((torch.arange(length // BLOCK) + 1) * BLOCK, places))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=ends <= places[:, None]) * scale[0]


def fused_keys_of_blocks(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The same by torch's attention, of weighted sums of rows."""
    length, full = q.shape[1], q.shape[1] // BLOCK
    weights = torch.linspace(0, 1, BLOCK, dtype=q.dtype) * scale[0]
    keys, values = (
        torch.einsum("bcld,l->bcd", x.narrow(1, 0, full * BLOCK).unflatten(1, (full, BLOCK)), weights).tanh()
        for x in (k, v)
    )
    places = torch.arange(full)
    seen = ((places + 1) * BLOCK <= torch.arange(length)[:, None]) | (places == 0)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)


def gates_of_blocks(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Each row attends to its own block and to the two earlier ones that it likes best (MoBA, arXiv
    2502.13189)."""
    length = q.shape[1]
    places = torch.arange(length)
    likes = q.detach() @ k.detach().unflatten(1, (-1, BLOCK)).mean(2).transpose(1, 2)
    own = places[:, None] // BLOCK == torch.arange(length // BLOCK)
    later = places[:, None] // BLOCK < torch.arange(length // BLOCK)
    best = likes.masked_fill(own | later, -torch.inf).topk(2, -1).indices
    chosen = torch.zeros_like(likes).scatter(-1, best, 1.0).masked_fill(later, 0.0) + own
    seen = (chosen > 0).repeat_interleave(BLOCK, -1) & (places <= places[:, None])
    return ((q @ k.transpose(1, 2) * scale[0]).masked_fill(~seen, -torch.inf)).softmax(-1) @ v


def attention_of_blocks(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Means of blocks attend to one another, and come back to the rows of the blocks behind (an hourglass,
    arXiv 2110.13711)."""
    q, k, v = (blocks(x) for x in (q, k, v))
    short = [x.mean(2) for x in (q, k, v)]
    mixed = F.scaled_dot_product_attention(*short, is_causal=True) * scale[0]
    return (F.pad(mixed, (0, 0, 1, -1))[:, :, None] + v).flatten(1, 2)


def repeated_blocks(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Means of blocks attend to one another; each comes back to all rows of the block behind."""
    short = blocks(v).mean(2)
    mixed = F.scaled_dot_product_attention(short, short, short, is_causal=True)
    return k + q * scale[0] * F.pad(mixed, (0, 0, 1, -1)).repeat_interleave(BLOCK, 1)


def back_to_rows(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Each row reads the sum of all blocks before its own."""
    before = F.pad(blocks(v).sum(2).cumsum(1), (0, 0, 1, -1))
    return before.repeat_interleave(BLOCK, 1).tanh() * q * scale[0] + k


def check(mix, lengths, chunk: int = 12, strict: bool = True, layers: int = 1) -> None:
    """Gradients are eager's, whatever the length; every region streams."""
    model = Mixing(WIDTH, *(MixingLayer(mix, WIDTH, weight=(HEADS,)) for _ in range(layers))).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": chunk, "strict": strict})
    for length in lengths:
        ids = ids_of(2, length)
        truth = gradients(model, lambda ids=ids: model(ids))
        assert worst_error(gradients(model, lambda ids=ids: step(ids)), truth) < EXACT


MIXERS = {
    f.__name__: f
    for f in (
        state_space,
        retention,
        linear_attention,
        gated_linear_attention,
        block_means,
        flat,
        two_blocks,
        keys_of_blocks,
        fused_keys_of_blocks,
        blocks_beside_keys,
        gates_of_blocks,
        attention_of_blocks,
        repeated_blocks,
        back_to_rows,
    )
}


@pytest.mark.parametrize(
    "name, length",
    [
        ("state_space", 43),
        *(
            pytest.param(name, length, marks=pytest.mark.slow)
            for name, length in (
                ("state_space", 48),
                ("retention", 40),
                ("gated_linear_attention", 43),
                ("block_means", 43),
                ("retention", 43),
                ("two_blocks", 43),
                ("two_blocks", 40),
                ("keys_of_blocks", 40),
                ("fused_keys_of_blocks", 40),
                ("blocks_beside_keys", 40),
                ("attention_of_blocks", 40),
                ("attention_of_blocks", MANY),
                ("keys_of_blocks", MANY),
                ("blocks_beside_keys", MANY),
            )
        ),
        ("flat", 40),
        ("gates_of_blocks", 40),
        ("back_to_rows", 40),
        ("repeated_blocks", MANY),
        ("keys_of_blocks", 43),
    ],
)
def test_blocks_stream(name, length):
    check(MIXERS[name], [length])


@pytest.mark.slow
def test_states_of_many_blocks_are_no_sequence_of_their_own():
    model, batch, loss = ROWS["mamba2"].build(2048)
    report = explain(lambda **given: loss(model, **given), **batch)
    assert len(report.regions) == 3 and all(region.streamed for region in report.regions)


def cut_if_padded(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Means over blocks, with the padding of Mamba-2 in transformers."""
    length = q.shape[1]
    pad = (BLOCK - length % BLOCK) % BLOCK
    q, k, v = (blocks(F.pad(x, (0, 0, 0, pad))) for x in (q, k, v))
    made = (q * scale.mean() + torch.softmax(k, 2) * v).reshape(len(q), -1, WIDTH)
    return made[:, :length] if pad > 0 else made


def padded_by_cat(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], -x.shape[1] % BLOCK, WIDTH)], 1)


def padded_to_a_ceiling(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, math.ceil(x.shape[1] / BLOCK) * BLOCK - x.shape[1]))


def written_into_zeros(x: Tensor) -> Tensor:
    padded = x.new_zeros(x.shape[0], -(-x.shape[1] // BLOCK) * BLOCK, WIDTH)
    padded[:, : x.shape[1]] = x
    return padded


def attend_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + torch.softmax(q @ k.mT, -1) @ v


def in_blocks_padded(pad):
    """Attention inside blocks, of tokens that ``pad`` brings to full blocks."""

    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        length = q.shape[1]
        q, k, v = (blocks(pad(x)) for x in (q, k, v))
        return attend_inside(q, k, v).reshape(len(q), -1, WIDTH)[:, :length]

    return mix


def blocks_of_blocks(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    length = q.shape[1]
    q, k, v = (F.pad(x, (0, 0, 0, -length % (2 * BLOCK))) for x in (q, k, v))
    inner = attend_inside(*map(blocks, (q, k, v))).reshape(len(q), -1, WIDTH)
    outer = (x.reshape(len(q), -1, 2 * BLOCK, WIDTH) for x in (inner, k, v))
    return attend_inside(*outer).reshape(len(q), -1, WIDTH)[:, :length]


def sums_of_blocks_before(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Each row reads the sum of the means of all blocks before its own."""
    means = blocks(k, missing(k.shape[1])).mean(2).cumsum(1)
    before = F.pad(means, (0, 0, 1, 0))[:, :-1]
    return q + before.repeat_interleave(BLOCK, 1)[:, : q.shape[1]] * v


@pytest.mark.parametrize(
    "mix",
    [
        in_blocks_padded(padded_by_cat),
        in_blocks_padded(padded_to_a_ceiling),
        in_blocks_padded(written_into_zeros),
        blocks_of_blocks,
        sums_of_blocks_before,
    ],
    ids=["cat", "ceil", "written", "blocks_of_blocks", "sums_before"],
)
def test_other_spellings_of_blocks_stream(mix):
    check(mix, [43])


@pytest.mark.long
@pytest.mark.parametrize(
    "mix, lengths",
    [
        (in_blocks_padded(padded_by_cat), [43, 61, 48]),
        (blocks_of_blocks, [43, 61]),
        (sums_of_blocks_before, [43, 61, 48]),
    ],
    ids=["cat", "blocks_of_blocks", "sums_before"],
)
def test_other_spellings_of_blocks_stream_at_other_lengths(mix, lengths):
    check(mix, lengths)


@pytest.mark.parametrize("mix", [pytest.param(state_space, marks=pytest.mark.long), cut_if_padded])
@pytest.mark.parametrize("lengths", [(43, 61), (24, 48)], ids=["padded", "full"])
def test_padded_rows_are_no_other_sequence_at_any_length(mix, lengths):
    """The second length is a symbol, and so is the padding. Of full blocks, torch guards that it is zero."""
    model, reports = Mixing(WIDTH, MixingLayer(mix, WIDTH, weight=(HEADS,))).double(), []

    def backend(graph, inputs):
        reports.append(Report())
        return Chain(graph, inputs, Config(chunk_size=12, strict=True), reports[-1]).compiled()

    step = torch.compile(model, backend=backend)
    for length in lengths:
        ids = ids_of(2, length)
        truth = gradients(model, lambda ids=ids: model(ids))
        assert worst_error(gradients(model, lambda ids=ids: step(ids)), truth) < EXACT
    shapes = [[(len(r.forward.program.sweeps), r.times) for r in report.regions] for report in reports]
    assert len(shapes) == 2 and shapes[0] == shapes[1]


@pytest.mark.slow
def test_other_lengths_need_no_other_plan():
    check(state_space, [43, 61, 24], layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("mix", [fused_keys_of_blocks, keys_of_blocks])
def test_rows_behind_the_last_full_block_are_left_out(mix):
    """Of 35 tokens, the last chunk has three, and no block."""
    check(mix, [43, 35, 40, 61], chunk=16, layers=2)


def test_many_blocks_are_read_by_rows_that_stream():
    """More blocks than four times the features: scores of rows and blocks are no values at full length."""
    check(gates_of_blocks, [1024], chunk=128)


def test_a_mark_counts_blocks():
    rows = Mark(1).grouped(BLOCK)
    assert rows == Mark(1, inner=BLOCK, block=BLOCK) and rows.grouped(1) == Mark(1)
    assert (rows.count(43), rows.size(43), rows.size(48)) == (6, 48, 48)
    assert Tokens(rows).pattern(3) == "b ([t/8] 8) d"
    blocks_alone = reshaped(rows, (2, 48, 4), (2, 6, BLOCK, 4))
    assert blocks_alone == Mark(1, block=BLOCK) and Tokens(blocks_alone).pattern(4) == "b [t/8] d e"


def test_rows_that_are_several_for_each_token_are_whole_blocks():
    """Blocks that are tokens themselves have so many rows each, wherever these are padded to blocks."""
    rows = Mark(1, inner=BLOCK)
    assert rows.grouped(BLOCK) == rows == rows.grouped(1)
    assert Mark(1, inner=2).grouped(2 * BLOCK) == Mark(1, inner=2 * BLOCK, block=BLOCK)


def test_a_chunk_counts_its_blocks():
    chunks = [Chunk(16, stop, 0, stop, 43) for stop in (17, 24, 25, 40)]
    assert [chunk.scalar("rows_8") for chunk in chunks] == [1, 1, 2, 3]
    assert {chunk.scalar("first_8") for chunk in chunks} == {2}


def rows_of_blocks(x: Tensor) -> Tensor:
    """All blocks of all sequences in one dimension."""
    return x.view(-1, BLOCK, x.shape[2])


def short_filter(x: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, 3, dtype=x.dtype).expand(x.shape[2], 1, 3)
    return F.conv1d(x.transpose(1, 2), weight, padding=1, groups=x.shape[2]).transpose(1, 2)


MOVED = {
    "behind": lambda x: F.pad(blocks(x), (0, 0, 1, -1)),
    "ahead, merged": lambda x: F.pad(rows_of_blocks(x), (0, 0, -2, 2)),
    "rolled": lambda x: torch.roll(rows_of_blocks(x), 1, 1),
    "transposed": lambda x: F.pad(rows_of_blocks(x).transpose(1, 2), (1, -1)).transpose(1, 2),
    "filtered": lambda x: short_filter(rows_of_blocks(x)),
    "sums ahead": lambda x: rows_of_blocks(x).flip(1).cumsum(1).flip(1),
    "products ahead": lambda x: rows_of_blocks(x.sigmoid()).flip(1).cumprod(1).flip(1),
}


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.parametrize("name", representatives(MOVED, {"behind"}))
def test_rows_moved_inside_blocks_have_gradients(name):
    """Operators that normalisation writes are differentiated."""

    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return k + q * MOVED[name](v).reshape(v.shape) * scale[0]

    check(mix, [40, MANY], strict=False)


CUT = {
    "behind": lambda x, n: F.pad(x, (0, 0, 3, -3))[:, :n],
    "behind, longer": lambda x, n: F.pad(x, (0, 0, 1, 0)).narrow(1, 0, n),
    "padded again": lambda x, n: F.pad(x, (0, 0, 0, 5))[:, :n],
    "from the end": lambda x, n: F.pad(x, (0, 0, 3, 2))[:, : -5 - missing(n)],
}


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(CUT, {"behind", "from the end"}))
def test_rows_behind_the_tokens_are_cut_off_before_rows_are_moved(name):
    """Blocks come back as rows of tokens, which move as such: the region streams. An end that is counted from
    behind does so at one length; where lengths change, its sign is not known."""

    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        means = blocks(v, missing(v.shape[1])).tanh() * scale[0]
        return k + q * CUT[name](means.flatten(1, 2), v.shape[1])

    check(mix, [43] if name == "from the end" else [43, 40, 61])


MET = {
    "ahead": lambda x: F.pad(x, (0, 0, -3, 3)),
    "rolled": lambda x: torch.roll(x, 2, 1),
    "summed": lambda x: x.cumsum(1),
    "reversed": lambda x: x.flip(1),
    "centred": lambda x: x - x.mean(1, keepdim=True),
    "padded alone": lambda x: x + F.pad(x[:, :5], (0, 0, 0, x.shape[1] - 5)),
}


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.parametrize("name", representatives(MET, {"ahead", "summed"}))
def test_blocks_that_meet_as_rows_before_these_are_cut(name):
    """What lets rows of padded blocks meet is no part of the function of a block."""

    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        rows = (blocks(v, missing(v.shape[1])).tanh() * scale[0]).flatten(1, 2)
        return k + q * MET[name](rows)[:, : v.shape[1]]

    check(mix, [43, 61], strict=False)


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        means = x.mean(2, keepdim=True)
    return x - means


def straight_through(x: Tensor) -> Tensor:
    soft = x.softmax(2)
    return F.one_hot(x.argmax(2), BLOCK).transpose(2, 3) + soft - soft.detach()


def hooked(x: Tensor) -> Tensor:
    means = x.mean(2, keepdim=True)
    means.register_hook(lambda grad: 3 * grad)
    return x * means


OWN_GRADIENTS = {
    "a user's backward": Tripled.apply,
    "detached": lambda x: x * x.mean(2, keepdim=True).detach(),
    "no_grad": without_gradients,
    "straight-through": straight_through,
    "a hook": hooked,
    "detached in a map": lambda x: torch.vmap(lambda y: y * y.mean(1, keepdim=True).detach())(x),
}


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.parametrize("name", representatives(OWN_GRADIENTS, {"a user's backward", "straight-through"}))
def test_gradients_that_are_not_those_of_the_operators(name):
    """Autograd sees the operators between blocks as they are."""

    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return k + q * OWN_GRADIENTS[name](blocks(v)).flatten(1, 2) * scale[0]

    check(mix, [40, MANY], strict=False)


def turned(x: Tensor) -> Tensor:
    """Four blocks, and then the first row of each, the second of each, …"""
    return x.unflatten(1, (4, -1)).transpose(1, 2).reshape(x.shape)


def turned_beside_attention(x: Tensor) -> Tensor:
    parts = x.unflatten(1, (-1, 4)).transpose(1, 2)
    beside = parts.tanh().transpose(1, 2).reshape(parts.shape)
    return (F.scaled_dot_product_attention(parts, parts, parts) + beside).flatten(1, 2)


def two_orders(x: Tensor) -> Tensor:
    parts = x.unflatten(1, (4, -1)).cumsum(2)
    return parts.flatten(1, 2) * parts.transpose(1, 2).flatten(1, 2)


def normalised_over_blocks(x: Tensor) -> Tensor:
    return x.unflatten(1, (4, -1)).softmax(1).flatten(1, 2)


ACROSS = {f.__name__: f for f in (turned, turned_beside_attention, two_orders, normalised_over_blocks)}


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.parametrize("name", representatives(ACROSS, {"turned", "normalised_over_blocks"}))
def test_blocks_that_meet_are_no_function_of_each(name):
    """Block by block there would be other numbers: row by row, in another order, or over the rows of one."""

    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        x = k + q * F.gelu(v)
        return x + ACROSS[name](x) * scale[0]

    check(mix, [40, 56], strict=False)


def test_zeros_of_a_size_stop_no_gradient():
    def positive(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, torch.zeros_like(x))

    check(lambda q, k, v, scale: k + q * positive(blocks(v)).cumsum(2).flatten(1, 2) * scale[0], [40])


def test_blocks_come_back_by_the_shape_of_another_value():
    """`x.reshape(y.shape)`: with lengths that change, the shape is a value of the graph."""
    check(lambda q, k, v, scale: k + q * blocks(v).softmax(2).reshape(v.shape) * scale[0], [40, MANY])


def test_a_token_that_is_padded_to_a_block_attends_within_it():
    """There is one block, so that its rows look like those of a stream and of padding."""

    def attend(x: Tensor) -> Tensor:
        padded = F.pad(x.tanh(), (0, 0, 0, missing(x.shape[1]))).unflatten(1, (-1, BLOCK))
        return F.scaled_dot_product_attention(padded, padded, padded).flatten(1, 2)[:, : x.shape[1]].exp()

    x = torch.randn(2, 1, WIDTH, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = torch.autograd.grad(torch.compile(attend, backend="streambp")(x).sum(), x)
    assert not [w for w in said if "internal error" in str(w.message)]
    torch.testing.assert_close(found, torch.autograd.grad(attend(x).sum(), x), rtol=1e-10, atol=1e-12)


def test_wide_values_that_blocks_exchange_run_unchunked():
    def every_row_of_every_block(q, k, v, scale):
        wide = torch.einsum("bnlq,bmsd->bnmlqsd", blocks(q), blocks(k)).tanh()
        return torch.einsum("bnmlqsd,bmsd->bnld", wide, blocks(v)).flatten(1, 2) * scale[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStreamed)
        check(every_row_of_every_block, [16], strict=False)
