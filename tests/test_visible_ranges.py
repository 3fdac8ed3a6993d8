"""Attention by ranges of keys: which masks are read so, in which calls, and that all is as with the mask."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from models import gradients, ids_of, worst_error
from selection import representatives
from test_mask_guards import Masked, compiled, hints
from torch import Tensor, nn

from streambp_compile import explain
from streambp_compile.passes.ir import DocumentMask, KeyMask, VisibleRanges
from streambp_compile.runtime.visible_keys import ranges_of

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10
LENGTH = 61


def rows_of(mask: Tensor) -> Tensor:
    """The first key of each row and the one behind its last; two zeros where it sees none."""
    keys, some = mask.shape[-1], mask.any(-1)
    first = mask.int().argmax(-1)
    stop = keys - mask.flip(-1).int().argmax(-1)
    return torch.stack((first.where(some, 0), stop.where(some, 0)), -1)


def are_ranges(mask: Tensor) -> bool:
    first, stop = rows_of(mask).unbind(-1)
    return bool((mask.sum(-1) == stop - first).all())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.quick
def test_ranges_are_those_of_the_mask(ahead):
    """Against the whole mask, for every padding and every division of five tokens into documents."""
    told = set()
    causal = torch.ones(5, 5, dtype=torch.bool) if ahead else torch.ones(5, 5, dtype=torch.bool).tril()
    for keep, ids in itertools.product(itertools.product((True, False), repeat=5), sorted(documents(5))):
        keep, ids = torch.tensor([keep]), torch.tensor([ids])
        for kinds in ("keep", "ids", "keep ids"):
            masks, values, whole = [], [], causal[None]
            if "ids" in kinds:
                masks.append(DocumentMask(equal=((None, None),), key_masks=()))
                values += [ids[:, :, None], ids[:, None]]
                whole = whole & (ids[:, :, None] == ids[:, None])
            if "keep" in kinds:
                masks.append(KeyMask(None, None, 1, False))
                values.append(keep)
                whole = whole & keep[:, None]
            for all_rows in (False, True):
                holds, ranges = ranges_of(VisibleRanges(tuple(masks), ahead, all_rows), values)
                everywhere = bool(whole.any(-1).all()) or not all_rows
                consecutive = "ids" not in kinds or are_ranges(ids[:, :, None] == ids[:, None])
                assert bool(holds) == (are_ranges(whole) and everywhere and consecutive)
                if holds:
                    assert torch.equal(ranges.expand_as(rows_of(whole)), rows_of(whole))
                told.add(bool(holds))
    assert told == {True, False}


def documents(tokens: int) -> set[tuple[int, ...]]:
    """Ids of documents, of which some come back."""
    return {
        *itertools.product(range(2), repeat=tokens),
        tuple(range(tokens)),
        (0, 0, 1, 2, 2),
        (2, 1, 1, 0, 2),
    }


def test_positions_that_fall_inside_a_document_are_no_ranges():
    masks = (DocumentMask(equal=((None, None),), ordered=((None, None),), key_masks=()),)
    ids = torch.tensor([[0, 0, 0, 1, 1]])
    for at, expected in ((torch.tensor([[0, 1, 2, 0, 1]]), True), (torch.tensor([[0, 2, 1, 0, 1]]), False)):
        values = [ids[:, :, None], ids[:, None], at[:, :, None], at[:, None]]
        assert bool(ranges_of(VisibleRanges(masks, False, False), values)[0]) is expected


def test_numbers_that_weigh_keys_are_no_ranges():
    mask = (KeyMask(None, None, 1, None),)
    for number, expected in ((0.0, True), (0.5, False)):
        added = torch.tensor([[number, 0.0, -3e38]])
        assert bool(ranges_of(VisibleRanges(mask, False, False), [added])[0]) is expected


# Models


def right(keep: Tensor) -> Tensor:
    return keep[:, None, None] & causal(keep)


def numbers(keep: Tensor) -> Tensor:
    shown = torch.zeros((), dtype=torch.float64)
    return torch.where(right(keep), shown, torch.finfo(torch.float64).min)


def both_ways(keep: Tensor) -> Tensor:
    return keep[:, None, None].expand(-1, 1, keep.shape[1], -1)


def packed(keep: Tensor) -> Tensor:
    ids = (~keep).cumsum(-1)
    return (ids[:, :, None] == ids[:, None])[:, None] & causal(keep)


def apart(keep: Tensor) -> Tensor:
    ids = (~keep).cumsum(-1)
    return (ids[:, :, None] == ids[:, None])[:, None]


def causal(keep: Tensor) -> Tensor:
    return torch.ones(2 * [keep.shape[1]], dtype=torch.bool).tril()


class Attends(Masked):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        masks = self.hide if isinstance(self.hide, list) else [self.hide]
        mixed = sum(F.scaled_dot_product_attention(q, k, v, mask(keep)) for mask in masks)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
        self.layers = nn.ModuleList([Attends(mask) for _ in range(2)])

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, keep)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def kept(length: int, *hidden: slice) -> Tensor:
    """Two sequences, of which the second has some places hidden."""
    keep = torch.ones(2, length, dtype=torch.bool)
    for part in hidden:
        keep[1, part] = False
    return keep


CASES = {
    "padded behind": (right, slice(-9, None)),
    "padded before": (right, slice(0, 9)),
    "at both ends": (right, slice(0, 5), slice(-9, None)),
    "nothing hidden": (right,),
    "lowest numbers": (numbers, slice(-9, None)),
    "encoder": (both_ways, slice(-9, None)),
    "packed": (packed, slice(7, 8), slice(30, 31), slice(40, 42)),
    "documents apart": (apart, slice(7, 8), slice(30, 31), slice(40, 42)),
}
CHOSEN = {"padded behind", "lowest numbers", "encoder", "packed"}


@pytest.mark.long
@pytest.mark.parametrize("case", representatives(CASES, CHOSEN))
def test_gradients_are_eager_ones_and_no_body_has_a_mask(case):
    mask, *hidden = CASES[case]
    torch.manual_seed(0)
    model = Model(mask).double()
    step = compiled(model)
    for length in (LENGTH, 80, 45):
        batch = ids_of(2, length), kept(length, *hidden)
        truth, ours = (gradients(model, lambda f=f, b=batch: f(*b)) for f in (model, step))
        assert worst_error(ours, truth) < EXACT
    report = explain(model, ids_of(2, LENGTH), kept(LENGTH, *hidden), streambp_options=dict(chunk_size=16))
    calls = list(attention_of(report))
    assert calls and all("ranges" in n.kwargs and n.args[3] is None for n in calls)
    assert "each row sees consecutive keys" in str(report)


def attention_of(report):
    for region in report.regions:
        for schedule in filter(None, (region.forward, region.backward)):
            for body in schedule.bodies:
                yield from body.graph.graph.find_nodes(
                    op="call_function", target=torch.ops.streambp.attention.default
                )


def test_a_call_with_a_hole_reads_the_mask():
    torch.manual_seed(0)
    model = Model(right).double()
    step = compiled(model)
    for hidden, told in ((slice(-9, None), False), (slice(20, 25), True), (slice(-9, None), False)):
        batch = ids_of(2, LENGTH), kept(LENGTH, hidden)
        assert bool(hints(lambda b=batch: step(*b))) == told
        truth, ours = (gradients(model, lambda f=f, b=batch: f(*b)) for f in (model, step))
        assert worst_error(ours, truth) < EXACT


@pytest.mark.long
def test_two_masks_of_one_layer():
    torch.manual_seed(0)
    model, batch = Model([right, packed]).double(), (ids_of(2, LENGTH), kept(LENGTH, slice(-9, None)))
    step = compiled(model)
    truth, ours = (gradients(model, lambda f=f: f(*batch)) for f in (model, step))
    assert worst_error(ours, truth) < EXACT


def test_ranges_stay_on_the_host_when_layer_inputs_are_offloaded(monkeypatch):
    from streambp_compile.runtime import offload

    sent = []
    monkeypatch.setattr(offload, "SMALLEST", 0)
    put = offload.MappedFile.put
    monkeypatch.setattr(offload.MappedFile, "put", lambda store, v: sent.append(v.dtype) or put(store, v))
    torch.manual_seed(0)
    model, batch = Model(right).double(), (ids_of(2, LENGTH), kept(LENGTH, slice(-9, None)))
    step = torch.compile(model, backend="streambp", options=dict(chunk_size=16, offload=True))
    truth, ours = (gradients(model, lambda f=f: f(*batch)) for f in (model, step))
    assert worst_error(ours, truth) < EXACT
    assert torch.float64 in sent and torch.int64 not in sent


def test_evaluation_and_inference():
    torch.manual_seed(0)
    model, batch = Model(right).double().eval(), (ids_of(2, LENGTH), kept(LENGTH, slice(-9, None)))
    step = compiled(model)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            torch.testing.assert_close(step(*batch), model(*batch), rtol=1e-12, atol=0)
