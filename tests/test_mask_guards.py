"""Conditions on masks: what a call is checked for, and what happens when it does not keep them."""

import itertools
import math
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from models import Layer, gradients, ids_of, worst_error
from torch import Tensor, nn

from streambp_compile import StreamHint, explain
from streambp_compile.passes.ir import (
    EVERYWHERE,
    PAST,
    DocumentMask,
    EveryRowHasVisibleKey,
    KeyMask,
    MaskedOutsideBand,
    Reach,
)
from streambp_compile.runtime.mask_conditions import holds, positions_increase
from streambp_compile.runtime.mask_guards import Guard, Question, answered, rounds

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10
LENGTH = 61


def band_matrix(band: Reach, length: int) -> Tensor:
    distance = torch.arange(length) - torch.arange(length)[:, None]
    return (distance >= band.lo) & (distance <= band.hi)


def key_mask(row: int | None, key: int, hides: bool | None) -> KeyMask:
    return KeyMask(None, row, key, hides)


@pytest.mark.parametrize("band", [PAST, EVERYWHERE, Reach(-2, 0), Reach(-3, 1), Reach(1, math.inf)], ids=str)
@pytest.mark.quick
def test_every_row_has_a_visible_key(band):
    """Against brute force, for every padding of five keys, as booleans of both meanings and as numbers."""
    found = set()
    for keep in itertools.product((True, False), repeat=5):
        keep = torch.tensor([keep, (True,) * 5])
        expected = bool((band_matrix(band, 5) & keep[:, None]).any(-1).all())
        spellings = (
            (keep, key_mask(None, 1, False)),
            (~keep, key_mask(None, 1, True)),
            (torch.where(keep, 0.3, -3e38), key_mask(None, 1, None)),
            (keep[:, None, None, :], key_mask(None, 3, False)),
            (keep.T, key_mask(None, 0, False)),
        )
        assert {bool(holds(EveryRowHasVisibleKey((what,), band), [mask])) for mask, what in spellings} == {
            expected
        }
        found.add(expected)
    assert len(found) == (1 if band.lo == 1 else 2)


def document_mask(equal: int, ordered: int) -> DocumentMask:
    """Comparisons of so many pairs of values."""
    pairs = (("row", "key"),) * (equal + ordered)
    return DocumentMask(pairs[:equal], pairs[equal:], key_masks=())


@pytest.mark.parametrize("band", [PAST, EVERYWHERE, Reach(-1, 0), Reach(-2, 1)], ids=str)
@pytest.mark.quick
def test_every_row_has_a_visible_key_of_its_document(band):
    """Against brute force, for all ids and paddings of four tokens: never too generous, and exact where a
    document's tokens follow one another."""
    found = set()
    for ids, keep in itertools.product(
        itertools.product(range(3), repeat=4), itertools.product((True, False), repeat=4)
    ):
        ids, keep = torch.tensor([ids]), torch.tensor([keep])
        values = [ids[:, None, :, None], ids[:, None, None, :]]
        for pairs, shown in (
            (document_mask(1, 0), ids[0, :, None] == ids[0]),
            (document_mask(0, 1), ids[0, :, None] >= ids[0]),
        ):
            condition = EveryRowHasVisibleKey((pairs, key_mask(None, 1, False)), band)
            held = bool(holds(condition, [*values, keep]))
            expected = bool((band_matrix(band, 4) & shown & keep).any(-1).all())
            assert expected or not held
            rises = bool((ids[:, 1:] >= ids[:, :-1]).all())
            assert held == expected or not rises or band.hi > 0
            found.add(held)
            assert holds(EveryRowHasVisibleKey((pairs,), band), values)
    assert found == {True, False}


def test_documents_of_rows_that_are_not_those_of_keys_count_for_nothing():
    condition = EveryRowHasVisibleKey((document_mask(1, 0),), PAST)
    ids = torch.tensor([0, 0, 1, 1])
    assert holds(condition, [ids[:, None], ids])
    assert not holds(condition, [ids[:, None] + 1, ids])


def test_a_padding_mask_of_other_numbers_than_zeros_and_ones_does_not_count():
    condition = EveryRowHasVisibleKey((key_mask(None, 1, False),), PAST)
    assert holds(condition, [torch.tensor([[1, 1, 0]])])
    assert not holds(condition, [torch.tensor([[1, 2, 0]])])


def test_a_stored_mask_beside_a_padding():
    stored, keep = band_matrix(Reach(-1, 0), 6)[None], torch.ones(2, 6, dtype=torch.bool)
    both = EveryRowHasVisibleKey((key_mask(1, 2, False), key_mask(None, 1, False)), PAST)
    assert holds(both, [stored, keep])
    keep[1, 2] = False
    assert holds(both, [stored, keep])
    keep[1, 3] = False  # row 3 sees but 2 and 3
    assert not holds(both, [stored, keep])


@pytest.mark.parametrize("band", [PAST, EVERYWHERE, Reach(-1, 0), Reach(-2, 1)], ids=str)
def test_two_paddings(band):
    """Against brute force, for paddings of four keys: booleans and numbers, of one sequence and of
    several."""
    for first, second in itertools.product(itertools.product((True, False), repeat=4), repeat=2):
        a, b = torch.tensor([first]), torch.tensor([second, (True,) * 4])
        expected = bool((band_matrix(band, 4) & (a & b)[:, None]).any(-1).all())
        numbers = torch.where(b, 0.0, torch.finfo(torch.float32).min)
        assert (
            bool(
                holds(
                    EveryRowHasVisibleKey((key_mask(None, 1, False), key_mask(None, 1, None)), band),
                    [a, numbers],
                )
            )
            == expected
        )


def test_masks_of_heads_beside_paddings_of_sequences():
    """Of which sequence a head's mask is, their numbers do not tell: each must do with each."""
    condition = EveryRowHasVisibleKey((key_mask(1, 2, False), key_mask(None, 1, False)), PAST)
    heads = torch.stack([band_matrix(Reach(-w, 0), 5) for w in (0, 4)])
    keep = torch.ones(3, 5, dtype=torch.bool)
    assert holds(condition, [heads, keep])
    keep[2, 3] = False  # row 3 of the first head sees but key 3
    assert not holds(condition, [heads, keep])


def test_a_stored_mask_hides_outside():
    for spelled, hides in (
        (lambda m: m, False),
        (lambda m: ~m, True),
        (lambda m: torch.where(m, 0.0, -math.inf), None),
    ):
        lower = torch.ones(7, 7, dtype=torch.bool).tril()
        assert holds(MaskedOutsideBand((key_mask(0, 1, hides),), PAST), [spelled(lower)])
        lower[5, 6] = True
        assert not holds(MaskedOutsideBand((key_mask(0, 1, hides),), PAST), [spelled(lower)])
        assert holds(MaskedOutsideBand((key_mask(0, 1, hides),), Reach(-math.inf, 1)), [spelled(lower)])


def test_numbers_so_large_that_lowest_numbers_may_not_vanish_beside_them_do_not_count():
    assert not holds(
        EveryRowHasVisibleKey((key_mask(None, 1, None),), PAST), [torch.tensor([[0.0, 3e38, 0.0]])]
    )


@dataclass(frozen=True)
class Named:
    """In the place of a guard."""

    text: str


def test_questions_are_asked_once_and_as_early_as_the_first():
    def question(text: str, *values: str, generation: int = 0) -> Question:
        return Question(Named(text), values, generation)

    causal, padding, again = (
        question("causal", "mask"),
        question("padding", "keep"),
        question("causal", "mask", generation=1),
    )
    late = question("late", "made")
    links = [None, causal, padding, causal, late, again, again]
    assert rounds(links, {"made": 3}) == [(), (causal, padding), (), (), (late,), (again,), ()]


# Whole models

LOWEST = torch.finfo(torch.float64).min


class Masked(Layer):
    """Scores, a mask, a softmax, as ``hide`` has it."""

    def __init__(self, hide, **buffers: Tensor):
        super().__init__(32, 2)
        self.hide = hide
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(width, -1)
        )
        weights = self.hide(self, query @ key.transpose(-2, -1) * 0.25, padding).softmax(-1)
        return x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Model(nn.Module):
    def __init__(self, hide, **buffers: Tensor):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.layers = nn.ModuleList([Masked(hide, **buffers) for _ in range(2)])
        self.head = nn.Linear(32, 256)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, padding)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def causal(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()


def keep_and_causal(layer, scores, keep):
    return scores + torch.zeros_like(scores).masked_fill(~(causal(scores) & keep[:, None, None, :]), LOWEST)


def padding_then_causal(layer, scores, keep):
    return scores.masked_fill(~keep[:, None, None, :], LOWEST).masked_fill(~causal(scores), LOWEST)


def hidden_either_way(layer, scores, keep):
    return torch.where(~causal(scores) | ~keep[:, None, None, :], LOWEST, scores)


def additive_padding(layer, scores, keep):
    return (scores + (1 - keep.double())[:, None, None, :] * LOWEST).where(causal(scores), LOWEST)


def stored(layer, scores, keep):
    length = scores.shape[-1]
    return scores.masked_fill(layer.triangle[:length, :length] == 0, float("-inf"))


def stored_and_padding(layer, scores, keep):
    length = scores.shape[-1]
    return scores.where(layer.triangle[:length, :length], LOWEST).where(keep[:, None, None, :], LOWEST)


def added(layer, scores, keep):
    length = scores.shape[-1]
    return scores + layer.triangle[:length, :length]


def packed_and_causal(layer, scores, ids):
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    return scores + torch.zeros_like(scores).masked_fill(~(same & causal(scores)), LOWEST)


def padding_times_causal(layer, scores, keep):
    seen = keep[:, None, None, :] * causal(scores).long()
    return scores + (1.0 - seen.to(scores.dtype)) * LOWEST


def padded(side: str) -> Tensor:
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    keep[1, slice(None, 9) if side == "left" else slice(-9, None)] = False
    return keep


def compiled(model: nn.Module):
    return torch.compile(model, backend="streambp", options={"chunk_size": 16})


def hints(step) -> list[str]:
    """What is said in a call about what it does not keep."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(w.message) for w in caught if issubclass(w.category, StreamHint)]


def assert_causal(report, condition: str) -> None:
    """All keys are proved to look back, as long as a condition holds in each call."""
    text = str(report)
    assert "causal, proved" in text and condition in text and "not proved" not in text


@pytest.mark.parametrize(
    "hide",
    [
        pytest.param(keep_and_causal, marks=pytest.mark.slow),
        pytest.param(padding_then_causal, marks=pytest.mark.slow),
        pytest.param(hidden_either_way, marks=pytest.mark.slow),
        pytest.param(additive_padding, marks=pytest.mark.slow),
    ],
)
def test_lowest_numbers_prune_until_a_row_sees_no_key(hide):
    model, ids = Model(hide).double(), ids_of(2, LENGTH)
    assert_causal(
        explain(model, ids, padded("right"), streambp_options={"chunk_size": 16}),
        "every row has a visible key up to its own position",
    )
    step = compiled(model)
    for side, told in (("right", False), ("left", True), ("right", False), ("left", False)):
        keep = padded(side)
        assert bool(hints(lambda: step(ids, keep))) == told
        assert (
            worst_error(gradients(model, lambda: step(ids, keep)), gradients(model, lambda: model(ids, keep)))
            < EXACT
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "hide, good, bad",
    [
        (packed_and_causal, torch.arange(2 * LENGTH).view(2, -1) // 20, None),
        (padding_times_causal, torch.ones(2, LENGTH, dtype=torch.long), padded("left").long()),
    ],
    ids=["packed", "multiplied"],
)
def test_packed_and_padded_sequences_prune_until_a_row_sees_no_key(hide, good, bad):
    model, ids = Model(hide).double(), ids_of(2, LENGTH)
    assert_causal(
        explain(model, ids, good, streambp_options={"chunk_size": 16}),
        "every row has a visible key up to its own position",
    )
    step = compiled(model)
    for given, told in [(good, False)] + ([] if bad is None else [(bad, True)]):
        assert bool(hints(lambda: step(ids, given))) == told
        truth = gradients(model, lambda: model(ids, given))
        assert worst_error(gradients(model, lambda: step(ids, given)), truth) < EXACT


def by_positions(layer, scores, keep):
    """As Hugging Face writes it: slices of positions and a look-up by them."""
    index = torch.arange(scores.shape[-1])
    row, key = index[None, None, :, None], index[None, None, None, :]
    batch = torch.arange(scores.shape[0])[:, None, None, None]
    return scores.masked_fill(~((key <= row) & keep[batch, key]), LOWEST)


def test_a_length_that_is_a_symbol_is_no_less_causal():
    model, ids, keep = Model(by_positions).double(), ids_of(2, LENGTH), padded("right")
    for given in (ids, keep):
        torch._dynamo.mark_dynamic(given, 1)
    report = str(explain(model, ids, keep, streambp_options={"chunk_size": 16}))
    assert "causal, proved" in report and "not proved" not in report


STORED = [
    (stored, torch.ones(80, 80).tril()),
    pytest.param(stored_and_padding, torch.ones(80, 80, dtype=torch.bool).tril(), marks=pytest.mark.slow),
    pytest.param(
        added,
        torch.zeros(80, 80, dtype=torch.float64).masked_fill(
            torch.ones(80, 80, dtype=torch.bool).triu(1), float("-inf")
        ),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("hide, triangle", STORED, ids=["stored", "stored_and_padding", "added"])
def test_a_stored_triangle_prunes_until_it_is_none(hide, triangle):
    model, ids, keep = Model(hide, triangle=triangle.clone()).double(), ids_of(2, LENGTH), padded("right")
    assert_causal(
        explain(model, ids, keep, streambp_options={"chunk_size": 16}),
        "shows each row only keys up to its own position",
    )
    step = compiled(model)
    writes = {
        None: lambda mask: None,
        (3, 40): lambda mask: mask.numpy().__setitem__((3, 40), triangle[0, 0].item()),
        (5, 50): lambda mask: mask.data.__setitem__((5, 50), triangle[0, 0]),
    }  # entries that are seen ahead, unseen by autograd
    for write, told in zip(writes.values(), (False, True, False)):
        for layer in model.layers:
            write(layer.triangle)
        assert bool(hints(lambda: step(ids, keep))) == told
        assert (
            worst_error(gradients(model, lambda: step(ids, keep)), gradients(model, lambda: model(ids, keep)))
            < EXACT
        )


@torch.no_grad()
def test_a_mask_that_is_learned_is_not_taken_for_causal():
    model = Model(added).double()
    for layer in model.layers:
        layer.triangle = nn.Parameter(torch.randn(LENGTH, LENGTH, dtype=torch.float64))
    ids, keep = ids_of(2, LENGTH), padded("right")
    step = compiled(model)
    assert hints(lambda: step(ids, keep)) == []
    torch.testing.assert_close(step(ids, keep), model(ids, keep), rtol=1e-12, atol=0)


def test_a_mask_given_to_fused_attention_is_looked_at():
    class Given(Masked):
        def forward(self, x, mask):
            batch, length, width = x.shape
            parts = (
                t.view(batch, length, self.heads, -1).transpose(1, 2)
                for t in self.qkv(self.norm1(x)).split(width, -1)
            )
            return x + self.out(
                F.scaled_dot_product_attention(*parts, attn_mask=mask)
                .transpose(1, 2)
                .reshape(batch, length, width)
            )

    model = Model(None).double()
    model.layers = nn.ModuleList([Given(None) for _ in range(2)]).double()
    ids, triangle = ids_of(2, LENGTH), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    ahead = triangle.clone()
    ahead[7, 30] = True
    step = compiled(model)
    for mask, told in (
        (triangle[None, None], False),
        (ahead[None, None], True),
        (triangle[None, None].clone(), False),
    ):
        assert bool(hints(lambda: step(ids, mask))) == told
        assert (
            worst_error(gradients(model, lambda: step(ids, mask)), gradients(model, lambda: model(ids, mask)))
            < EXACT
        )


@pytest.mark.quick
def test_a_call_asks_each_mask_once_and_waits_once(monkeypatch):
    """Layers share the answer for a padding; each stored triangle is read by itself; all answers are read
    together."""
    asked, waits = [], []
    monkeypatch.setattr(
        Guard, "answers", lambda guard, given, f=Guard.answers: asked.append(guard) or f(guard, given)
    )
    monkeypatch.setattr(
        "streambp_compile.regions.linked_regions.answered", lambda *a: waits.append(a) or answered(*a)
    )
    shared = Model(keep_and_causal).double()
    own = Model(stored_and_padding, triangle=torch.ones(80, 80, dtype=torch.bool).tril()).double()
    own.layers[1].triangle = own.layers[1].triangle.clone()
    ids, keep = ids_of(2, LENGTH), padded("right")
    for model, expected in ((shared, 1), (own, 2)):
        step = compiled(model)
        for call in (1, 2):
            step(ids, keep).backward()
            assert (len(asked), len(waits)) == (call * expected, call)
        asked.clear()
        waits.clear()


def test_positions_of_all_rows_alike_are_looked_at():
    class Flat(Masked):
        def forward(self, x, at):
            batch, length, width = x.shape
            parts = (
                t.view(batch, length, self.heads, -1).transpose(1, 2)
                for t in self.qkv(self.norm1(x)).split(width, -1)
            )
            mixed = F.scaled_dot_product_attention(*parts, attn_mask=at[:, None] >= at)
            return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    model = Model(None)
    model.layers = nn.ModuleList([Flat(None) for _ in range(2)])
    model, ids = model.double(), ids_of(2, LENGTH)
    step = compiled(model)
    for at, told in ((torch.arange(LENGTH) * 3 + 5, False), (torch.arange(LENGTH).flip(0), True)):
        assert bool(hints(lambda: step(ids, at))) == told
        assert (
            worst_error(gradients(model, lambda: step(ids, at)), gradients(model, lambda: model(ids, at)))
            < EXACT
        )


def test_what_no_call_can_change_is_no_condition():
    """Rows 0 to 3 see no key by a mask that comes from no input: nothing is pruned, and nothing is asked of
    calls."""

    def late_and_causal(layer, scores, keep):
        return scores.masked_fill(~(causal(scores) & (torch.arange(scores.shape[-1]) * 2 % 7 >= 3)), LOWEST)

    model, ids, keep = Model(late_and_causal).double(), ids_of(2, LENGTH), padded("right")
    step = compiled(model)
    assert hints(lambda: step(ids, keep)) == []
    assert (
        worst_error(gradients(model, lambda: step(ids, keep)), gradients(model, lambda: model(ids, keep)))
        < EXACT
    )


def packed(ids: Tensor, lengths) -> tuple[Tensor, Tensor]:
    """Position ids that restart, and which sequence each token is of."""
    at = torch.cat([torch.arange(n) for n in lengths]).expand(len(ids), -1)
    return at, (at == 0).cumsum(-1)


@pytest.mark.parametrize(
    "lengths, steps, kept, spelled",
    [
        ((20, 30, 11), 1, True, lambda s, t, q, k: (s == t) & (k <= q)),
        pytest.param(
            (LENGTH,), 1, True, lambda s, t, q, k: ~((s - t != 0) | (q < k)), marks=pytest.mark.slow
        ),
        pytest.param((20, 30, 11), -1, False, lambda s, t, q, k: (s == t) & (k <= q), marks=pytest.mark.slow),
    ],
)
def test_packed_sequences_prune_while_positions_increase(lengths, steps, kept, spelled):
    class Packed(Masked):
        def forward(self, x, given):
            at, of = given
            batch, length, width = x.shape
            parts = (
                t.view(batch, length, self.heads, -1).transpose(1, 2)
                for t in self.qkv(self.norm1(x)).split(width, -1)
            )
            mask = spelled(of[:, :, None], of[:, None, :], at[:, :, None], at[:, None, :])
            mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask[:, None])
            return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    model = Model(None)
    model.layers = nn.ModuleList([Packed(None) for _ in range(2)])
    model, ids = model.double(), ids_of(2, LENGTH)
    at, of = packed(ids, lengths)
    given = (at * steps, of)
    step = compiled(model)
    assert bool(hints(lambda: step(ids, given))) != kept
    assert (
        worst_error(gradients(model, lambda: step(ids, given)), gradients(model, lambda: model(ids, given)))
        < EXACT
    )
    report = str(explain(model, ids, given, streambp_options={"chunk_size": 16}))
    assert "causal, proved" in report and "increases from token to token" in report


@pytest.mark.parametrize(
    "same, upto, expected",
    [
        ([0, 0, 1, 1], [0, 1, 0, 1], True),
        ([0, 0, 1, 1], [0, 0, 0, 1], False),
        ([0, 1, 0, 1], [0, 0, 0, 0], False),
        ([2, 2, 2, 2], [5, 6, 7, 9], True),
    ],
)
def test_values_that_increase(same, upto, expected):
    """What is claimed then, that no later key agrees, is so in each of them."""
    s, p = torch.tensor([same]), torch.tensor([upto])
    given = [s[:, :, None], s[:, None, :]], [p[:, :, None], p[:, None, :]]
    assert positions_increase(*given) == expected
    agrees = (s[0, :, None] == s[0]) & (p[0] <= p[0, :, None])
    assert not expected or not agrees.triu(1).any()
    assert not positions_increase(given[0], [p[:, :, None], p[:, None, :] + 1])


@pytest.mark.parametrize(
    "documents, positions, expected",
    [
        (None, torch.tensor([5, 3, 2], dtype=torch.uint8), False),
        (None, torch.tensor([2, 3, 5], dtype=torch.uint8), True),
        (torch.tensor([False, True, False]), torch.tensor([5, 0, 1]), False),
        (None, torch.tensor([-(2**63), 0, 2**61]), False),
        (None, torch.tensor([-(2**61), 0, 2**62]), False),
        (None, torch.tensor([-(2**61), 0, 2**61]), True),
    ],
)
def test_positions_that_wrap_do_not_increase(documents, positions, expected):
    """Differences of unsigned and of boolean values wrap, and so do those of the largest integers."""
    equal = [] if documents is None else [documents[:, None], documents[None, :]]
    assert positions_increase(equal, [positions[:, None], positions[None, :]]) == expected
