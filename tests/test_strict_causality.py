"""Masks that leave the first rows, or the last, without keys: strictly below the diagonal, or above it."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from streambp_compile import NotStreamed

TOKENS, WIDTH, INF = 13, 8, float("-inf")


def distance(h):
    place = torch.arange(h.shape[1])
    return place[:, None] - place[None]


def scores(h):
    return h @ h.mT / 4


def where_visible(h, hidden, value=0.0):
    """A softmax whose rows without keys are NaN, which a second mask removes again."""
    return torch.where(hidden, value, scores(h).masked_fill(hidden, INF).softmax(-1))


def softmax(h, lowest=INF):
    return scores(h).masked_fill(distance(h) <= 0, lowest).softmax(-1)


def window(h):
    return torch.where((distance(h) > 2) & (distance(h) < 6), scores(h), 0.0)


def normalized(h):
    weights = scores(h).exp().tril(-1)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)


MIXERS = {
    "below the diagonal": lambda h: scores(h).tril(-1) @ h,
    "exponentials below the diagonal": lambda h: scores(h).exp().tril(-1) @ h,
    "exponentials normalised": lambda h: normalized(h) @ h,
    "far below the diagonal": lambda h: scores(h).tril(-5) @ h,
    "a window that ends before the row": lambda h: window(h) @ h,
    "by rows and by keys": lambda h: scores(h).tril(-3).mT @ h + scores(h).tril(-3) @ h,
    "above the diagonal": lambda h: scores(h).triu(1) @ h,
    "far above the diagonal": lambda h: scores(h).triu(7) @ h,
    "softmax, then zeros": lambda h: where_visible(h, distance(h) <= 0) @ h,
    "softmax ahead, then zeros": lambda h: where_visible(h, distance(h) >= 0) @ h,
    "softmax, then no NaN": lambda h: softmax(h).nan_to_num(0.0) @ h,
    "softmax of lowest numbers": lambda h: softmax(h, torch.finfo(h.dtype).min) @ h,
    "fused": lambda h: F.scaled_dot_product_attention(*[h[:, None]] * 3, attn_mask=distance(h) > 4)[:, 0],
}
MAKE_NAN = {
    "softmax": lambda h: softmax(h) @ h,
    "softmax of which no NaN is read": lambda h: (softmax(h) @ h).nan_to_num(0.0),
}


def check(mix, chunk: int) -> list[str]:
    """Gradients as those of eager, NaN where they are NaN. Returns the refusals."""
    sizes = (2, TOKENS, WIDTH), (WIDTH, WIDTH), (WIDTH, 11)
    x, weight, head = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes)
    labels = torch.randint(0, 11, (2, TOKENS))

    def loss(x):
        h = torch.tanh(x @ weight)
        return F.cross_entropy(((h + mix(h)) @ head).flatten(0, 1), labels.flatten())

    wanted = torch.autograd.grad(loss(x), (x, weight, head))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(loss, backend="streambp", options={"chunk_size": chunk})
        found = torch.autograd.grad(compiled(x), (x, weight, head))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12, equal_nan=True)
    return [str(w.message) for w in caught if issubclass(w.category, NotStreamed)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("chunk", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MIXERS)
def test_rows_without_keys_are_exact_and_stream(name, chunk):
    assert not check(MIXERS[name], chunk)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", MAKE_NAN)
def test_what_is_nan_in_eager_is_nan(name):
    check(MAKE_NAN[name], 4)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "name",
    ["far below the diagonal", "softmax, then zeros", "above the diagonal"],
)
@pytest.mark.slow
def test_rows_without_keys_compiled_by_inductor(name):
    assert not check(MIXERS[name], 4)
