"""The rule oracle: every row of the table against what its op does when it is run.

A signature is believed only after (a) its labels fit the values, (b) perturbing one entry moved no output row
that the ties do not allow, and (c) running on a piece gave a piece of the whole, and pieces of a sum added up
to it.
"""

import math
import random

import pytest
import torch
from graphs import single
from samples import SAMPLES, UNFILLED, Sample, cases, sample_of

from streambp_compile.passes.ir import EVERYWHERE, HERE, CannotStream, Contraction, Mark
from streambp_compile.passes.rules import TABLE, overload, rule_of
from streambp_compile.passes.token_propagation import reshaped

aten, prims = torch.ops.aten, torch.ops.prims


# Rules that tie less than their op does: what is written into stays in its place, but where the writes go,
# the index alone knows.
WRITERS = {
    "aten::scatter.value",
    "aten::scatter.src",
    "aten::scatter_add",
    "aten::scatter_reduce.two",
    "aten::index_put",
    "aten::_unsafe_index_put",
    "aten::index_add",
}
STREAMBP = torch.ops.streambp
COUNTED = (prims.iota.default, *(getattr(STREAMBP, n).default for n in ("uniform", "skewed", "regrouped")))
FILTERS = {"streambp::filtered", "streambp::filter_grad"}  # channels of a group stay together
FILTERS |= {"streambp::convolved", "streambp::convolved_grad", "streambp::convolved_weight_grad"}
AT_FULL_LENGTH = {"streambp::at_once", "streambp::by_block"}  # on one side of these, no rows are told apart
WIDER_THAN_NEEDED = {
    *WRITERS,
    *FILTERS,
    *AT_FULL_LENGTH,
    "aten::cat",  # a value joined to empty ones is still itself
}


def moved_rows(before, after, dim):
    """Which rows along a dimension changed in a bit."""
    same = (before == after) | (before.isnan() & after.isnan())
    others = [d for d in range(before.dim()) if d != dim]
    return (
        {k for k in range(before.shape[dim]) if not same.select(dim, k).all()}
        if others
        else {k for k in range(before.shape[0]) if not same[k]}
    )


def test_every_row_of_the_table_has_a_sample():
    assert {overload(n) for n in SAMPLES} >= set(TABLE)
    assert set(TABLE) >= {overload(n) for n in SAMPLES}


@pytest.mark.parametrize("name,number", cases())
@pytest.mark.quick
def test_labels_fit_the_values(name, number):
    """(a) One label for every dimension there is; dimensions of one label have one size."""
    sample = sample_of(name, number, 0)
    signature = sample.signature
    assert len(signature.operands) == len(sample.operands)
    assert len(signature.outputs) == len(sample.outputs)
    sizes = {}
    for value, labels in (*zip(sample.operands, signature.operands), *zip(sample.outputs, signature.outputs)):
        assert len(labels) == value.dim(), f"{len(labels)} labels for {tuple(value.shape)}"
        named = [label for label in labels if label is not None]
        assert len(set(named)) == len(named), f"a label twice in {labels}"
        for label, size in zip(labels, value.shape):
            if label is not None and label not in signature.offsets and not signature.reshape:
                assert sizes.setdefault(label, size) == size, f"{label!r} has sizes {sizes[label]} and {size}"
    for value, labels in zip(sample.operands, signature.operands):
        for label, size in zip(labels, value.shape):
            untied = label is None and size > 1 and not signature.reshape
            assert not untied or signature.contracts is Contraction.ALL, (
                "rows tied to nothing cannot be added up"
            )


@pytest.mark.parametrize("name,number", cases())
def test_perturbing_moves_no_other_rows(name, number):
    """(b) Entry j of an operand may move output row i only where the reach of i covers j."""
    seen, declared = {}, {}
    for seed in range(3):
        sample = sample_of(name, number, seed)
        signature = sample.signature
        if signature.reshape or sample.target in UNFILLED:
            continue
        for k, (value, labels) in enumerate(zip(sample.operands, signature.operands)):
            for dim, label in enumerate(labels):
                for row in range(value.shape[dim]):
                    after = sample.run(sample.perturbed(k, dim, row))
                    for before, now, out in zip(sample.outputs, after, signature.outputs):
                        for other, place in enumerate(out):
                            reach = allowed(signature, label, place)
                            if reach is None:
                                continue
                            offsets = signature.offsets.get(label, ())
                            shift = offsets[k] if k < len(offsets) and label == place else 0
                            for moved in moved_rows(before, now, other):
                                distance = row - moved - shift
                                if label == signature.rows and place == signature.keys:
                                    distance = (
                                        -distance
                                    )  # query i moves key j's gradient: the key's distance from the query
                                assert reach.lo <= distance <= reach.hi, (
                                    f"operand {k} dim {dim} row {row} moved output row {moved}: outside "
                                    f"{reach}"
                                )
                                seen.setdefault((label, place), set()).add(distance)
                                declared[label, place] = (reach, value.shape[dim])
    for (label, place), distances in seen.items():
        reach, size = declared[label, place]
        lo, hi = max(reach.lo, 1 - size), min(reach.hi, size - 1)
        assert (min(distances), max(distances)) == (lo, hi), (
            f"reach {reach} of {label!r} is wider than what moved: {sorted(distances)}"
        )


def allowed(signature, label, place):
    """The distances (operand row minus output row) over which a label may move another, or None if nothing is
    claimed."""
    if label is None or place is None:
        return None
    if label == place:
        if label == signature.keys and signature.rows is None:
            return EVERYWHERE  # normalised along it
        return signature.reach.get(label, HERE) if signature.rows is None else HERE
    if signature.rows is not None and {label, place} == {signature.rows, signature.keys}:
        return signature.reach[signature.keys]
    return None


@pytest.mark.parametrize("name,number", cases())
def test_pieces_are_pieces_of_the_whole(name, number):
    """(c) A tie of zero reach: the op on a slice is a slice of the op. A sum: pieces add up."""
    sample = sample_of(name, number, 0)
    signature = sample.signature
    if (
        signature.reshape or sample.target in UNFILLED or sample.target in COUNTED
    ):  # counted from the first token
        return
    labels = {label for ls in (*signature.operands, *signature.outputs) for label in ls if label is not None}
    for label in sorted(labels, key=str):
        places = [ls.index(label) if label in ls else None for ls in signature.operands]
        outs = [ls.index(label) if label in ls else None for ls in signature.outputs]
        if (
            label in (signature.rows, signature.keys)
            or label in signature.reach
            or label in signature.offsets
            or label in signature.placed  # counted from the first row: a chunk body is to
        ):
            continue
        if (
            signature.rows is not None and label != "b"
        ):  # the kernel wants all of a head; heads in groups meet keys by their number
            continue
        if any(o is not None for o in outs):
            assert_sliced(sample, label, places, outs)
        elif signature.contracts is Contraction.SUM and signature.rows is None:
            assert_summed(sample, label, places)


def cuts(size):
    return [(0, size // 2), (size // 2, size)] if size > 1 else [(0, size)]


def piece(values, places, start, stop):
    return [v if d is None else v.narrow(d, start, stop - start) for v, d in zip(values, places)]


def assert_same(a, b, where):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True, msg=lambda m: f"{where}: {m}")


def assert_sliced(sample, label, places, outs):
    size = next(v.shape[d] for v, d in zip(sample.outputs, outs) if d is not None)
    for start, stop in cuts(size):
        wanted = piece(sample.outputs, outs, start, stop)
        got = sample.run(piece(sample.operands, places, start, stop), shape=wanted[0].shape)
        for a, b, d in zip(got, wanted, outs):
            if d is not None:
                assert_same(a, b, f"{label!r} [{start}:{stop}]")


def assert_summed(sample, label, places):
    size = next(v.shape[d] for v, d in zip(sample.operands, places) if d is not None)
    parts = [sample.run(piece(sample.operands, places, *cut)) for cut in cuts(size)]
    for whole, *pieces in zip(sample.outputs, *parts):
        assert_same(sum(pieces), whole, f"sum over {label!r}")


@pytest.mark.parametrize("name", list(SAMPLES))
def test_ties_are_not_missed(name):
    """A dimension whose rows never mix, but that a rule leaves untied, is memory given away: none is, but
    those listed."""
    found = {miss for number in range(len(SAMPLES[name])) for miss in missed_ties(name, number)}
    assert bool(found) == (name in WIDER_THAN_NEEDED), (
        f"(operand, dim, output, dim) that always move together: {sorted(found)}"
    )


def missed_ties(name, number):
    """Pairs of dimensions that always move together, row for row, though their labels differ."""
    together = None
    for seed in range(2):
        sample = sample_of(name, number, seed)
        signature = sample.signature
        if signature.reshape or sample.target in UNFILLED or signature.rows is not None:
            return set()
        now = set()
        for k, (value, labels) in enumerate(zip(sample.operands, signature.operands)):
            for dim, label in enumerate(labels):
                if value.shape[dim] < 2:
                    continue
                moves = [sample.run(sample.perturbed(k, dim, row)) for row in range(value.shape[dim])]
                for o, (before, out) in enumerate(zip(sample.outputs, signature.outputs)):
                    for other, place in enumerate(out):
                        if before.shape[other] != value.shape[dim] or label is not None and label == place:
                            continue
                        if all(
                            moved_rows(before, after[o], other) == {row} for row, after in enumerate(moves)
                        ):
                            now.add((k, dim, o, other))
        together = now if together is None else together & now
    return together


# Views that merge and split dimensions: their ties come from the sizes


@pytest.mark.parametrize(
    "old,new,dim,want",
    [
        ((2, 6, 4), (12, 4), 1, Mark(0, 2, 1)),
        ((2, 6, 4), (2, 24), 1, Mark(1, 1, 4)),
        ((2, 6, 4), (48,), 1, Mark(0, 2, 4)),
        ((2, 6, 4), (2, 6, 2, 2), 1, Mark(1)),
        ((2, 6, 4), (2, 1, 6, 4), 1, Mark(2)),
        ((2, 6, 4), (2, 3, 2, 4), 1, None),
        ((6, 6), (36,), 0, Mark(0, 1, 6)),
        ((6, 6), (36,), 1, Mark(0, 6, 1)),
        ((6, 6, 6), (6, 36), 1, Mark(1, 1, 6)),
        ((6, 6, 6), (36, 6), 1, Mark(0, 6, 1)),
        ((2, 6), (2, 6, 1), 1, Mark(1)),
        ((4, 3), (6, 2), 0, None),
    ],
)
@pytest.mark.quick
def test_a_reshape_carries_the_mark(old, new, dim, want):
    assert reshaped(Mark(dim), old, new) == want


def test_a_dimension_too_short_for_a_row_of_each_token_has_no_tokens():
    assert reshaped(Mark(0, outer=4), (2, 3), (6,)) is None
    assert reshaped(Mark(1, inner=8), (2, 4), (8,)) is None


@pytest.mark.parametrize("seed", range(60))
def test_a_reshape_moves_the_rows_its_mark_says(seed):
    """Random shapes of few primes (so that sizes coincide), reshaped and back: row t stays row t."""
    draw = random.Random(seed)
    old = [draw.choice((1, 2, 2, 3, 4, 6)) for _ in range(draw.randint(1, 4))]
    new = [1]
    for prime in sorted(factors(math.prod(old)), key=lambda _: draw.random()):
        if draw.random() < 0.5:
            new.insert(draw.randint(0, len(new)), prime)
        else:
            new[draw.randrange(len(new))] *= prime
    value = torch.arange(math.prod(old)).reshape(old)
    for dim, size in enumerate(old):
        mark = reshaped(Mark(dim), tuple(old), tuple(new))
        if mark is None or size == 1:
            continue
        assert new[mark.dim] == mark.outer * size * mark.inner
        split = value.reshape(new).unflatten(mark.dim, (mark.outer, size, mark.inner))
        for row in range(size):
            assert set(split.select(mark.dim + 1, row).flatten().tolist()) == set(
                value.select(dim, row).flatten().tolist()
            )
        back = reshaped(mark, tuple(new), tuple(old))
        assert back is None or back == Mark(dim)


def factors(number):
    found, prime = [], 2
    while number > 1:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return found


# Ops known by their tag


def pointwise_ops():
    found = []
    for packet in dir(aten):
        if not isinstance(getattr(aten, packet), torch._ops.OpOverloadPacket):
            continue
        for variant in getattr(aten, packet).overloads():
            op = getattr(getattr(aten, packet), variant)
            makes = any("Tensor" in str(r.type) for r in op._schema.returns)
            if torch.Tag.pointwise in op.tags and makes and not op._schema.is_mutable and op not in TABLE:
                found.append(pytest.param(op, id=str(op).removeprefix("aten.")))
    return found


INTEGERS = ("shift", "bitwise", "xor", "gcd", "lcm")
BOUNDED = ("clamp", "clip")


def drawn(op):
    """Arguments for a pointwise op from its schema: tensors that broadcast, twos for scalars, defaults for
    the rest."""
    shapes = iter(([3, 1, 5], [4, 5], [3, 4, 1]))
    integers, bounded = (any(word in str(op) for word in words) for words in (INTEGERS, BOUNDED))
    lowest = 3 if "mvlgamma" in str(op) else 0
    args, kwargs, bounds = [], {}, []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor" or bounded and kind == "Optional[Tensor]":
            shape = next(shapes)
            value = (
                torch.randint(1, 4, shape)
                if integers
                else torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1 + lowest
            )
            if argument.name == "mask":
                value = value > 0.5
            args.append(value)
            bounds.append(4 if integers else None)
        elif argument.has_default_value() and not bounded:
            continue
        elif argument.kwarg_only:
            kwargs[argument.name] = "trunc" if argument.name == "rounding_mode" else 2
        else:
            args.append(2)
    return tuple(args), kwargs, bounds


@pytest.mark.parametrize("op", pointwise_ops())
def test_an_op_tagged_pointwise_is(op):
    sample = Sample(op, *drawn(op))
    signature = sample.signature
    assert len(signature.outputs) == len(sample.outputs)
    for k, (value, labels) in enumerate(zip(sample.operands, signature.operands)):
        for dim, label in enumerate(labels):
            for row in range(value.shape[dim]):
                for before, after, out in zip(
                    sample.outputs, sample.run(sample.perturbed(k, dim, row)), signature.outputs
                ):
                    if label is not None:
                        assert moved_rows(before, after, out.index(label)) <= {row}
    for dim in range(3):
        places = [ls.index(dim) if dim in ls else None for ls in signature.operands]
        assert_sliced(sample, dim, places, [dim] * len(sample.outputs))


def test_as_strided_refuses():
    _, node = single(aten.as_strided.default, (torch.randn(6), [2, 3], [3, 1]), {})
    with pytest.raises(CannotStream, match="as_strided"):
        rule_of(node).signature(node)


def test_an_op_without_a_rule_is_refused_by_name():
    _, node = single(aten.unfold.default, (torch.randn(6), 0, 2, 1), {})
    with pytest.raises(CannotStream, match="aten.unfold.default"):
        rule_of(node)
