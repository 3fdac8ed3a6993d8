"""What a tensor held: every change of its bits is seen, however it came about."""

import pytest
import torch

from streambp_compile.lazy.fingerprints import TensorContents, fingerprint

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]


def filled(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(37, 15) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bit_that_changed(dtype):
    """Odd numbers of entries, too: not all bytes are of whole words."""
    tensor = filled(dtype)
    before, contents = fingerprint(tensor), TensorContents.of([tensor])
    contents.check()
    data = tensor.detach().view(torch.uint8).flatten()
    for place in (0, 1, len(data) // 2, len(data) - 1):
        for bit in (1, 128) if dtype is not torch.bool else (1,):
            data[place] ^= bit
            assert fingerprint(tensor) != before
            data[place] ^= bit
    assert fingerprint(tensor) == before


CHANGES = {
    "negated": torch.Tensor.neg_,
    "rows swapped": lambda t: t.copy_(t.flip(0)),
    "zeroed": torch.Tensor.zero_,
    "columns swapped": lambda t: t.copy_(t[:, torch.randperm(64)]),
    "half negated": lambda t: t[::2].neg_(),
    "by one bit": lambda t: t.mul_(1 + 2**-52),
}


@pytest.mark.parametrize("how", CHANGES)
def test_changes_of_the_whole(how):
    tensor = torch.randn(64, 64, dtype=torch.float64)
    contents = TensorContents.of([tensor])
    CHANGES[how](tensor.data)
    with pytest.raises(RuntimeError, match="before optimizer.step"):
        contents.check()


def test_changes_that_a_version_counter_or_the_memory_shows():
    tensor, other = torch.randn(3), torch.randn(5)
    contents = TensorContents.of([tensor, other], [])
    tensor.mul_(1)
    with pytest.raises(RuntimeError, match=r"shape \(3,\).* changed in place"):
        contents.check()
    contents = TensorContents.of([tensor, other], [])
    other.data = other.data.clone()
    with pytest.raises(RuntimeError, match=r"shape \(5,\).* other memory"):
        contents.check()


def test_parts_of_memory():
    """Views, transposed and strided; nothing but themselves counts."""
    base = torch.randn(30, 40)
    views = base.T, base[:, 3:11], base[5:9], base[::3].T, base[0:0], base[2, 3], base.expand(2, 30, 40)
    for view in views:
        assert fingerprint(view) == fingerprint(view)
        TensorContents.of([view]).check()
    contents = TensorContents.of([base[:, :7]])
    base.data[3, 9] = 0
    contents.check()
    with torch.inference_mode():
        tensor = torch.ones(3)
    TensorContents.of([tensor]).check()


def test_random_numbers_of_the_user_stay_as_they_were():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    fingerprint(torch.ones(100000))
    assert torch.equal(torch.rand(3), expected)
