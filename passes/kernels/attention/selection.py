"""The choice of an attention kernel, from a table in the order in which kernels are tried.

Some GPUs try another kernel first (``first_on``). A choice is made when a chunk body is written, for a
device that need not be there; the name of the kernel travels as an argument of the operator. A row of
the table says everything that its kernel requires, so that none raises in the middle of a sweep. What a
row cannot take, the next one does, and the last takes everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from . import composed, fused

HALVES = (torch.float16, torch.bfloat16)
SM80 = (8, 0)


@dataclass(frozen=True)
class Target:
    """Properties of a device that decide which kernels may run there.

    device      ``cpu``, ``cuda``, or any other of torch's; ``hip`` for CUDA's name on AMD
    capability  of a CUDA device; None if it is not known
    disabled    kernels that the user switched off, as by ``torch.backends.cuda.enable_flash_sdp(False)``
                or ``torch.use_deterministic_algorithms(True)``
    flash       the implementation behind torch's flash operator: empty for FlashAttention-2, else the
                one that the user activated
    """

    device: str
    capability: tuple[int, int] | None = None
    disabled: frozenset[str] = frozenset()
    flash: str = ""


@dataclass(frozen=True)
class Attention:
    """Properties of one attention that decide which kernels can compute it.

    width, value_width  features per head, of queries and keys and of values
    masked              is a mask added to scores?
    uneven              do rows and keys of its calls follow from the data, so that few calls are alike?
    """

    dtype: torch.dtype
    width: int
    value_width: int
    masked: bool = False
    uneven: bool = False


@dataclass(frozen=True)
class Kernel:
    """One kernel: the attention that it takes, its calls, and its costs.

    device      where it runs; empty: everywhere
    dtypes      dtypes, each with the first compute capability that has it; empty: all
    widest      features per head at most
    multiple    features per head, and steps in memory, come in multiples of it; others are padded
    even        values are as wide as queries; narrower ones are padded
    masks       does it add a mask to scores?
    bias_step   rows of a mask start at multiples of so many entries
    wide_bias   masks come in the dtype of its scores, not of its operands
    grouped     does it take fewer key heads than query heads?
    expands     does its backward make gradients for every query head first?
    one_call    its backward takes grouped heads in one call, whatever memory those gradients take
    diagonal    where causality may start: ``top left``, ``bottom right``, or ``any``
    first_on    compute capabilities on which it is tried before all others
    plans       does it make a plan, at some cost, for every new number of rows or keys?
    fewest_keys   keys that it takes at least; for fewer, the composed kernel runs instead
    whole_square  rows up to which it computes most of a causal square, hidden scores included
    padded      width → the width that it is padded to, where that is not the next multiple
    forward, backward                  the calls (conventions of ``fused``)
    forward_op, backward_op            their ATen operators, None for plain torch
    forward_scratch, backward_scratch  bytes that those take beside their results
    reason      the reason for its place in the table
    """

    name: str
    reason: str
    forward: Callable
    backward: Callable
    device: str = ""
    dtypes: tuple[tuple[torch.dtype, tuple[int, int] | None], ...] = ()
    widest: int | None = None
    multiple: int = 1
    even: bool = False
    masks: bool = True
    bias_step: int = 1
    wide_bias: bool = False
    grouped: bool = True
    expands: bool = False
    one_call: bool = False
    diagonal: str = "any"
    first_on: tuple[tuple[int, int], ...] = ()
    plans: bool = False
    fewest_keys: int = 1
    whole_square: int = 0
    padded: Callable[[int], int] | None = None
    forward_op: torch._ops.OpOverload | None = None
    backward_op: torch._ops.OpOverload | None = None
    forward_scratch: Callable[..., int] | None = None
    backward_scratch: Callable[..., int] | None = None

    def widths(self, width: int, value_width: int) -> tuple[int, int]:
        """Return the widths of queries and values as this kernel gets them."""
        if self.even:
            width = value_width = max(width, value_width)
        pad = self.padded or (lambda w: fused.rounded(w, self.multiple))
        return pad(width), pad(value_width)


def flash_padded(width: int) -> int:
    """Round a width up to a multiple of 8, and a width from 193 to 224 up to 256. For the latter, sm86, sm89
    and sm120 have no backward (sdp_utils.cpp)."""
    return 256 if 192 < width <= 224 else fused.rounded(width, 8)


TABLE = (
    Kernel(
        "flash_cpu",
        "the only fused kernel on CPUs; scores stay in the cache",
        fused.cpu_forward,
        fused.cpu_backward,
        device="cpu",
        dtypes=tuple((d, None) for d in (torch.float32, torch.float64, *HALVES)),
        even=True,
        grouped=False,
        diagonal="top left",
        whole_square=2 * fused.CPU_KEYS,
        forward_op=fused.CPU_FORWARD,
        backward_op=fused.CPU_BACKWARD,
        forward_scratch=fused.cpu_forward_scratch,
        backward_scratch=fused.cpu_backward_scratch,
    ),
    Kernel(
        "flash",
        "preferred: one call covers a chunk and all its keys (its causal mask is aligned bottom-right)",
        fused.flash_forward,
        fused.flash_backward,
        device="cuda",
        dtypes=tuple((d, SM80) for d in HALVES),
        widest=256,
        multiple=8,
        even=True,
        masks=False,
        expands=True,
        diagonal="bottom right",
        padded=flash_padded,
        forward_op=fused.FLASH_FORWARD,
        backward_op=fused.FLASH_BACKWARD,
        forward_scratch=fused.flash_forward_scratch,
        backward_scratch=fused.flash_backward_scratch,
    ),
    Kernel(
        "cudnn",
        "on an H100 1.6 times as fast as flash, and torch's own first choice on compute capability 9.0 and "
        "10.0; elsewhere second to it, for it needs a plan for every number of keys and two calls for a "
        "causal chunk; takes no mask, with which its dQ can be NaN (pytorch#196678)",
        fused.cudnn_forward,
        fused.cudnn_backward,
        device="cuda",
        dtypes=tuple((d, SM80) for d in HALVES),
        widest=128,
        multiple=8,
        masks=False,
        expands=True,
        diagonal="top left",
        first_on=((9, 0), (10, 0)),
        plans=True,
        fewest_keys=2,
        forward_op=fused.CUDNN_FORWARD,
        backward_op=fused.CUDNN_BACKWARD,
        forward_scratch=fused.cudnn_forward_scratch,
        backward_scratch=fused.cudnn_backward_scratch,
    ),
    Kernel(
        "efficient",
        "slower than flash; takes masks, float32, any head width and older GPUs",
        fused.efficient_forward,
        fused.efficient_backward,
        device="cuda",
        dtypes=((torch.float32, (5, 0)), (torch.float16, (5, 0)), (torch.bfloat16, SM80)),
        multiple=8,
        bias_step=fused.BIAS_STEP,
        grouped=False,
        diagonal="bottom right",
        forward_op=fused.EFFICIENT_FORWARD,
        backward_op=fused.EFFICIENT_BACKWARD,
        forward_scratch=fused.efficient_forward_scratch,
        backward_scratch=fused.efficient_backward_scratch,
    ),
    Kernel(
        "composed",
        "the fallback: matrix products and a softmax, for some rows of scores at a time",
        composed.forward,
        composed.backward,
        wide_bias=True,
    ),
)
COMPOSED = TABLE[-1]
FASTER = {k.name: replace(k, name=f"{k.name}, one call", one_call=True) for k in TABLE if k.expands}
ROWS = {kernel.name: kernel for kernel in (*TABLE, *FASTER.values())}
# Replacements of FlashAttention-2 (torch/nn/attention/_fa3.py, _fa4.py): major capabilities that have them,
# and the most features per head for which their backward runs on all of these.
MAJORS = {"FA3": (9,), "FA4": (9, 10)}
WIDEST = {"FA4": 128}


@dataclass(frozen=True)
class KernelChoice:
    """The chosen kernel, and the reason why each one before it was passed over."""

    kernel: Kernel
    passed: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        before = "".join(f"; not {name}: {reason}" for name, reason in self.passed)
        return f"{self.kernel.name} ({self.kernel.reason}{before})"


def choose(attention: Attention, target: Target) -> KernelChoice:
    """Choose the first kernel that takes this attention on this target."""
    passed: list[tuple[str, str]] = []
    for kernel in in_order(attention, target):
        if kernel.device in ("", target.device):
            reason = obstacle(kernel, attention, target)
            if reason is None:
                return KernelChoice(kernel, tuple(passed))
            passed.append((kernel.name, reason))
    raise AssertionError("the last kernel takes everything")


def in_one_call(choice: KernelChoice) -> KernelChoice:
    """Return the same choice with grouped heads in one backward call, where the kernel can do so."""
    return replace(choice, kernel=FASTER.get(choice.kernel.name, choice.kernel))


def in_order(attention: Attention, target: Target) -> list[Kernel]:
    """Order the table by the preference of this GPU. Kernels that it tries first come in front, if values are
    as wide as queries: other widths were not measured. A flash implementation that the user activated
    stays first."""
    even = attention.width == attention.value_width and not target.flash
    return sorted(TABLE, key=lambda kernel: not (even and target.capability in kernel.first_on))


def obstacle(kernel: Kernel, attention: Attention, target: Target) -> str | None:
    """Explain why a kernel cannot attend here, or return None."""
    since = dict(kernel.dtypes)
    width = max(kernel.widths(attention.width, attention.value_width))
    dtype = str(attention.dtype).removeprefix("torch.")
    if kernel.name in target.disabled:
        return "it is switched off in torch.backends, or ruled out by torch.use_deterministic_algorithms"
    if since and attention.dtype not in since:
        return f"it does not take {dtype}"
    needed = since.get(attention.dtype)
    if needed is not None:
        if target.capability is None:
            return "the compute capability of the device is unknown"
        if target.capability < needed:
            has = dotted(target.capability)
            return f"{dtype} needs compute capability {dotted(needed)}, this device has {has}"
    if attention.masked and not kernel.masks:
        return "it takes no mask" if kernel.name != "cudnn" else "with a mask its dQ can be NaN"
    if attention.uneven and kernel.plans:
        return "it makes a plan for every new number of rows or keys"
    if kernel.widest is not None and width > kernel.widest:
        return f"it takes up to {kernel.widest} features per head, not {width}"
    return replaced(target, width) if kernel.name == "flash" else None


def replaced(target: Target, width: int) -> str | None:
    """Explain why the flash implementation that the user activated cannot attend here, or return None."""
    majors, widest = MAJORS.get(target.flash), WIDEST.get(target.flash)
    if target.flash and majors is None:
        return f"the activated flash implementation {target.flash!r} is unknown"
    if majors and (target.capability or (0, 0))[0] not in majors:
        needed = " or ".join(f"{m}.x" for m in majors)
        return f"the activated {target.flash} needs compute capability {needed}"
    if widest and width > widest:
        return f"the activated {target.flash} takes up to {widest} features per head"
    return None


def dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


SCRATCH: dict[object, Callable[..., int] | None] = {
    kernel.forward_op: kernel.forward_scratch for kernel in TABLE if kernel.forward_op is not None
}
SCRATCH |= {kernel.backward_op: kernel.backward_scratch for kernel in TABLE if kernel.backward_op is not None}


def scratch_of(op: object, args: tuple) -> int:
    """Count the bytes that a call of a kernel takes beside its results; 0 for any other operator."""
    size = SCRATCH.get(op)
    return 0 if size is None else size(*args)


# Meta functions in place of torch's own, for operators whose own ones fail on fake tensors.
STAND_INS = {fused.EFFICIENT_BACKWARD: fused.efficient_backward_meta}
