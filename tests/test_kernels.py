"""Every row of the kernel table against a float64 truth, CUDA's against implementations that assert what the kernels demand."""

import cuda_kernels
import pytest
import torch
from torch import Tensor

from streambp_compile.passes import attention  # noqa: F401  (defines torch.ops.streambp)

streambp = torch.ops.streambp
INF = float("inf")
LENGTH, SCALE = 37, 0.3
HALVES, FLOATS = (torch.bfloat16, torch.float16), (torch.float32,)
DTYPES = {"flash_cpu": (torch.float64, *FLOATS, *HALVES), "flash": HALVES, "cudnn": HALVES, "efficient": (*FLOATS, *HALVES),
          "composed": (torch.float64, *FLOATS, *HALVES)}
NAMES = ("out", "lse", "dq", "dk", "dv")
SHAPES = {  # heads, key heads, width, value width
    "plain": (2, 2, 16, 16), "grouped": (4, 2, 16, 16), "one key head": (3, 1, 8, 8), "narrow values": (4, 2, 24, 16),
    "narrow queries": (2, 2, 16, 24), "odd widths": (4, 2, 12, 9),
}
MASKS = ("causal", "all", "boolean", "boolean per head", "hidden rows", "padding", "additive", "additive per head", "causal and padding")


@pytest.fixture(autouse=True, scope="module")
def cuda_operators():
    """CUDA's operators on a CPU; on one thread, for all products here are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with cuda_kernels.installed():
        yield
    torch.set_num_threads(threads)


def mask_of(kind: str, heads: int, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """A mask for two sequences, and whether causality is asked for beside it."""
    square = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if kind in ("causal", "all"):
        return None, kind == "causal"
    if kind in ("padding", "causal and padding"):
        return torch.arange(LENGTH) < torch.tensor([LENGTH, 20])[:, None, None, None], kind != "padding"
    if kind == "hidden rows":
        seen = square.clone()
        seen[[0, 5, 6, 7, 36]] = False
        return seen[None, None], False
    if kind.startswith("boolean"):
        count = heads if kind.endswith("head") else 1
        return square & (torch.rand(1, count, LENGTH, LENGTH) < 0.7) | torch.eye(LENGTH, dtype=torch.bool), False
    bias = torch.randn(2 if kind == "additive" else 1, 1 if kind == "additive" else heads, LENGTH, LENGTH).masked_fill(~square, -INF)
    bias[:, :, 3] = -INF
    return bias.to(dtype), False


def truth_of(q, k, v, grad, mask, causal) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients in float64, by autograd."""
    q, k, v = (t.double().clone().requires_grad_() for t in (q, k, v))
    bias = None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -INF) if mask.dtype == torch.bool else mask
    found = cuda_kernels.scores(q, k, bias, 0 if causal else None, SCALE)
    hidden = (found == -INF).all(-1, keepdim=True)
    weights = found.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    out = weights @ cuda_kernels.repeated(v, q.shape[1])
    return (out.detach(), found.detach().logsumexp(-1), *torch.autograd.grad(out, (q, k, v), grad.double()))


def in_chunks(kernel, q, k, v, grad, mask, causal, chunk) -> tuple[Tensor, ...]:
    """The same by the operator, in chunks that see no key behind their own where causality allows."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = torch.zeros(k.shape, dtype=wide), torch.zeros(v.shape, dtype=wide)
    found = []
    for start in range(0, LENGTH, chunk):
        rows = slice(start, min(start + chunk, LENGTH))
        keys = slice(0, rows.stop if causal else LENGTH)
        part = mask if mask is None else mask[:, :, rows if mask.shape[2] > 1 else slice(None), keys]
        operands = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        out, lse = streambp.attention(*operands, part, causal, SCALE, start if causal else 0, kernel)
        dq = streambp.attention_backward_(grad[:, :, rows], *operands, out, lse, part, causal, SCALE, start if causal else 0,
                                          dk[:, :, keys], dv[:, :, keys], kernel)
        assert out.transpose(1, 2).is_contiguous() and dq.transpose(1, 2).is_contiguous() and lse.is_contiguous()
        found.append((out, lse, dq))
    return (*(torch.cat(parts, 2) for parts in zip(*found)), dk, dv)


def operands_of(shape: str, dtype: torch.dtype, laid_out: str = "heads last") -> tuple[Tensor, ...]:
    heads, key_heads, width, value_width = SHAPES[shape]
    sizes = ((heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width))
    if laid_out == "heads last":
        return tuple(torch.randn(2, LENGTH, h, d).to(dtype).transpose(1, 2) for h, d in sizes)
    return tuple(torch.randn(2, h, LENGTH, d + 1).to(dtype)[..., 1:] for h, d in sizes)  # pointers and rows that no load is aligned to


def error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


ROUNDED = {"cudnn": 1.5,  # its two pieces are rounded before they are joined, and again after
           "flash_cpu": 4}  # it rounds the weights, too (test_ops.py holds it to what the whole kernel does)


def rounding(kernel: str, dtype: torch.dtype) -> float:
    """Relative error of a result that is rounded once."""
    return torch.finfo(dtype).eps * (0.4 * ROUNDED.get(kernel, 1) if dtype.itemsize == 2 else 8)


def check(kernel: str, dtype: torch.dtype, tensors, mask, causal: bool, chunk: int) -> None:
    truth = truth_of(*tensors, mask, causal)
    found = in_chunks(kernel, *tensors, mask, causal, chunk)
    seen = truth[1] > -INF
    assert torch.equal(found[1] > -INF, seen), "rows that see no key"
    assert not found[0].transpose(2, 3).masked_select(~seen.unsqueeze(2)).any() and not found[2].masked_select(~seen.unsqueeze(3)).any()
    lse = (found[1].double() - truth[1])[seen].abs().max().item()
    exact = 1e-12 if dtype == torch.float64 else 1e-3 if kernel == "flash_cpu" and dtype.itemsize == 2 else 1e-5
    assert lse < exact, f"lse {lse}"
    for name, a, b in zip(NAMES, found, truth):
        if name != "lse":
            bound = rounding(kernel, dtype) * (1 if name == "out" or dtype.itemsize > 2 else 1.6)
            assert not a.isnan().any() and error(a, b) < bound, f"{name}: {error(a, b):.2e}, bound {bound:.2e}"


CASES = [(k, d) for k, dtypes in DTYPES.items() for d in dtypes]
IDS = [f"{k}-{str(d).removeprefix('torch.')}" for k, d in CASES]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel, dtype", CASES, ids=IDS)
def test_a_kernel_on_every_shape_and_mask(kernel, dtype, shape):
    tensors = operands_of(shape, dtype)
    for i, kind in enumerate(MASKS):
        mask, causal = mask_of(kind, SHAPES[shape][0], dtype)
        if mask is None or kernel not in ("flash", "cudnn"):
            check(kernel, dtype, tensors, mask, causal, (16, LENGTH, 5)[i % 3])


@pytest.mark.parametrize("chunk", (1, 7, 36))
@pytest.mark.parametrize("kernel", DTYPES)
def test_chunks_that_do_not_divide(kernel, chunk):
    dtype = DTYPES[kernel][-2]
    check(kernel, dtype, operands_of("grouped", dtype), None, True, chunk)


@pytest.mark.parametrize("kernel", DTYPES)
def test_operands_that_no_load_is_aligned_to(kernel):
    dtype = DTYPES[kernel][0]
    check(kernel, dtype, operands_of("grouped", dtype, "askew"), None, True, 16)
