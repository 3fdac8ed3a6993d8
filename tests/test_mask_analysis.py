"""Bands against brute force: where one says a mask is empty, the mask itself is."""

import itertools
import math

import pytest
import torch
from graphs import traced
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Interpreter

from streambp_compile.passes.ir import MaskedOutsideBand, Reach
from streambp_compile.passes.mask_analysis.domains import Affine, Band
from streambp_compile.passes.mask_analysis.evaluation import evaluate
from streambp_compile.runtime.mask_guards import by_query, holds, visible

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
    """Which entries the paddings beside a band leave, in the band and outside."""
    left = torch.ones(real.shape, dtype=torch.bool)
    for key_mask in abstract.key_masks:
        shown = visible(environment[key_mask.node], key_mask.masked_value)
        if shown.dim() != real.dim():  # whatever became of the batch: what every one of it shows
            shown = by_query(shown, key_mask).all(0)
            shown = shown if abstract.row < abstract.key else shown.T
            shown = shown.reshape(
                [
                    real.shape[d]
                    if d == abstract.key or d == abstract.row and key_mask.row is not None
                    else 1
                    for d in range(real.dim())
                ]
            )
        left = left & shown
    return left


def check(abstract, real: Tensor, environment) -> None:
    """Everything that an abstract value claims holds of the real one."""
    if isinstance(abstract, Affine):
        claimed = abstract.const + sum(s * index(real, d).double() for d, s in abstract.slopes)
        claimed = torch.as_tensor(claimed, dtype=torch.float64).expand(real.shape)
        claimed = claimed.to(real.dtype) if real.is_floating_point() else claimed
        assert torch.equal(real.double(), claimed.double()), abstract
    if isinstance(abstract, Band):
        offset = index(real, abstract.key) - index(real, abstract.row)
        inside = (offset >= abstract.lo) & (offset <= abstract.hi)
        band = Reach(abstract.lo, abstract.hi)
        if not all(holds(MaskedOutsideBand((s,), band), [environment[s.node]]) for s in abstract.assumes):
            return  # what it claims is of a stored mask that hides what is outside
        out, kept = real[~inside], real[inside]
        if abstract.outside == 0.0 and abstract.outside is not False:
            sees = (inside & visible_by(abstract, real, environment)).any(abstract.key, keepdim=True) | (
                abstract.key_masks == ()
            )
            assert (real[~inside & sees] == 0).all(), abstract
        elif abstract.outside == "min":
            assert (out <= 0.99 * torch.finfo(torch.float16).min).all(), abstract
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


def band_of(function, *inputs):
    """The abstract value of a function's result, whose scores hide nothing; that of every node on the way is
    checked against the real one."""
    graph = traced(function, *inputs)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    values = evaluate(
        graph.graph,
        {n for n, v in zip(placeholders, inputs) if not v.is_floating_point() or (v < -1e4).any()},
    )

    class Checker(Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            if isinstance(result, Tensor):
                check(values.get(n), result, {**self.env, n: result})
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
    ("blocks", lambda: torch.arange(9)[:, None] // 3 >= torch.arange(9) // 3, ()),
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
