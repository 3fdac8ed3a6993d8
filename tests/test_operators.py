"""The operators of ``passes/kernels/operators.py`` against plain torch: attention in chunks against whole
SDPA, and sums in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory import peak
from streambp_compile.passes.kernels import attention, grouped, operators, products  # noqa: F401  (define torch.ops.streambp)

streambp = torch.ops.streambp
B, HQ, T, D = 2, 4, 37, 16
LONG = 130  # in half precision, enough entries that errors are averages
NAMES = ("out", "dq", "dk", "dv")


def operands(kv_heads: int, dtype=torch.float64, length: int = T) -> tuple[Tensor, ...]:
    """Query, key, value, and the gradient of the output."""
    shapes = [(B, heads, length, D) for heads in (HQ, kv_heads, kv_heads, HQ)]
    return tuple(torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes)


def whole(q, k, v, grad, mask, causal, scale) -> tuple[Tensor, ...]:
    """Output and gradients of SDPA over all tokens at once."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))


def chunked(q, k, v, grad, mask, causal, scale, chunk) -> tuple[Tensor, ...]:
    """The same in chunks of queries; keys and values gather their gradients in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    outs, dqs = [], []
    for start in range(0, q.shape[2], chunk):
        rows = slice(start, min(start + chunk, q.shape[2]))
        part = None if mask is None else mask[:, :, rows]
        out, lse = streambp.attention(q[:, :, rows], k, v, part, causal, scale, start)
        assert lse.shape == out.shape[:3]
        outs.append(out)
    for start in reversed(range(0, q.shape[2], chunk)):
        rows = slice(start, min(start + chunk, q.shape[2]))
        part = None if mask is None else mask[:, :, rows]
        out, lse = streambp.attention(q[:, :, rows], k, v, part, causal, scale, start)
        dqs.append(
            streambp.attention_backward_(
                grad[:, :, rows], q[:, :, rows], k, v, out, lse, part, causal, scale, start, dk, dv
            )
        )
    return torch.cat(outs, 2), torch.cat(dqs[::-1], 2), dk.to(k.dtype), dv.to(v.dtype)


def mask_of(kind: str, dtype=torch.float64, length: int = T) -> Tensor | None:
    if kind == "causal":
        return None
    full = torch.randn(B, 1 if "shared" in kind else HQ, length, length, dtype=torch.float64)
    if "causal" in kind:
        full = full.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    return full.to(dtype)


def error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


KINDS = ("causal", "shared bias", "causal bias per head")


@pytest.mark.parametrize("chunk", [1, 5, 16, T])
@pytest.mark.parametrize("kv_heads", [HQ, 2, 1])
@pytest.mark.parametrize("kind", [*KINDS, "nothing"])
def test_attention_in_chunks(chunk, kv_heads, kind):
    tensors, mask = operands(kv_heads), None if kind == "nothing" else mask_of(kind)
    truth = whole(*tensors, mask, kind == "causal", 0.3)
    for name, a, b in zip(NAMES, chunked(*tensors, mask, kind == "causal", 0.3, chunk), truth):
        assert a.shape == b.shape and error(a, b) < 1e-12, name


@pytest.mark.parametrize("chunk", [1, 5, 16, LONG])
@pytest.mark.parametrize("kv_heads", [HQ, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_in_bfloat16_is_as_good_as_the_kernel(chunk, kv_heads, kind):
    tensors, mask = operands(kv_heads, torch.bfloat16, LONG), mask_of(kind, torch.bfloat16, LONG)
    causal = kind == "causal"
    truth = whole(*(t.double() for t in tensors), None if mask is None else mask.double(), causal, 0.3)
    kernel = whole(*tensors, mask, causal, 0.3)
    ours = chunked(*tensors, mask, causal, 0.3, chunk)
    ratios = {name: error(a, c) / error(b, c) for name, a, b, c in zip(NAMES, ours, kernel, truth)}
    assert max(ratios.values()) <= 1.05, ratios


def test_attention_backward_at_once():
    q, k, v, grad = operands(2)
    out, lse = streambp.attention(q, k, v, None, True, 0.3, 0)
    for a, b in zip(
        streambp.attention_backward(grad, q, k, v, out, lse, None, True, 0.3),
        whole(q, k, v, grad, None, True, 0.3)[1:],
    ):
        assert a.dtype == b.dtype and error(a, b) < 1e-12


def test_attention_of_meta_tensors_has_the_layout_of_real_ones():
    q, k, v, _ = operands(2)
    real = streambp.attention(q, k, v, None, True, 0.3, 0)
    fake = streambp.attention(*(t.to("meta") for t in (q, k, v)), None, True, 0.3, 0)
    for a, b in zip(real, fake):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(
    "dtype, total",
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_add_product(dtype, total, batch, monkeypatch):
    monkeypatch.setattr(products, "BLOCK", 3)
    left, right = torch.randn(*batch, 5, 33).to(dtype), torch.randn(*batch, 33, 7).to(dtype)
    start = torch.randn(*batch, 5, 7, dtype=total)
    result = start.clone()
    streambp.add_product_(left, right, result)
    expected = start.double() + left.double() @ right.double()
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_product_of_half_precision_converts_a_block_of_its_operands():
    size, rows = 2 * products.BLOCK, 64
    left, right = torch.randn(size, rows).bfloat16(), torch.randn(rows, size).bfloat16()
    total = torch.zeros(size, size)
    assert peak(lambda: streambp.add_product_(left, right, total)) == 2 * products.BLOCK * rows * 4
    torch.testing.assert_close(total, left.float() @ right.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (7,), (6, 5), (0, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scaling_rounds_once(shape, dtype, monkeypatch):
    monkeypatch.setattr(products, "BLOCK", 2)
    value = torch.randn(shape).to(dtype)
    factor = torch.tensor(1 / 3)
    expected = (value.double() * factor.double()).to(dtype)
    products.scale_(value, factor)
    assert torch.equal(value, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_grouped_products(dtype):
    """Groups without rows, and rows without a group."""
    rows, weight = torch.randn(20, 4).to(dtype), torch.randn(5, 4, 6).to(dtype)
    groups = torch.tensor([0, 3, 5, 1] * 5)
    padded = torch.cat([weight, weight.new_zeros(1, 4, 6)]).double()
    made = streambp.grouped_mm(rows, weight, groups)
    expected = torch.einsum("rk,rkn->rn", rows.double(), padded[groups])
    torch.testing.assert_close(made.double(), expected, rtol=1e-2 if dtype is BF16 else 1e-12, atol=1e-2)
    start = torch.randn(5, 4, 6, dtype=torch.promote_types(dtype, torch.float32))
    total = start.clone()
    streambp.add_grouped_outer_(rows, made, groups, total)
    of_group = torch.nn.functional.one_hot(groups, 6)[:, :5].double()
    expected = start.double() + torch.einsum("rg,rk,rn->gkn", of_group, rows.double(), made.double())
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(total[[2, 4]], start[[2, 4]])


BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64


@pytest.mark.parametrize(
    "capability, dtype, width, name",
    [
        ((9, 0), BF16, 16, "torch"),
        ((10, 0), BF16, 16, "torch"),
        ((8, 0), BF16, 16, "triton"),
        ((12, 0), BF16, 16, "triton"),
        ((9, 0), F16, 16, "triton"),
        ((9, 0), BF16, 12, "triton"),
        ((9, 0), F64, 16, "loop"),
    ],
)
def test_the_kernel_of_a_grouped_product(capability, dtype, width, name, monkeypatch):
    monkeypatch.setattr(grouped, "on_cuda", lambda value: True)
    monkeypatch.setattr(grouped, "has_triton", lambda: True)
    monkeypatch.setattr(grouped, "capability", lambda device: capability)
    rows, weight = torch.empty(20, 8, dtype=dtype), torch.empty(5, 8, width, dtype=dtype)
    assert grouped.kernel_for(grouped.PRODUCTS, rows, weight).name == name
    assert grouped.kernel_for(grouped.SUMS, rows, rows).name == ("loop" if dtype is F64 else "triton")


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_add_rows(padding, dtype):
    index, rows = torch.randint(0, 6, (2, 20)), torch.randn(2, 20, 4).to(dtype)
    start = torch.randn(6, 4, dtype=torch.promote_types(dtype, torch.float32))
    result, expected, before = start.clone(), start.clone(), rows.clone()
    streambp.add_rows_(index, rows, padding, result)
    for i, row in zip(index.flatten().tolist(), rows.flatten(0, 1)):
        if i != padding:
            expected[i] += row
    torch.testing.assert_close(result, expected)
    assert torch.equal(rows, before)
    if padding >= 0:
        assert torch.equal(result[padding], start[padding])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_a_window_slides(ahead, count):
    state, rows = torch.randn(2, 4, 3), torch.randn(2, count, 3)
    expected = torch.cat((rows, state), 1)[:, :4] if ahead else torch.cat((state, rows), 1)[:, -4:]
    streambp.slide_rows_(rows, 1, ahead, state)
    assert torch.equal(state, expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_are_copied_and_written(dim):
    full = torch.randn(6, 7, 8).transpose(0, 2)
    rows = streambp.rows_at(full, dim, 2, 3)
    assert torch.equal(rows, full.narrow(dim, 2, 3)) and rows.is_contiguous()
    assert rows.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
    assert streambp.rows_at(full.to("meta"), dim, 2, 3).stride() == rows.stride()
    target = torch.zeros_like(full)
    streambp.write_rows_(rows, dim, 2, target)
    assert torch.equal(target.narrow(dim, 2, 3), rows) and target.count_nonzero() == rows.count_nonzero()
