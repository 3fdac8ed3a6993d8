"""Places of keys: the largest few scores of a row, indices that pick keys, tokens that point at others. And
what zeros outside a mask are to an operation: nothing to a sum, something to all others."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from selection import representatives
from torch import Tensor, nn

from benchmarks.memory import peak
from streambp_compile import NotStreamed

VOCABULARY, WIDTH, HEADS, FEW = 61, 16, 2, 5
INF = float("inf")
EXACT = 1e-10


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def masked(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / 4).masked_fill(~causal(q.shape[-2]), -INF)


def put(scores: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter(-1, index, values)


def largest_few(q, k, v):
    scores = masked(q, k)
    weights, places = scores.topk(FEW, -1)
    return put(scores, places, weights.softmax(-1)) @ v


def largest_few_added(q, k, v):
    scores = masked(q, k)
    weights, places = scores.topk(FEW, -1)
    return torch.zeros_like(scores).scatter_add(-1, places, weights.softmax(-1)) @ v


def above_the_fifth(q, k, v):
    scores = masked(q, k)
    return scores.masked_fill(scores < scores.topk(FEW, -1).values[..., -1:], -INF).softmax(-1) @ v


def of_a_window(q, k, v):
    tokens = q.shape[-2]
    scores = (q @ k.mT).masked_fill(~causal(tokens) | causal(tokens).tril(-9), -INF)
    weights, places = scores.topk(3, -1)
    return put(scores, places, weights.softmax(-1)) @ v


def of_all_keys(q, k, v):
    scores = q @ k.mT
    weights, places = scores.topk(FEW, -1)
    return put(scores, places, weights.softmax(-1)) @ v


def the_largest(q, k, v):
    scores = masked(q, k)
    weight, place = scores.max(-1, keepdim=True)
    return put(scores, place, weight.tanh()) @ v


def straight_through(q, k, v):
    scores = masked(q, k)
    hard, soft = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(v.dtype), scores.softmax(-1)
    return (hard - soft.detach() + soft) @ v


def mask_by_index(q, k, v):
    """An indexer without gradient shows each row a few keys (DeepSeek's sparse attention)."""
    visible = causal(q.shape[-2])
    places = masked(q.detach(), k.detach()).topk(FEW, -1).indices.to(torch.int32)
    hidden = places.new_ones((*q.shape[:2], *visible.shape), dtype=torch.bool)
    hidden = hidden.scatter(-1, places.long(), False)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden & visible)


def blocks_by_index(q, k, v, block=4):
    """Each row sees the blocks of keys whose mean is the nearest to it, and its own (MoBA)."""
    batch, heads, tokens, width = q.shape
    near = q @ k.view(batch, heads, tokens // block, block, width).mean(3).mT
    own = torch.arange(tokens)[:, None] // block
    place = torch.arange(tokens // block)
    near = near.masked_fill(place > own, -INF).masked_fill(place == own, INF)
    shown = torch.zeros_like(near, dtype=torch.bool).scatter(-1, near.topk(3, -1).indices, True)
    shown = (shown & (place <= own)).repeat_interleave(block, -1) & causal(tokens)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=shown)


def beside_scores_that_read_all(q, k, v):
    """Causal attention by one kernel, in a layer whose scores read all keys."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) + (q @ k.mT).softmax(-1) @ v


def with_given_keys(q, k, v):
    """Each row sees itself and a few keys that were chosen before; later ones are hidden again."""
    tokens = q.shape[-2]
    places = (torch.arange(tokens)[:, None] * 7 + 3).expand(*q.shape[:2], tokens, 1) % tokens
    shown = torch.zeros(*q.shape[:2], tokens, tokens, dtype=torch.bool).scatter(-1, places, True)
    shown = (shown | torch.eye(tokens, dtype=torch.bool)) & causal(tokens)
    return (q @ k.mT).masked_fill(~shown, -INF).softmax(-1) @ v


MIXERS = {
    mix.__name__.replace("_", " "): mix
    for mix in (
        largest_few,
        largest_few_added,
        above_the_fifth,
        of_a_window,
        of_all_keys,
        the_largest,
        straight_through,
        mask_by_index,
        blocks_by_index,
        beside_scores_that_read_all,
        with_given_keys,
    )
}
CHOSEN = {"largest few", "of a window", "mask by index", "beside scores that read all", "with given keys"}


def over_zeros(reduce):
    """Scores that are zero at later keys, reduced to a number for each row."""
    return lambda q, k, v: v * reduce((q @ k.mT).masked_fill(~causal(q.shape[-2]), 0.0))


REDUCTIONS = {
    "sum": lambda s: s.sum(-1, keepdim=True),
    "mean": lambda s: s.mean(-1, keepdim=True),
    "variance": lambda s: s.var(-1, keepdim=True),
    "deviation": lambda s: s.std(-1, keepdim=True),
    "norm": lambda s: s.norm(dim=-1, keepdim=True),
    "least": lambda s: s.amin(-1, keepdim=True),
    "largest": lambda s: s.amax(-1, keepdim=True),
    "the largest few": lambda s: s.topk(3, -1).values.sum(-1, keepdim=True),
    "log softmax": lambda s: (s.log_softmax(-1).exp() ** 2).sum(-1, keepdim=True),
    "log-sum-exp": lambda s: s.logsumexp(-1, keepdim=True),
    "softmax": lambda s: (s.softmax(-1) ** 2).sum(-1, keepdim=True),
    "how many are zero": lambda s: (s == 0).sum(-1, keepdim=True) * s.sum(-1, keepdim=True),
    "are all positive": lambda s: (s >= 0).all(-1, keepdim=True) * s.sum(-1, keepdim=True),
    "place of the least": lambda s: s.argmin(-1, keepdim=True) * s.sum(-1, keepdim=True),
    "a key": lambda s: s[..., 3:4],
    "the last key": lambda s: s[..., -1:],
    "the last key alone": lambda s: s[..., -1].unsqueeze(-1),
    "a key of a window": lambda s: s.tril().triu(-9)[..., 5:6] + s.tril().triu(-9)[..., 7].unsqueeze(-1),
    "the last of a running sum": lambda s: s.cumsum(-1)[..., -1:],
    "turned round": lambda s: s.roll(1, -1).amax(-1, keepdim=True),
}
UNLIKE = {"variance", "largest", "log softmax", "place of the least", "the last key", "a key of a window"}


class Mixer(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.mix = mix
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        return x + self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Positions keep equal tokens from having equal scores, of which rounding picks one."""

    def __init__(self, mix):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.layers = nn.Sequential(Mixer(mix), Mixer(mix))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers(self.embed(ids) + self.place(torch.arange(ids.shape[1])))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def gradients(model, step, *inputs) -> list[Tensor]:
    model.zero_grad()
    step(*inputs).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def check(model: nn.Module, *batches: tuple[Tensor, ...], chunk: int = 8) -> list[str]:
    """Gradients as those of eager for every batch. Returns the refusals."""
    model.double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(model, backend="streambp", options={"chunk_size": chunk})
        for batch in batches:
            found, wanted = gradients(model, compiled, *batch), gradients(model, model, *batch)
            for got, truth in zip(found, wanted):
                assert (got - truth).norm() <= EXACT * truth.norm().clamp(min=1e-3)
    return [str(w.message) for w in caught if issubclass(w.category, NotStreamed)]


def ids(tokens: int, batch: int = 2) -> tuple[Tensor]:
    return (torch.randint(0, VOCABULARY, (batch, tokens)),)


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", representatives(MIXERS, CHOSEN))
def test_places_of_keys_are_exact_and_stream(name):
    assert not check(Model(MIXERS[name]), ids(28), ids(44))


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", representatives(REDUCTIONS, UNLIKE))
def test_zeros_outside_a_mask_are_read_by_what_does_not_add_up(name):
    assert not check(Model(over_zeros(REDUCTIONS[name])), ids(28))


@pytest.mark.long
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.inductor
def test_an_indexer_compiled_by_inductor():
    assert not check(Model(mask_by_index), ids(28))


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
def test_sorted_keys_are_refused_by_a_sentence():
    def mix(q, k, v):
        return masked(q, k).sort(-1).values[..., -1:].tanh() * v

    refusal = check(Model(mix), ids(28))[0]
    assert "sorts the keys of each row" in refusal


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
def test_no_matrix_exists_where_keys_are_picked():
    model, batch = Model(mask_by_index), ids(512, batch=1)
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 32})
    gradients(model, compiled, *batch)
    matrix = 512 * 512 * HEADS * 4  # one of scores, in bytes; eager keeps several of each layer
    assert peak(lambda: compiled(*batch).backward()) < matrix


class Pointers(nn.Module):
    """Every token adds a row of the token that it points at."""

    def __init__(self, pick):
        super().__init__()
        self.pick, self.embed, self.place = pick, nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        attention = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        self.below, self.above = Mixer(attention), Mixer(attention)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.below(self.embed(ids) + self.place(torch.arange(ids.shape[1])))
        x = self.above(x + self.pick(self.inner(x), target))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


PICKS = {
    "gather": lambda x, at: x.gather(1, at.unsqueeze(-1).expand(*at.shape, WIDTH)),
    "index": lambda x, at: x[torch.arange(x.shape[0])[:, None], at],
    "take_along_dim": lambda x, at: torch.take_along_dim(x, at.unsqueeze(-1), 1),
    "the mean of two": lambda x, at: sum(
        torch.take_along_dim(x, ((at + k) % x.shape[1]).unsqueeze(-1), 1) for k in range(2)
    ),
}


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", representatives(PICKS, {"gather", "the mean of two"}))
def test_tokens_that_point_at_others(name):
    batches = [(*ids(tokens), torch.randint(0, tokens, (2, tokens))) for tokens in (28, 44)]
    assert not check(Pointers(PICKS[name]), *batches)
