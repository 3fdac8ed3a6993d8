"""Bands against brute force: where one says a mask is empty, the mask itself is."""

import contextlib
import functools
import itertools
import math
import random

import pytest
import torch
from graphs import Written, traced
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import SAMPLES, Index
from torch import Tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from streambp_compile.passes.ir import DocumentMask, KeyMask, MaskedOutsideBand, PositionsIncrease, Reach
from streambp_compile.passes.mask_analysis.domains import Affine, Band, Difference, Indicator
from streambp_compile.passes.mask_analysis.evaluation import Evaluation, evaluate
from streambp_compile.passes.rules import TABLE, overload
from streambp_compile.runtime.mask_conditions import by_query, holds, visible

INF = math.inf
LOW = torch.finfo(torch.float32).min
CAUSAL = (-INF, 0)


def positions(rows: int, keys: int | None = None) -> tuple[Tensor, Tensor]:
    """Query positions as a column, key positions as a row."""
    return torch.arange(rows)[:, None], torch.arange(rows if keys is None else keys)[None, :]


def index(like: Tensor, dim: int) -> Tensor:
    return (
        torch.arange(like.shape[dim])
        .view([-1 if d == dim else 1 for d in range(like.dim())])
        .expand(like.shape)
    )


def visible_by(abstract: Band, real: Tensor, environment) -> Tensor:
    """Which entries the masks beside a band leave visible, in the band and outside."""
    left = torch.ones(real.shape, dtype=torch.bool)
    for key_mask in abstract.key_masks:
        if isinstance(key_mask, DocumentMask):
            shown = by_comparisons(key_mask, environment)
            shown = shown if shown.shape == real.shape else shown.reshape(-1, *shown.shape[-2:]).all(0)
            left = left & (shown if abstract.row < abstract.key else shown.mT)
            continue
        shown = visible(environment[key_mask.node], key_mask.masked_value)
        in_place = (key_mask.row, key_mask.key) in ((abstract.row, abstract.key), (None, abstract.key))
        fits = shown.dim() == real.dim() and all(a in (1, b) for a, b in zip(shown.shape, real.shape))
        left = left & (shown if in_place and fits else shown_by_all(shown, key_mask, abstract, real))
    return left


def by_comparisons(mask: DocumentMask, environment) -> Tensor:
    """Where the comparisons of a document mask hold."""
    found = [environment[row] == environment[key] for row, key in mask.equal]
    found += [environment[row] >= environment[key] for row, key in mask.ordered]
    return functools.reduce(torch.logical_and, found)


def shown_by_all(shown: Tensor, key_mask: KeyMask, abstract: Band, real: Tensor) -> Tensor:
    """Whatever became of the batch, and of rows and keys behind others: what every mask of it shows."""
    rows, keys = real.shape[abstract.row], real.shape[abstract.key]
    found = torch.zeros(rows, keys, dtype=torch.bool)
    of_all = by_query(shown, key_mask).all(0)[:rows, :keys]
    found[: rows if key_mask.row is None else len(of_all), : of_all.shape[1]] = of_all
    found = found if abstract.row < abstract.key else found.T
    sizes = [size if d in (abstract.row, abstract.key) else 1 for d, size in enumerate(real.shape)]
    return found.reshape(sizes)


def holds_of(assumed: KeyMask | DocumentMask, band: Reach, environment) -> bool:
    if isinstance(assumed, DocumentMask):
        return bool(holds(PositionsIncrease(assumed), [environment[node] for node in assumed.nodes]))
    return bool(holds(MaskedOutsideBand((assumed,), band), [environment[assumed.node]]))


def check(abstract, real: Tensor, environment) -> None:
    """Everything that an abstract value claims holds of the real one."""
    if isinstance(abstract, Affine):
        claimed = abstract.const + sum(s * index(real, d).double() for d, s in abstract.slopes)
        claimed = torch.as_tensor(claimed, dtype=torch.float64).expand(real.shape)
        claimed = claimed.to(real.dtype) if real.is_floating_point() else claimed
        assert torch.equal(real.double(), claimed.double()), abstract
    if isinstance(abstract, DocumentMask):
        claimed = real == (not abstract.negated)
        equal, ordered = (
            [(environment[row], environment[key]) for row, key in pairs]
            for pairs in (abstract.equal, abstract.ordered)
        )
        assert all(not (claimed & (row != key)).any() for row, key in equal), abstract
        assert all(not (claimed & (key > row)).any() for row, key in ordered), abstract
        if abstract.key_masks == ():
            assert (claimed == by_comparisons(abstract, environment)).all(), abstract
    if isinstance(abstract, Difference):
        row, key = environment[abstract.row], environment[abstract.key]
        assert ((real == 0) == (row == key)).all(), abstract
        assert not abstract.sign or ((real * abstract.sign > 0) == (row > key)).all(), abstract
    if isinstance(abstract, Indicator):
        shown, other = (
            (real.double() >= n.low) & (real.double() <= n.high) for n in (abstract.visible, abstract.hidden)
        )
        assert (shown | other).all(), abstract
        if not (shown & other).any():
            check(abstract.mask, shown, environment)
    if isinstance(abstract, Band):
        offset = index(real, abstract.key) - index(real, abstract.row)
        inside = (offset >= abstract.lo) & (offset <= abstract.hi)
        band = Reach(abstract.lo, abstract.hi)
        if not all(holds_of(assumed, band, environment) for assumed in abstract.assumes):
            return  # what it claims is of a stored mask that hides what is outside, or of growing positions
        out, kept = real[~inside], real[inside]
        if abstract.outside == 0.0 and abstract.outside is not False:
            sees = (inside & visible_by(abstract, real, environment)).any(abstract.key, keepdim=True) | (
                abstract.key_masks == ()
            )
            assert (real[~inside & sees] == 0).all(), abstract
        elif abstract.outside == "min":
            assert (out <= torch.finfo(torch.float16).min / 2).all(), abstract
        else:
            assert (out == abstract.outside).all(), abstract
        if abstract.zero_inside:
            assert (
                (real[inside & visible_by(abstract, real, environment)] == 0).all()
                if abstract.key_masks is not None
                else True
            ), abstract
        if abstract.exact:
            assert (kept == (True if abstract.outside is False else 0)).all(), abstract
        if abstract.key_masks is not None and abstract.outside != 0.0 or abstract.outside is False:
            shown = (
                real[inside & visible_by(abstract, real, environment)]
                if abstract.key_masks is not None
                else kept[:0]
            )
            shown = (
                shown == (abstract.outside is False)
                if real.dtype is torch.bool
                else shown > torch.finfo(torch.float16).min
            )
            assert shown.all(), abstract
        if (
            abstract.outside == "min"
            and abstract.visibility_masks == ()
            and real.shape[abstract.row] <= real.shape[abstract.key]
        ):
            assert inside.any(abstract.key).all(), abstract


def evaluated(graph: torch.fx.Graph, with_tokens) -> Evaluation:
    """As `evaluate`, with what is known of indicators, too."""
    evaluation = Evaluation(with_tokens)
    for node in graph.nodes:
        evaluation.visit(node)
    return evaluation


def band_of(function, *inputs):
    """The abstract value of a function's result, whose scores hide nothing; that of every node on the way is
    checked against the real one."""
    graph = traced(function, *inputs)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    evaluation = evaluated(
        graph.graph,
        {n for n, v in zip(placeholders, inputs) if not v.is_floating_point() or (v < -1e4).any()},
    )
    values = evaluation.values

    class Checker(Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            if isinstance(result, Tensor):
                check(values.get(n), result, {**self.env, n: result})
                check(evaluation.indicators.get(n), result, {**self.env, n: result})
            return result

    Checker(graph, garbage_collect_values=False).run(*inputs)
    output = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    return values.get(output[0] if isinstance(output, (tuple, list)) else output)


def additive(mask: Tensor, low: float = LOW) -> Tensor:
    return torch.where(mask, 0.0, low)


def scores(n: int = 9) -> Tensor:
    return torch.randn(2, 3, n, n)


def keeps(n: int = 9) -> Tensor:
    """A padding mask: row 1 pads at the end."""
    keep = torch.ones(2, n, dtype=torch.bool)
    keep[1, -3:] = False
    return keep


def lower(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def window(n: int, width: int) -> Tensor:
    q, k = positions(n)
    return (k <= q) & (k > q - width)


def with_padding(keep: Tensor) -> Tensor:
    q, k = positions(keep.shape[1])
    return (k <= q)[None, None] & keep[:, None, None, :]


def hugging_face_additive(keep: Tensor) -> Tensor:
    """The mask of older transformers: triu of the minimum, then padding filled in. Sound, but its band is not
    found."""
    n = keep.shape[1]
    causal = torch.full((n, n), LOW).masked_fill(torch.arange(n) < torch.arange(n)[:, None] + 1, 0.0)
    return causal[None, None].expand(2, 1, n, n).masked_fill(~keep[:, None, None, :], LOW)


# (what it is, the function of its inputs, the inputs, the bounds, outside, exact or not)
PROVED = [
    ("k <= q", lambda: (lambda q, k: k <= q)(*positions(9)), (), CAUSAL, False, True),
    ("q >= k", lambda: (lambda q, k: q >= k)(*positions(9)), (), CAUSAL, False, True),
    ("k < q + 1", lambda: (lambda q, k: k < q + 1)(*positions(9)), (), CAUSAL, False, True),
    ("k < q", lambda: (lambda q, k: k < q)(*positions(9)), (), (-INF, -1), False, True),
    ("k > q - 4", lambda: (lambda q, k: k > q - 4)(*positions(9)), (), (-3, INF), False, True),
    ("k == q", lambda: (lambda q, k: k == q)(*positions(9)), (), (0, 0), False, True),
    ("not k > q", lambda: (lambda q, k: ~(k > q))(*positions(9)), (), CAUSAL, False, True),
    ("q - k >= 0", lambda: (lambda q, k: (q - k) >= 0)(*positions(9)), (), CAUSAL, False, True),
    ("later rows", lambda: (lambda q, k: k <= q + 3)(*positions(5, 8)), (), (-INF, 3), False, True),
    ("tril", lambda: lower(9), (), CAUSAL, False, True),
    (
        "positions to the end",
        lambda: torch.arange(9)[2:, None] >= torch.arange(9)[None, :],
        (),
        (-INF, 2),
        False,
        True,
    ),
    ("tril, cut", lambda: lower(12)[None, None, 3:9, :9], (), (-INF, 3), False, True),
    ("not triu", lambda: ~torch.ones(9, 9, dtype=torch.bool).triu(1), (), CAUSAL, False, True),
    ("window", lambda: window(9, 4), (), (-3, 0), False, True),
    (
        "window by distance",
        lambda: (lambda q, k: (q - k >= 0) & (q - k < 4))(*positions(9)),
        (),
        (-3, 0),
        False,
        True,
    ),
    ("padding and causal", with_padding, (keeps(),), CAUSAL, False, False),
    ("-inf", lambda: additive(lower(9), -INF), (), CAUSAL, -INF, True),
    ("additive as booleans", lambda: additive(lower(9)).bool(), (), CAUSAL, True, False),
    ("minimum", lambda: additive(lower(9)), (), CAUSAL, "min", True),
    ("minimum of a window", lambda: additive(window(9, 4)), (), (-3, 0), "min", True),
    (
        "filled",
        lambda: torch.zeros(9, 9).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -INF),
        (),
        CAUSAL,
        -INF,
        True,
    ),
    ("filled by float", lambda s: s.masked_fill(~lower(9), LOW), (scores(),), CAUSAL, "min", False),
    ("scores + mask", lambda s: s + additive(lower(9), -INF), (scores(),), CAUSAL, -INF, False),
    (
        "softmax of -inf",
        lambda s: s.masked_fill(~lower(9), -INF).softmax(-1),
        (scores(),),
        CAUSAL,
        0.0,
        False,
    ),
    (
        "softmax of minimum",
        lambda s: (s @ s + additive(lower(9))).softmax(-1),
        (scores(),),
        CAUSAL,
        0.0,
        False,
    ),
    (
        "softmax of a window",
        lambda s: (s @ s + additive(window(9, 4))).softmax(-1),
        (scores(),),
        (-3, 0),
        0.0,
        False,
    ),
    ("exponentials", lambda s: s.masked_fill(~lower(9), -INF).exp() * s, (scores(),), CAUSAL, 0.0, False),
    (
        "sigmoids and their slopes",
        lambda s: (lambda p: p * p * (1 - p))(s.masked_fill(~window(9, 4), -INF).sigmoid()),
        (scores(),),
        (-3, 0),
        0.0,
        False,
    ),
    ("rectified", lambda s: s.masked_fill(~lower(9), -INF).relu(), (scores(),), CAUSAL, 0.0, False),
    (
        "where rectified scores are shut",
        lambda s: torch.where(s.masked_fill(~lower(9), -INF).relu() <= 0, 0.0, s),
        (scores(),),
        CAUSAL,
        0.0,
        False,
    ),
    (
        "where they are open",
        lambda s: torch.where(s.masked_fill(~lower(9), -INF).relu() > 0, s, 0.0),
        (scores(),),
        CAUSAL,
        0.0,
        False,
    ),
    (
        "scaled probabilities",
        lambda s: s.masked_fill(~lower(9), -INF).softmax(-1) / 0.9 * s,
        (scores(),),
        CAUSAL,
        0.0,
        False,
    ),
]


# Arithmetic on the numbers 0 and 1 of a mask
PROVED += [
    ("(1 - mask) * low", lambda: (1.0 - lower(9).float()) * LOW, (), CAUSAL, "min", True),
    ("(mask - 1) * big", lambda: (lower(9).half() - 1) * 65504, (), CAUSAL, "min", True),
    ("(1 - tril) * low", lambda: (1 - torch.ones(9, 9).tril()) * LOW, (), CAUSAL, "min", True),
    ("triu * low", lambda: torch.ones(9, 9).triu(1) * LOW, (), CAUSAL, "min", True),
    (
        "expanded between",
        lambda: (1.0 - window(9, 3).float())[None, None].expand(2, 1, 9, 9) * LOW,
        (),
        (-2, 0),
        "min",
        True,
    ),
    (
        "product of two",
        lambda: (1.0 - window(9, 3).float() * lower(9).float()) * LOW,
        (),
        (-2, 0),
        "min",
        True,
    ),
    ("tril == 0", lambda: torch.zeros(9, 9).masked_fill(lower(9).float() == 0, -INF), (), CAUSAL, -INF, True),
    ("tril > 0.5", lambda: torch.ones(9, 9).tril() > 0.5, (), CAUSAL, False, True),
    (
        "filled where it is one",
        lambda: (lambda hidden: hidden.masked_fill(hidden.bool(), LOW))(1.0 - lower(9).float()),
        (),
        CAUSAL,
        "min",
        True,
    ),
    (
        "added to scores",
        lambda s: (s + (1.0 - lower(9).to(s.dtype)) * torch.finfo(s.dtype).min).softmax(-1),
        (scores(),),
        CAUSAL,
        0.0,
        False,
    ),
]


def packed(n: int = 9) -> Tensor:
    """Sequence ids of two rows of packed sequences."""
    return torch.stack([torch.arange(n) // 4, torch.arange(n) // 3])


def same_document(ids: Tensor) -> Tensor:
    return ids[:, None, :, None] == ids[:, None, None, :]


# Documents and paddings, masked by the lowest number
PROVED += [
    (name, function, (inputs,), bounds, "min", False)
    for name, function, inputs, bounds in (
        ("documents", lambda d: additive(same_document(d) & lower(9)), packed(), CAUSAL),
        ("documents in a window", lambda d: additive(same_document(d) & window(9, 3)), packed(), (-2, 0)),
        ("documents multiplied", lambda d: (1 - same_document(d).float().tril()) * LOW, packed(), CAUSAL),
        ("documents added", lambda d: additive(same_document(d)) + additive(lower(9)), packed(), CAUSAL),
        (
            "documents clamped",
            lambda d: (additive(same_document(d), -INF) + additive(lower(9))).clamp(LOW, 0.0),
            packed(),
            CAUSAL,
        ),
        (
            "the lower of two masks",
            lambda d: torch.minimum(additive(same_document(d)), additive(lower(9))),
            packed(),
            CAUSAL,
        ),
        (
            "documents that one sequence alone pads",
            lambda d: additive(same_document(d) & (d < 2)[:, None, None] & lower(9)),
            packed()[:1],
            CAUSAL,
        ),
        (
            "positions and documents",
            lambda d: additive((d[:, None, :, None] >= d[:, None, None]) & same_document(d) & lower(9)),
            packed(),
            CAUSAL,
        ),
        (
            "padding multiplied",
            lambda keep: (1.0 - keep.float()[:, None, None, :] * lower(9).float()) * LOW,
            keeps().long(),
            CAUSAL,
        ),
    )
]


def blocks(n: int = 9, size: int = 3) -> tuple[Tensor, Tensor]:
    """The blocks that positions are in, as a column and a row."""
    found = torch.arange(n).div(size, rounding_mode="floor")
    return found[:, None], found[None, :]


# Blocks of positions, and masks of several heads
PROVED += [
    ("blocks, not later", lambda: (lambda q, k: k <= q)(*blocks()), (), (-INF, 2), False, False),
    ("blocks, earlier", lambda: (lambda q, k: k < q)(*blocks()), (), (-INF, -1), False, False),
    ("blocks, from a row's own on", lambda: (lambda q, k: q <= k)(*blocks()), (), (-2, INF), False, False),
    ("blocks, later", lambda: (lambda q, k: q < k)(*blocks()), (), (1, INF), False, False),
    ("same block", lambda: (lambda q, k: k == q)(*blocks()), (), (-2, 2), False, False),
    ("other block", lambda: (lambda q, k: k != q)(*blocks()), (), (-2, 2), True, False),
    ("same block, causal", lambda: (lambda q, k: k == q)(*blocks()) & lower(9), (), (-2, 0), False, False),
    (
        "blocks of later positions",
        lambda: (torch.arange(1, 10) // 3)[:, None] >= (torch.arange(9)[None] // 3),
        (),
        (-INF, 3),
        False,
        False,
    ),
    (
        "decays without what is no number",
        lambda: (lambda q, k: (0.9 ** (q - k)).masked_fill(k > q, 0.0).nan_to_num())(*positions(9)),
        (),
        CAUSAL,
        0.0,
        False,
    ),
    (
        "infinities replaced",
        lambda s: (lambda x: torch.where(x == INF, 1e4, x))(s.exp().tril()),
        (scores(),),
        CAUSAL,
        0.0,
        False,
    ),
    ("masks of two heads", lambda: torch.stack([lower(9), window(9, 3)]), (), CAUSAL, False, False),
    (
        "additive masks of two heads",
        lambda: torch.cat([additive(lower(9), -INF)[None], additive(window(9, 3), -INF)[None]]),
        (),
        CAUSAL,
        -INF,
        False,
    ),
]


@pytest.mark.parametrize(
    "function, inputs, bounds, outside, exact", [p[1:] for p in PROVED], ids=[p[0] for p in PROVED]
)
def test_proved(function, inputs, bounds, outside, exact):
    found = band_of(function, *inputs)
    assert isinstance(found, Band) and (found.lo, found.hi) == bounds
    assert found.outside == outside and type(found.outside) is type(outside) and found.exact == exact


# Masks of which nothing, or less, may be claimed: soundness is checked on the way.
OPEN = [
    ("exponentials of minimum", lambda s: s.masked_fill(~lower(9), LOW).exp(), (scores(),)),
    ("rectified, compared otherwise", lambda s: s.masked_fill(~lower(9), -INF).relu() < 0, (scores(),)),
    (
        "probabilities compared",
        lambda s, m: (s + additive(m)[:, None, None] + additive(lower(9))).softmax(-1) <= 0,
        (scores(), keeps().flip(1)),
    ),
    ("random", lambda s: s > 0, (scores(),)),
    (
        "anticausal softmax of minimum",
        lambda s: (s + additive(window(9, 4) & (lambda q, k: k < q)(*positions(9)))).softmax(-1),
        (scores(),),
    ),
    (
        "k < q, softmax of minimum",
        lambda s: s.masked_fill((lambda q, k: k >= q)(*positions(9)), LOW).softmax(-1),
        (scores(),),
    ),
    (
        "filled twice",
        lambda s: s.masked_fill(~lower(9), LOW).masked_fill(lower(9), LOW).softmax(-1),
        (scores(),),
    ),
    (
        "padding fills minimum, softmax",
        lambda s, m: (s + hugging_face_additive(m)).softmax(-1),
        (scores(), ~keeps()),
    ),
    ("causal or padding", lambda m: lower(9)[None, None] | m[:, None, None, :], (keeps(),)),
    ("causal or diagonal", lambda: (lambda q, k: (k < q) | (k == q))(*positions(9)), ()),
    ("distant bands", lambda: (lambda q, k: (k == q) | (k == q - 5))(*positions(9)), ()),
    ("inverted window", lambda: ~window(9, 4), ()),
    ("bias + causal", lambda s: s * 3 + additive(lower(9)) + additive(window(9, 3)), (scores(),)),
    (
        "two low masks",
        lambda s: (s + additive(lower(9), -70000.0) - additive(lower(9), -70000.0)).softmax(-1),
        (scores(),),
    ),
    ("low mask scaled", lambda s: (s + additive(lower(9)) * 1e-38).softmax(-1), (scores(),)),
    ("low mask divided", lambda s: (s + additive(lower(9)) / 1e38).softmax(-1), (scores(),)),
    (
        "low mask beside low scores",
        lambda s: (s.where(s > 0, LOW) + additive(lower(9), -70000.0)).softmax(-1),
        (scores(),),
    ),
    ("low mask added to large scores", lambda s: s * 1e6 + additive(lower(9), -70000.0), (scores(),)),
    ("softmax over rows", lambda s: s.masked_fill(~lower(9), -INF).softmax(-2), (scores(),)),
    ("transposed", lambda: lower(9).t(), ()),
    ("steps of two", lambda: torch.arange(0, 18, 2)[:, None] >= torch.arange(9), ()),
    (
        "documents",
        lambda d: (d[:, :, None] == d[:, None, :]) & lower(9),
        (torch.arange(9).div(4, rounding_mode="floor").expand(2, 9),),
    ),
    ("as integers", lambda: lower(9).long() - 1, ()),
    ("as floats", lambda: (1.0 - lower(9).float()) * LOW, ()),
    ("zeros replaced", lambda s: (lambda x: torch.where(x < INF, 1e4, x))(s.exp().tril()), (scores(),)),
    ("blocks of two sizes", lambda: torch.arange(9)[:, None] // 3 >= torch.arange(9) // 2, ()),
    ("blocks of steps", lambda: torch.arange(0, 18, 2)[:, None] // 3 >= torch.arange(9) // 3, ()),
    (
        "blocks, rounded to zero",
        lambda: (lambda q, k: k <= q)(
            *(torch.arange(-4, 5).div(3, rounding_mode="trunc").view(s) for s in ((9, 1), (1, 9)))
        ),
        (),
    ),
    ("masks of heads that look both ways", lambda: torch.stack([lower(9), lower(9).t()]), ()),
    (
        "masks of heads, of which one is stored",
        lambda m: torch.stack([lower(9), m]),
        (keeps(81)[0].view(9, 9),),
    ),
    ("probabilities less one", lambda s: s.masked_fill(~lower(9), -INF).softmax(-1) - 1, (scores(),)),
    ("negative scale", lambda: additive(lower(9), -INF) * -1.0, ()),
    ("half offsets", lambda: torch.arange(9)[:, None] + 0.5 > torch.arange(9), ()),
    ("truncated", lambda: (torch.arange(9)[:, None] + 0.5).long() > torch.arange(9), ()),
    ("range sum", lambda: torch.ones(9).cumsum(0)[:, None] > torch.arange(9), ()),
    ("range read", lambda: torch.arange(3, 20)[torch.arange(9)][:, None] >= torch.arange(9), ()),
    (
        "ranges joined",
        lambda: torch.cat((torch.arange(4), torch.arange(4, 9)))[:, None] >= torch.arange(9),
        (),
    ),
    (
        "keys cut at the left, softmax",
        lambda s: (s[..., 3:] + additive(lower(9))[:, 3:]).softmax(-1),
        (scores(),),
    ),
    (
        "keys cut at the right, softmax",
        lambda s: (s + additive(~lower(9).tril(-1)))[..., :5].softmax(-1),
        (scores(),),
    ),
    (
        "keys of a window cut, then filled, softmax",
        lambda s: s[..., :5].masked_fill(~window(9, 3)[:, :5], LOW).softmax(-1),
        (scores(),),
    ),
    (
        "past beside future, softmax",
        lambda s: (s + additive(window(9, 3)) + additive(~lower(9))).softmax(-1),
        (scores(),),
    ),
    (
        "left padding, then causal, softmax",
        lambda s, m: (s + additive(m)[:, None, None] + additive(lower(9))).softmax(-1),
        (scores(), keeps().flip(1)),
    ),
    (
        "mask of ones as booleans",
        lambda: torch.full((9, 9), 2).bool() == torch.ones(9, 9, dtype=torch.bool),
        (),
    ),
    ("integers and", lambda: torch.full((9, 9), 2) & torch.ones(9, 9, dtype=torch.long), ()),
    ("distances cut", lambda: (lambda q, k: (k - q).abs()[:, 2:] < 3)(*positions(9)), ()),
    ("packed, rows cut", lambda a: (a[:, :, None] >= a[:, None, :])[:, 3:], (torch.arange(9).expand(2, 9),)),
    ("minimum in bfloat16", lambda s: s.bfloat16() + additive(lower(9)).bfloat16(), (scores(),)),
    (
        "one mask twice, filled and chosen",
        lambda: torch.zeros(9, 9).masked_fill(~lower(9), -INF) + additive(lower(9), -INF),
        (),
    ),
    ("flipped cut", lambda: lower(9)[-4:, -6:], ()),
    (
        "padded batch of one",
        lambda: lower(9)[None].expand(3, 9, 9) & torch.ones(3, 1, 9, dtype=torch.bool),
        (),
    ),
]


@pytest.mark.parametrize("function, inputs", [o[1:] for o in OPEN], ids=[o[0] for o in OPEN])
def test_sound(function, inputs):
    band_of(function, *inputs)


COMPARE = {"<=": torch.le, "<": torch.lt, ">=": torch.ge, ">": torch.gt, "==": torch.eq, "!=": torch.ne}


@pytest.mark.quick
def test_every_comparison_with_every_offset():
    for (name, compare), shift, swapped in itertools.product(
        COMPARE.items(), (-11, -3, 0, 2, 11), (False, True)
    ):

        def mask():
            q, k = torch.arange(7)[:, None] + shift, torch.arange(9)
            return compare(k, q) if swapped else compare(q, k)  # noqa: B023  (called at once)

        assert name == "!=" or isinstance(band_of(mask), Band)


half_plane = st.tuples(st.sampled_from(sorted(COMPARE)), st.integers(-6, 6))


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.tuples(half_plane, st.sampled_from(["and", "or"]), st.booleans()), min_size=1, max_size=4
    ),
    rows=st.integers(1, 6),
    keys=st.integers(1, 6),
    fill=st.sampled_from([-INF, LOW, 0.0, 1.0, -1e4]),
)
def test_random_masks_are_sound(parts, rows, keys, fill):
    def mask():
        q, k = positions(rows, keys)
        total = None
        for (name, shift), joint, inverted in parts:
            part = COMPARE[name](k, q + shift)
            part = ~part if inverted else part
            total = part if total is None else total & part if joint == "and" else total | part
        return torch.zeros(rows, keys).masked_fill(~total, fill) + torch.where(total, 0.0, fill)

    band_of(mask)


numbers = st.sampled_from([0, 1, -1, 0.5, 0.1, 2, -3.0, 1e4, -65504, LOW])
arithmetic = st.sampled_from(
    [torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.lt, torch.eq]
)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@example(steps=[(torch.add, 1, False), (torch.mul, ("<", 0), False)], dtype=torch.int64)
@example(steps=[(torch.add, -65504, False), (torch.div, 2, False)], dtype=torch.float16)
@given(
    steps=st.lists(
        st.tuples(arithmetic, st.one_of(numbers, half_plane), st.booleans()), min_size=1, max_size=5
    ),
    dtype=st.sampled_from(
        [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
    ),
)
def test_random_arithmetic_on_masks_is_sound(steps, dtype):
    """What overflows is left out: that zero times a number is zero is taken for granted."""

    def result(count):
        q, k = positions(4, 5)
        total = (k <= q).to(dtype)
        for function, other, swapped in steps[:count]:
            if isinstance(other, tuple):
                other = COMPARE[other[0]](k, q + other[1]).to(total.dtype)
            else:
                other = torch.full((), other, dtype=total.dtype if dtype.is_floating_point else None)
            total = function(other, total) if swapped else function(total, other)
            total = total.to(dtype) if total.dtype is torch.bool else total
        return total

    finite = [bool(result(count).isfinite().all()) for count in range(len(steps) + 1)]
    band_of(lambda: result([*finite, False].index(False) - 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.bfloat16, torch.float16])
def test_positions_that_a_dtype_does_not_have(dtype):
    """They wrap around, or are rounded: a later key would be taken for an earlier one. So nothing is proved
    that is not checked at every call."""

    def mask():
        q, k = positions(2100)
        return (k.to(dtype) <= q.to(dtype)).to(torch.float64)

    band_of(mask)
    graph = traced(mask)
    found = [v for v in evaluate(graph.graph).values() if isinstance(v, Band)]
    assert all(v.assumes for v in found)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
@pytest.mark.parametrize("function", [torch.add, torch.lt, torch.maximum, torch.sub])
@pytest.mark.parametrize("number", [-65504, 200])
def test_integers_wrap_around(dtype, function, number):
    """0 + 200 is -56 in int8; and 0 < -65504 is true in uint8, where that is 32."""

    def mask():
        q, k = positions(4, 5)
        return function((k <= q).to(dtype) * 0, torch.full((), number))

    band_of(mask)


@pytest.mark.quick
def test_numbers_may_be_sizes():
    """``CrossEntropyLoss(ignore_index=ids.shape[1])``, and arithmetic of masks with a size."""

    def compared(targets, ids):
        q, k = torch.arange(9)[:, None], torch.arange(9)
        counted = (k <= q).long()
        return targets[:, None] != ids.shape[1], counted * ids.shape[1] > 0, counted + ids.shape[1]

    found = make_fx(compared, tracing_mode="symbolic")(torch.arange(3), torch.ones(3, 9, dtype=torch.long))
    assert any(
        isinstance(a, torch.fx.Node) and isinstance(a.meta["val"], torch.SymInt)
        for n in found.graph.find_nodes(op="call_function", target=aten.ne.Scalar)
        for a in n.args
    )
    evaluate(found.graph)


# Every row with the facet, on operands of which much is known

aten, prims = torch.ops.aten, torch.ops.prims


def along(write: Written, name: str, shape, dim: int, dtype: torch.dtype):
    """Positions along one dimension."""
    kwargs = {"dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}
    place = write(f"{name}_place", prims.iota.default, shape[dim], start=0, step=1, **kwargs)
    sizes = [shape[d] if d == dim else 1 for d in range(len(shape))]
    viewed = write(f"{name}_viewed", aten.view.default, place, sizes)
    whole = write(f"{name}_whole", aten.expand.default, viewed, list(shape))
    return write(f"{name}_cast", aten._to_copy.default, whole, dtype=dtype)


def operands_known(write: Written, name: str, value: Tensor) -> list:
    """Operands in the place of one: as it is, constants, positions, bands, masked scores, probabilities."""
    shape, dtype = tuple(value.shape), value.dtype
    place = {"dtype": dtype, "device": torch.device("cpu")}
    found = [write.given(f"{name}_given", value)]
    found += [write(f"{name}_full{c}", aten.full.default, list(shape), c, **place) for c in (0, 1)]
    if dtype is not torch.bool:
        found += [along(write, f"{name}_{d}", shape, d, dtype) for d in range(len(shape)) if shape[d] > 1]
    if len(shape) < 2 or 1 in shape[-2:] or dtype not in (torch.bool, torch.float64):
        return found
    rows, keys = (
        along(write, f"{name}_{w}", shape, d, torch.int64)
        for w, d in (("row", len(shape) - 2), ("key", len(shape) - 1))
    )
    causal = write(f"{name}_causal", aten.le.Tensor, keys, rows)
    near = write(f"{name}_near", aten.gt.Tensor, keys, write(f"{name}_back", aten.sub.Tensor, rows, 2))
    window = write(f"{name}_window", aten.bitwise_and.Tensor, causal, near)
    masks = [causal, window, *(write(f"{n}_not", aten.bitwise_not.default, n) for n in (causal, window))]
    if dtype is torch.bool:
        return found + masks
    low = torch.finfo(dtype).min
    found.append(write(f"{name}_low", aten.full.default, list(shape), low, **place))
    away = write(f"{name}_distance", aten.sub.Tensor, keys, rows)
    found.append(write(f"{name}_away", aten._to_copy.default, away, dtype=dtype))
    hidden = [
        write(f"{mask}_{k}_{base}", aten.masked_fill.Scalar, base, mask, fill)
        for mask, base in ((masks[2], found[0]), (masks[3], found[1]))
        for k, fill in enumerate((-INF, low, 0.0))
    ]
    weights = [write(f"{n}_weights", aten._softmax.default, n, len(shape) - 1, False) for n in hidden[:2]]
    indicators = [write(f"{n}_number", aten._to_copy.default, n, dtype=dtype) for n in masks[:2]]
    return found + hidden + weights + indicators


def tensors_in(arg) -> bool:
    return isinstance(arg, (Tensor, Index))


def typed(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value > 0 if dtype is torch.bool else value.to(dtype)


def calls_of(name: str):
    """The samples of an op, of pointwise ones as booleans and integers, too: op, arguments (its tensors are
    ``None``), those tensors."""
    for number, make in enumerate(SAMPLES[name]):
        torch.manual_seed(number)
        target, args, kwargs = make()
        leaves, spec = tree_flatten((args, kwargs), is_leaf=tensors_in)
        places = [i for i, leaf in enumerate(leaves) if tensors_in(leaf)]
        values = [leaves[i].values if isinstance(leaves[i], Index) else leaves[i] for i in places]
        yield target, leaves, spec, places, values
        if torch.Tag.pointwise in target.tags:
            for dtype in (torch.bool, torch.int64):
                yield target, leaves, spec, places, [typed(value, dtype) for value in values]


MOST_CALLS = 80  # of one sample: some of all combinations of its operands
WITH_MASK = sorted(name for name in SAMPLES if TABLE[overload(name)].mask is not None)


def test_rows_know_what_they_do_to_masks():
    assert len(WITH_MASK) >= 50


@pytest.mark.parametrize("name", WITH_MASK)
def test_every_row_is_sound_on_what_is_known(name):
    """What a row claims of its result is so, whatever is known of its operands; and of some it claims
    something."""
    claims = 0
    for target, leaves, spec, places, values in calls_of(name):
        write = Written()
        choices = [operands_known(write, f"x{k}", value) for k, value in enumerate(values)]
        combinations = list(itertools.product(*choices))
        random.Random(0).shuffle(combinations)
        for count, chosen in enumerate(combinations[:MOST_CALLS]):
            for i, node in zip(places, chosen):
                leaves[i] = node
            args, kwargs = tree_unflatten(leaves, spec)
            with contextlib.suppress(IndexError, RuntimeError):  # no such index, or not of this dtype
                write(f"result{count}", target, *args, **kwargs)
        written = [n for n in write.graph.nodes if "val" in n.meta]
        evaluation = evaluated(write.graph, {n for n in written if n.op == "placeholder"})
        found = evaluation.values
        environment = {n: n.meta["val"] for n in written}
        for node in written:
            check(found.get(node), environment[node], environment)
            check(evaluation.indicators.get(node), environment[node], environment)
            claims += node.name.startswith("result") and found.get(node) is not None
    assert claims


# Masks of packed sequences, in every spelling

CAUSAL_SPELLINGS = {
    "k <= q": lambda q, k: k <= q,
    "q >= k": lambda q, k: q >= k,
    "not k > q": lambda q, k: ~(k > q),
    "not q < k": lambda q, k: (q < k).logical_not(),
    "q - k >= 0": lambda q, k: q - k >= 0,
    "k - q < 1": lambda q, k: k - q < 1,
    "-(q - k) <= 0": lambda q, k: -(q - k) <= 0,
    "not k - q > 0": lambda q, k: ~((k - q) > 0),
    "(k > q) == False": lambda q, k: (k > q) == False,  # noqa: E712
    "0 <= q - k": lambda q, k: torch.zeros((), dtype=torch.int64) <= q - k,
    "(k > q) ^ True": lambda q, k: (k > q) ^ True,
    "expanded": lambda q, k: q.expand(-1, -1, k.shape[-1]) >= k.expand(-1, q.shape[1], -1),
}
SAME_SPELLINGS = {
    "s == t": lambda s, t: s == t,
    "not s != t": lambda s, t: ~(s != t),
    "s != t, logical_not": lambda s, t: s.ne(t).logical_not(),
    "s - t == 0": lambda s, t: s - t == 0,
    "s ^ t == 0": lambda s, t: s ^ t == 0,
    "not bool(s ^ t)": lambda s, t: ~(s ^ t).bool(),
    "logical_not(s - t)": lambda s, t: (s - t).logical_not(),
    "abs(s - t) == 0": lambda s, t: (s - t).abs() == 0,
    "(s != t) < 1": lambda s, t: (s != t) < 1,
}
JOINT_SPELLINGS = {
    "a & b": lambda a, b: a & b,
    "b & a": lambda a, b: b & a,
    "not (not a | not b)": lambda a, b: ~(~a | ~b),
    "logical": lambda a, b: (a.logical_not().logical_or(b.logical_not())).logical_not(),
    "a * b": lambda a, b: a * b,
    "where(a, b, False)": lambda a, b: torch.where(a, b, False),
    "not where(a, not b, True)": lambda a, b: ~torch.where(a, ~b, True),
    "a filled with False": lambda a, b: a.masked_fill(~b, False),
    "not (not a filled with True)": lambda a, b: ~(~a).masked_fill(~b, True),
    "minimum": lambda a, b: torch.minimum(a, b),
}


def test_packed_masks_are_known_in_every_spelling():
    of, at = (
        torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 2, 2]]),
        torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 0, 1]]),
    )
    spellings = list(itertools.product(CAUSAL_SPELLINGS, SAME_SPELLINGS, JOINT_SPELLINGS))[::7]

    def masks(of, at):
        q, k, s, t = at[:, :, None], at[:, None, :], of[:, :, None], of[:, None, :]
        return [
            JOINT_SPELLINGS[joint](CAUSAL_SPELLINGS[causal](q, k), SAME_SPELLINGS[same](s, t))
            for causal, same, joint in spellings
        ]

    graph = traced(masks, of, at)
    values = evaluate(graph.graph)
    outputs = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    expected = masks(of, at)[0]
    for node, (causal, same, joint) in zip(outputs, spellings):
        found = values[node]
        assert isinstance(found, DocumentMask) and not found.negated, (causal, same, joint)
        assert found.equal and found.ordered, (causal, same, joint)
    run = Interpreter(graph).run(of, at)
    assert all(torch.equal(mask, expected) for mask in run)


@pytest.mark.parametrize("causal", CAUSAL_SPELLINGS.values(), ids=CAUSAL_SPELLINGS)
@pytest.mark.parametrize("fill", [False, True], ids=["where", "masked_fill"])
def test_packed_masks_prune_in_every_spelling(causal, fill):
    """Scores filled where later positions are: causal, as long as positions increase."""
    at = torch.arange(9).expand(2, 9)

    def masked(s, at):
        mask = causal(at[:, :, None], at[:, None, :])
        return s[:, 0].masked_fill(~mask, -INF) if fill else torch.where(mask, s[:, 0], -INF)

    found = band_of(masked, scores(), at)
    assert isinstance(found, Band) and (found.lo, found.hi) == CAUSAL and found.assumes


bases = st.sampled_from([*CAUSAL_SPELLINGS.values(), *SAME_SPELLINGS.values()])
joints = st.sampled_from(
    [*JOINT_SPELLINGS.values(), torch.bitwise_or, torch.logical_xor, torch.maximum, torch.le]
)


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=4, max_size=4),
    parts=st.lists(st.tuples(bases, joints, st.booleans(), st.booleans()), min_size=1, max_size=4),
)
def test_random_masks_of_per_token_values_are_sound(values, parts):
    at = torch.tensor([values])

    def mask(at):
        total = (lambda q, k: k <= q)(*positions(4))
        for base, joint, swapped, negated in parts:
            part = base(at[:, :, None], at[:, None, :])
            part = ~part if negated else part
            total = joint(part, total) if swapped else joint(total, part)
        return torch.zeros(1, 4, 4).masked_fill(~total, -INF)

    band_of(mask, at)
