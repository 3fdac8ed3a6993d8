"""Every row of the kernel table against float64; CUDA's against implementations that assert their demands."""

import functools
from dataclasses import replace

import cuda_kernels
import pytest
import torch
from torch import Tensor

from benchmarks.memory import peak
from streambp_compile import internals
from streambp_compile.passes.kernels.attention import (
    Attention,
    Target,
    choose,
    composed,
    fused,
    masks,
    scratch_of,
    streaming,
)
from streambp_compile.runtime.memory_simulation import Ledger

streambp = torch.ops.streambp
INF = float("inf")
LENGTH, SCALE = 37, 0.3
HALVES, FLOATS = (torch.bfloat16, torch.float16), (torch.float32,)
DTYPES = {
    "flash_cpu": (torch.float64, *FLOATS, *HALVES),
    "flash": HALVES,
    "cudnn": HALVES,
    "efficient": (*FLOATS, *HALVES),
    "composed": (torch.float64, *FLOATS, *HALVES),
}
NAMES = ("out", "lse", "dq", "dk", "dv")
SHAPES = {  # heads, key heads, width, value width
    "plain": (2, 2, 16, 16),
    "grouped": (4, 2, 16, 16),
    "one key head": (3, 1, 8, 8),
    "narrow values": (4, 2, 24, 16),
    "narrow queries": (2, 2, 16, 24),
    "odd widths": (4, 2, 12, 9),
    "wide": (2, 1, 200, 96),
}
MASKS = (
    "causal",
    "all",
    "boolean",
    "boolean per head",
    "hidden rows",
    "padding",
    "additive",
    "additive per head",
    "causal and padding",
)


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
        some = square & (torch.rand(1, count, LENGTH, LENGTH) < 0.7)
        return some | torch.eye(LENGTH, dtype=torch.bool), False
    shape = (2, 1) if kind == "additive" else (1, heads)
    bias = torch.randn(*shape, LENGTH, LENGTH).masked_fill(~square, -INF)
    bias[:, :, 3] = -INF
    return bias.to(dtype), False


def truth_of(q, k, v, grad, mask, causal) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients in float64, by autograd."""
    q, k, v = (t.double().clone().requires_grad_() for t in (q, k, v))
    boolean = mask is not None and mask.dtype == torch.bool
    bias = torch.zeros(mask.shape).masked_fill(~mask, -INF) if boolean else mask
    found = cuda_kernels.scores(q, k, bias, 0 if causal else None, SCALE)
    hidden = (found == -INF).all(-1, keepdim=True)
    weights = found.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    out = weights @ cuda_kernels.repeated(v, q.shape[1])
    return (out.detach(), found.detach().logsumexp(-1), *torch.autograd.grad(out, (q, k, v), grad.double()))


def in_chunks(kernel, q, k, v, grad, mask, causal, chunk, ranges=None) -> tuple[Tensor, ...]:
    """The same by the operator, in chunks that see no key behind their own where causality allows.

    ranges  of keys, in place of the mask
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = torch.zeros(k.shape, dtype=wide), torch.zeros(v.shape, dtype=wide)
    found = []
    for start in range(0, LENGTH, chunk):
        rows = slice(start, min(start + chunk, LENGTH))
        keys = slice(0, rows.stop if causal else LENGTH)
        part = mask if mask is None else mask[:, :, rows if mask.shape[2] > 1 else slice(None), keys]
        own = {"kernel": kernel}
        if ranges is not None:
            part, own = None, {"kernel": kernel, "ranges": ranges[None, :, rows], "uneven": kernel}
        operands = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        out, lse = streambp.attention(*operands, part, causal, SCALE, start if causal else 0, **own)
        dq = streambp.attention_backward_(
            grad[:, :, rows],
            *operands,
            out,
            lse,
            part,
            causal,
            SCALE,
            start if causal else 0,
            dk[:, :, keys],
            dv[:, :, keys],
            **own,
        )
        assert out.transpose(1, 2).is_contiguous() and dq.transpose(1, 2).is_contiguous()
        assert lse.is_contiguous()
        found.append((out, lse, dq))
    return (*(torch.cat(parts, 2) for parts in zip(*found)), dk, dv)


def operands_of(shape: str, dtype: torch.dtype, laid_out: str = "heads last") -> tuple[Tensor, ...]:
    heads, key_heads, width, value_width = SHAPES[shape]
    sizes = ((heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width))
    if laid_out == "heads last":
        return tuple(torch.randn(2, LENGTH, h, d).to(dtype).transpose(1, 2) for h, d in sizes)
    return tuple(torch.randn(2, h, LENGTH, d + 1).to(dtype)[..., 1:] for h, d in sizes)  # aligned to nothing


def error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


ROUNDED = {
    "cudnn": 1.5,  # its two pieces are rounded before they are joined, and again after
    "flash_cpu": 4,
}  # it rounds the weights, too (test_operators.py holds it to what the whole kernel does)


def rounding(kernel: str, dtype: torch.dtype) -> float:
    """Relative error of a result that is rounded once."""
    return torch.finfo(dtype).eps * (0.4 * ROUNDED.get(kernel, 1) if dtype.itemsize == 2 else 8)


def check(kernel: str, dtype: torch.dtype, tensors, mask, causal: bool, chunk: int, ranges=None) -> None:
    truth = truth_of(*tensors, mask, causal)
    found = in_chunks(kernel, *tensors, mask, causal, chunk, ranges)
    seen = truth[1] > -INF
    assert torch.equal(found[1] > -INF, seen), "rows that see no key"
    for rows in (found[0], found[2]):
        assert not rows.masked_select(~seen.unsqueeze(3)).any()
    lse = (found[1].double() - truth[1])[seen].abs().max().item()
    rough = kernel == "flash_cpu" and dtype.itemsize == 2
    exact = 1e-12 if dtype == torch.float64 else 1e-3 if rough else 1e-5
    assert lse < exact, f"lse {lse}"
    for name, a, b in zip(NAMES, found, truth):
        if name != "lse":
            bound = rounding(kernel, dtype) * (1 if name == "out" or dtype.itemsize > 2 else 1.6)
            assert not a.isnan().any(), name
            assert error(a, b) < bound, f"{name}: {error(a, b):.2e}, bound {bound:.2e}"


CASES = [(k, d) for k, dtypes in DTYPES.items() for d in dtypes]
IDS = [f"{k}-{str(d).removeprefix('torch.')}" for k, d in CASES]


@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "wide"])
@pytest.mark.parametrize("kernel, dtype", CASES, ids=IDS)
def test_a_kernel_on_every_shape_and_mask(kernel, dtype, shape):
    tensors = operands_of(shape, dtype)
    for i, kind in enumerate(MASKS):
        mask, causal = mask_of(kind, SHAPES[shape][0], dtype)
        if mask is None or kernel not in ("flash", "cudnn"):
            check(kernel, dtype, tensors, mask, causal, (16, LENGTH, 5)[i % 3])


@pytest.mark.parametrize("chunk", (16, LENGTH))
@pytest.mark.parametrize("kernel, dtype", CASES, ids=IDS)
def test_a_kernel_by_ranges_of_keys(kernel, dtype, chunk):
    """Two packed documents in one sequence; the other is padded at both ends."""
    t = torch.arange(LENGTH)
    first = torch.stack((torch.where(t < 20, 0, 20), torch.full_like(t, 4)))
    stop = torch.minimum(t + 1, torch.stack((torch.full_like(t, LENGTH), torch.full_like(t, 30))))
    first, stop = (edge.where(stop > first, 0) for edge in (first, stop))
    mask = (t >= first[..., None]) & (t < stop[..., None])
    ranges = torch.stack((first, stop), -1)
    check(kernel, dtype, operands_of("grouped", dtype), mask[:, None], True, chunk, ranges)


@pytest.mark.parametrize("kernel", ("flash", "efficient", "composed"))
def test_a_head_width_that_some_gpus_have_no_flash_backward_for(kernel):
    check(kernel, torch.bfloat16, operands_of("wide", torch.bfloat16), None, True, 16)


@pytest.mark.parametrize("chunk", (1, 7, 36))
@pytest.mark.parametrize("kernel", DTYPES)
@pytest.mark.quick
def test_chunks_that_do_not_divide(kernel, chunk):
    dtype = DTYPES[kernel][-2]
    check(kernel, dtype, operands_of("grouped", dtype), None, True, chunk)


@pytest.mark.parametrize("kernel", DTYPES)
def test_operands_that_no_load_is_aligned_to(kernel):
    dtype = DTYPES[kernel][0]
    check(kernel, dtype, operands_of("grouped", dtype, "askew"), None, True, 16)


@pytest.mark.parametrize("kernel", ("flash", "cudnn"))
def test_grouped_heads_apart(kernel, monkeypatch):
    """From some length on, gradients of keys are never made for every query head."""
    monkeypatch.setattr(streaming, "GROUPS_FILL", 1)
    for shape in ("grouped", "one key head"):
        check(kernel, torch.bfloat16, operands_of(shape, torch.bfloat16), None, True, 16)


@pytest.mark.parametrize("keys_at_once", (1, 7, 36))
def test_gradients_of_some_keys_at_a_time(keys_at_once, monkeypatch):
    monkeypatch.setattr(fused, "KEYS_AT_ONCE", keys_at_once)
    for kind in MASKS:
        mask, causal = mask_of(kind, 4, torch.float64)
        check("flash_cpu", torch.float64, operands_of("grouped", torch.float64), mask, causal, 16)


def test_gradients_of_other_keys_take_no_memory():
    """Beside ``dQ``, one pair of gradients exists, of as many keys as are differentiated at once."""
    torch.manual_seed(0)
    query, grad, out = (torch.randn(1, 2, 32, 64) for _ in range(3))
    key, value, key_grad, value_grad = (torch.randn(1, 2, 8 * fused.KEYS_AT_ONCE, 64) for _ in range(4))
    given = (grad, query, key, value, out, torch.full((1, 2, 32), 9.0), None, False, 0.125, 0)
    run = functools.partial(
        torch.ops.streambp.attention_backward_, *given, key_grad, value_grad, kernel="flash_cpu"
    )
    assert peak(run) < 3 * key[:, :, : fused.KEYS_AT_ONCE].nbytes


@pytest.mark.parametrize("chunk", (5, 16, 36))
@pytest.mark.parametrize("dtype", DTYPES["flash_cpu"], ids=str)
def test_causal_squares_in_parts(dtype, chunk, monkeypatch):
    monkeypatch.setattr(streaming, "SMALLEST_SQUARE", 3)
    for shape in ("grouped", "one key head"):
        check("flash_cpu", dtype, operands_of(shape, dtype), None, True, chunk)


def test_squares_and_rectangles_cover_every_visible_score_once():
    flash = streaming.ROWS["flash_cpu"]
    for rows, start in ((464, 0), (544, 1088), (200, 7), (128, 128), (1025, 0)):
        seen = torch.zeros(rows, start + rows, dtype=torch.int)
        for piece in streaming.pieces(rows, start + rows, start, flash):
            assert piece.again == bool(seen[piece.rows].any())
            seen[piece.rows, piece.keys] += 1
        visible = torch.ones(rows, start + rows).tril(start) > 0
        assert (seen[visible] == 1).all() and (seen <= 1).all()


@pytest.mark.parametrize("bytes_at_once", (1, 5000))
def test_composed_attention_in_blocks_of_rows(bytes_at_once, monkeypatch):
    monkeypatch.setattr(composed, "BLOCK", bytes_at_once)
    tensors = operands_of("grouped", torch.float64)
    for kind in ("causal", "all", "hidden rows", "additive per head"):
        mask, causal = mask_of(kind, 4, torch.float64)
        check("composed", torch.float64, tensors, mask, causal, 16)


@pytest.mark.parametrize("kernel", DTYPES)
def test_a_chunk_without_keys(kernel):
    q, k, v, grad = operands_of("grouped", DTYPES[kernel][0])
    k, v = k[:, :, :0], v[:, :, :0]
    for mask in (None, torch.zeros(1, 1, LENGTH, 0, dtype=torch.bool)):
        out, lse = streambp.attention(q, k, v, mask, mask is None, SCALE, 0, kernel=kernel)
        dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
        causal = mask is None
        dq = streambp.attention_backward_(
            grad, q, k, v, out, lse, mask, causal, SCALE, 0, dk, dv, kernel=kernel
        )
        assert not out.any() and not dq.any() and bool((lse == -INF).all())
        assert out.transpose(1, 2).is_contiguous() and dq.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("start, keys", ((0, 3), (4, 9), (4, 5), (4, 3), (0, 1), (1, 30)))
@pytest.mark.parametrize("kernel", DTYPES)
def test_a_causal_chunk_with_any_number_of_keys(kernel, start, keys):
    """A band that ends before the diagonal leaves fewer keys than rows; what is not pruned has more."""
    dtype = DTYPES[kernel][-2]
    q, k, v, grad = operands_of("grouped", dtype)
    q, grad, k, v = q[:, :, :8], grad[:, :, :8], k[:, :, :keys], v[:, :, :keys]
    mask = torch.arange(keys) <= torch.arange(start, start + 8)[:, None]
    truth = truth_of(q, k, v, grad, mask[None, None], False)
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    out, lse = streambp.attention(q, k, v, None, True, SCALE, start, kernel=kernel)
    dq = streambp.attention_backward_(
        grad, q, k, v, out, lse, None, True, SCALE, start, dk, dv, kernel=kernel
    )
    for name, a, b in zip(NAMES, (out, lse, dq, dk, dv), truth):
        assert (a.double() - b).norm() <= 2 * rounding(kernel, dtype) * max(b.norm(), 1), name


def test_numbers_that_hide_and_numbers_that_are_merely_low():
    """The lowest float32 number stays a number in half precision: such a row is spread over its keys."""
    low = torch.full((1, 1, 2, 3), torch.finfo(torch.float32).min)
    low[0, 0, 1] = -INF
    bias = masks.additive(low, 3, 2, None, torch.bfloat16, 16)
    assert torch.equal(masks.hidden_rows(bias), torch.tensor([[[False, True]]]))
    assert bias.stride(2) == 16 and bias[0, 0, 0, 0] == torch.finfo(torch.bfloat16).min


DEVICES = {
    "cpu": Target("cpu"),
    "mps": Target("mps"),
    "hip": Target("hip"),
    "cuda, unknown": Target("cuda"),
    **{f"sm{a}{b}": Target("cuda", (a, b)) for a, b in ((7, 0), (7, 5), (8, 0), (9, 0))},
    "sm90 without flash": Target("cuda", (9, 0), frozenset({"flash"})),
    "sm90 with FA3": Target("cuda", (9, 0), flash="FA3"),
    "sm80 with FA3": Target("cuda", (8, 0), flash="FA3"),
    "sm90 with FA4": Target("cuda", (9, 0), flash="FA4"),
}
ASKED = {
    "bf16": Attention(torch.bfloat16, 128, 128),
    "masked": Attention(torch.bfloat16, 128, 128, True),
    "fp16": Attention(torch.float16, 64, 64),
    "fp32": Attention(torch.float32, 64, 64),
    "fp64": Attention(torch.float64, 64, 64),
    "192/128": Attention(torch.bfloat16, 192, 128),
    "576/512": Attention(torch.bfloat16, 576, 512),
    "20": Attention(torch.float16, 20, 20),
}
CHOSEN = """\
                         bf16    masked      fp16      fp32      fp64   192/128   576/512        20
cpu                 flash_cpu flash_cpu flash_cpu flash_cpu flash_cpu flash_cpu flash_cpu flash_cpu
mps                  composed  composed  composed  composed  composed  composed  composed  composed
hip                  composed  composed  composed  composed  composed  composed  composed  composed
cuda, unknown        composed  composed  composed  composed  composed  composed  composed  composed
sm70                 composed  composed efficient efficient  composed  composed  composed efficient
sm75                 composed  composed efficient efficient  composed  composed  composed efficient
sm80                    flash efficient     flash efficient  composed     flash efficient     flash
sm90                    cudnn efficient     cudnn efficient  composed     flash efficient     cudnn
sm90 without flash      cudnn efficient     cudnn efficient  composed efficient efficient     cudnn
sm90 with FA3           flash efficient     flash efficient  composed     flash efficient     flash
sm80 with FA3           cudnn efficient     cudnn efficient  composed efficient efficient     cudnn
sm90 with FA4           flash efficient     flash efficient  composed efficient efficient     flash"""


def table() -> str:
    lines = [" " * 19 + "".join(f"{name:>10}" for name in ASKED)]
    for name, target in DEVICES.items():
        names = (choose(asked, target).kernel.name for asked in ASKED.values())
        lines.append(f"{name:<19}" + "".join(f"{found:>10}" for found in names))
    return "\n".join(lines)


@pytest.mark.quick
def test_the_kernel_chosen_on_every_device():
    assert table() == CHOSEN


def test_a_choice_says_why_each_kernel_before_it_was_passed_over():
    assert str(choose(ASKED["masked"], DEVICES["sm90"])) == (
        "efficient (slower than flash; takes masks, float32, any head width and older GPUs; "
        "not cudnn: with a mask its dQ can be NaN; not flash: it takes no mask)"
    )
    uneven = choose(replace(ASKED["bf16"], uneven=True), DEVICES["sm90"])
    assert uneven.kernel.name == "flash"
    assert dict(uneven.passed)["cudnn"] == "it makes a plan for every new number of rows or keys"
    assert dict(choose(ASKED["fp64"], DEVICES["sm75"]).passed)["efficient"] == "it does not take float64"
    assert dict(choose(ASKED["bf16"], DEVICES["sm75"]).passed)["flash"] == (
        "bfloat16 needs compute capability 8.0, this device has 7.5"
    )
    assert dict(choose(ASKED["576/512"], DEVICES["sm90"]).passed)["flash"] == (
        "it takes up to 256 features per head, not 576"
    )
    assert dict(choose(ASKED["bf16"], DEVICES["sm80 with FA3"]).passed)["flash"] == (
        "the activated FA3 needs compute capability 9.x"
    )


def test_cudnn_plans_nothing_anew_because_a_sequence_is_longer():
    """A plan belongs to shapes and strides: of keys in a buffer, neither may tell how long that buffer is."""
    keys = [torch.empty(1, length, 8, 64, device="meta").transpose(1, 2)[:, :, :256] for length in (700, 900)]
    assert len({k.stride() for k in keys}) == 2
    assert len({fused.whatever_the_length(k).stride() for k in keys}) == 1
    two = torch.empty(2, 700, 8, 64, device="meta").transpose(1, 2)
    assert fused.whatever_the_length(two).stride() == two.stride()


def test_every_fused_kernel_says_what_it_takes_beside_its_results():
    """One chunk of 2048 rows of Qwen3-8B's 32 heads, 8 of them keys', at 32768 tokens, in bytes."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta").transpose(1, 2)

    q, k = empty(1, 2048, 32, 128), empty(1, 32768, 8, 128)
    lse = torch.empty(1, 32, 2048, device="meta")
    rows = 32 * 2048 * 4  # a float32 number for every row
    expanded = 2 * 32768 * 32 * 128 * 2  # gradients of keys and values for every query head
    assert scratch_of(fused.FLASH_FORWARD, (q, k, k, 0.0, True)) == 0
    assert scratch_of(fused.FLASH_BACKWARD, (q, q, k, k, q, lse)) == rows * (1 + 128) + expanded
    one = q[:, ::4]  # one query of each key head
    assert scratch_of(fused.FLASH_BACKWARD, (one, one, k, k, one, lse)) == (
        rows // 4 * (1 + 128) + 2 * 2048 * 8 * 128 * 2
    )  # no expanded gradients, two operands laid out anew
    assert scratch_of(fused.CUDNN_BACKWARD, (q, q, k, k, q, lse)) == rows * (1 + 128) + expanded
    narrow, keys = (t.transpose(1, 2) for t in (q[:, :8], k))
    assert scratch_of(fused.EFFICIENT_FORWARD, (narrow, keys, keys)) == 0
    assert scratch_of(fused.EFFICIENT_BACKWARD, (narrow, narrow, keys, keys)) == rows // 4 * (1 + 128)
    assert scratch_of(torch.ops.aten.mm.default, ()) == 0


def fake(*shape) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2)


def test_the_memory_simulation_counts_what_a_cuda_kernel_takes():
    """On fake tensors, without a GPU: results, the operands that a call copies, and scratch."""
    with internals.FakeTensorMode():
        q, k = (fake(1, rows, heads, 128) for rows, heads in ((256, 8), (512, 2)))
        out, lse = torch.empty_like(q), torch.empty(1, 8, 256, device="cuda")
        dk, dv = torch.zeros(k.shape, device="cuda"), torch.zeros(k.shape, device="cuda")
        ledger = Ledger("cuda")
        for t in (q, k, out, lse, dk, dv):
            ledger.know(t)
        with ledger:
            dq = streambp.attention_backward_(
                out, q, k, k, out, lse, None, True, SCALE, 256, dk, dv, kernel="flash"
            )
        results = dq.nbytes + 2 * k.nbytes
        scratch = scratch_of(fused.FLASH_BACKWARD, (out, q, k, k, out, lse))
        assert results + scratch <= ledger.peak <= results + scratch + 512  # and an empty random state


@pytest.mark.parametrize(
    "kernel, masked",
    [
        ("flash", False),
        ("cudnn", False),
        ("efficient", False),
        ("efficient", True),
        ("composed", False),
        ("composed", True),
    ],
)
def test_a_kernel_runs_on_fake_tensors_of_a_device_that_is_not_there(kernel, masked):
    with internals.FakeTensorMode(), Ledger("cuda"):
        q, k = (fake(2, rows, heads, 24) for rows, heads in ((64, 4), (128, 2)))
        mask = torch.empty(1, 1, 64, 128, dtype=torch.bool, device="cuda") if masked else None
        dk, dv = torch.zeros(k.shape, device="cuda"), torch.zeros(k.shape, device="cuda")
        out, lse = streambp.attention(q, k, k, mask, not masked, SCALE, 64, kernel=kernel)
        dq = streambp.attention_backward_(
            out, q, k, k, out, lse, mask, not masked, SCALE, 64, dk, dv, kernel=kernel
        )
    assert out.shape == dq.shape == q.shape and out.stride() == dq.stride() == q.stride()
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
