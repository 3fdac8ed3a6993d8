"""Ranges of keys in place of masks: the same attention, and no keys read that no row sees."""

import pytest
import torch

from streambp_compile.passes.kernels.attention.ranges import Run, hides_nothing, runs

streambp = torch.ops.streambp


def packed(*documents: int) -> list[tuple[int, int]]:
    """Rows of causal documents, one behind the other."""
    starts = [sum(documents[:i]) for i in range(len(documents))]
    return [(start, t + 1) for start, n in zip(starts, documents) for t in range(start, start + n)]


def padded_behind(tokens: int, padding: int) -> list[tuple[int, int]]:
    """Rows of one causal sequence; those of the padding see all its tokens."""
    return [(0, t + 1) for t in range(tokens)] + [(0, tokens)] * padding


def padded_before(padding: int, tokens: int) -> list[tuple[int, int]]:
    return [(0, 0)] * padding + [(padding, t + 1) for t in range(padding, padding + tokens)]


def apart(*documents: int) -> list[tuple[int, int]]:
    """Rows of documents that see all of their own."""
    starts = [sum(documents[:i]) for i in range(len(documents))]
    return [(start, start + n) for start, n in zip(starts, documents) for _ in range(n)]


CAUSAL = [packed(37, 1, 2, 200), padded_behind(150, 90), padded_before(90, 150), packed(240), packed(3, 237)]
KINDS = {"causal": CAUSAL, "both ways": [apart(37, 1, 2, 200), apart(150, 90), [(0, 150)] * 240]}


@pytest.mark.parametrize("kernel", ["flash_cpu", "composed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 60, 161])
def test_ranges_attend_like_the_mask_that_they_stand_for(kind, start, kernel):
    make, ranges = torch.Generator().manual_seed(0), torch.tensor(KINDS[kind])
    causal, (batch, length) = kind == "causal", ranges.shape[:2]
    keys = torch.arange(length)
    mask = ((keys >= ranges[..., :1]) & (keys < ranges[..., 1:]))[:, None]
    q, grad = (torch.randn(batch, 4, length, 8, generator=make).double()[:, :, start:] for _ in range(2))
    k, v = (torch.randn(batch, 2, length, 8, generator=make).double() for _ in range(2))
    answers = []
    slots = torch.stack((torch.zeros_like(ranges), ranges))[:, :, start:]
    for seen, own in ((mask[:, :, start:], None), (None, slots)):
        out, lse = streambp.attention(q, k, v, seen, causal, 0.3, start, own, 1, kernel, kernel)
        sums = [torch.zeros_like(t) for t in (k, v)]
        options = (seen, causal, 0.3, start, *sums, own, 1, kernel, kernel)
        answers.append([out, lse, streambp.attention_backward_(grad, q, k, v, out, lse, *options), *sums])
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-12, atol=1e-12)


def test_rows_that_follow_one_another_are_one_run():
    found = list(runs(torch.tensor([*packed(3, 1), *padded_behind(2, 2), (0, 0), (0, 0)])))
    assert found == [
        Run(slice(0, 3), 0, 1, True),
        Run(slice(3, 4), 3, 4, False),
        Run(slice(4, 6), 0, 1, True),
        Run(slice(6, 8), 0, 2, False),
        Run(slice(8, 10), 0, 0, False),
    ]
    assert [run.keys for run in found] == [3, 1, 2, 2, 0]


def test_ranges_of_all_keys_take_the_usual_calls():
    assert hides_nothing(torch.tensor([packed(6)])[:, 2:], 6, causal=True, start=2)
    assert not hides_nothing(torch.tensor([packed(6)])[:, 2:], 6, causal=True, start=1)
    assert hides_nothing(torch.tensor([[(0, 6)] * 4]), 6, causal=False, start=2)
    assert not hides_nothing(torch.tensor([[(0, 5)] * 4]), 6, causal=False, start=2)


def test_no_key_outside_a_document_is_read():
    q, k, v = (torch.randn(1, 1, 8, 4).double() for _ in range(3))
    k[:, :, :3], v[:, :, :3] = float("nan"), float("nan")
    ranges = torch.tensor([packed(3, 5)])[None, :, 3:]
    out, _ = streambp.attention(q[:, :, 3:], k, v, None, True, 1.0, 3, ranges)
    assert out.isfinite().all()
