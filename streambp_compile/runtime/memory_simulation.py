"""The peak memory of a training step, predicted byte by byte before it runs.

The drivers, compiled artifacts and autograd nodes of the step run on fake tensors, which have sizes and
no contents. Kernels are left out, and every allocation around them is counted until its last reference
is released. So the prediction cannot differ from the schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import internals
from ..passes.ir import Body
from ..passes.kernels.attention import STAND_INS, scratch_of
from ..passes.kernels.operators import KERNELS, SCRATCH
from ..passes.kernels.simulated_device import device_type
from .gradient_ownership import plain_references
from .places import InBackward, within

aten = torch.ops.aten
# Numbers that drivers on a CPU read: is the tangent of the loss one, and where do groups of rows end?
NUMBERS = (aten._local_scalar_dense.default, aten.item.default)
BLOCKS = {"cuda": 512}  # bytes: the caching allocator hands out whole blocks


def widened_sum(total: torch.Tensor, left, right, out_dtype, **scales) -> torch.Tensor:
    return torch.empty_like(total, dtype=out_dtype, memory_format=torch.contiguous_format)


def widened_product(left: torch.Tensor, right: torch.Tensor, out_dtype) -> torch.Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=out_dtype)


def given_out(*_args, out: torch.Tensor, **_kwargs) -> torch.Tensor:
    return out


WIDENING = {  # products of half precision summed in float32: torch 2.11 has no fake form of them
    aten.addmm.dtype: widened_sum,
    aten.baddbmm.dtype: widened_sum,
    aten.mm.dtype: widened_product,
    aten.bmm.dtype: widened_product,
    aten.addmm.dtype_out: given_out,
    aten.baddbmm.dtype_out: given_out,
    aten.mm.dtype_out: given_out,
    aten.bmm.dtype_out: given_out,
}


class Ledger(internals.TorchDispatchMode):
    """Bytes of all living storages that were created under this mode, and their peak.

    device  the device type whose storages count, ``"cpu"`` or ``"cuda"``
    """

    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.device = device
        self.block = BLOCKS.get(device_type(torch.device(device)), 1)
        self.known: weakref.WeakSet = weakref.WeakSet()
        self.held = self.peak = 0
        self.taken: dict[object, int] = {}  # bytes that an artifact without results takes while it runs
        self.running: object = None  # the operator whose results are counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in NUMBERS:
            return 1
        if func in KERNELS:  # kernels of this package are Python, and allocate temporary values
            with self:
                return KERNELS[func](*args, **(kwargs or {}))
        self.running = func
        result = STAND_INS.get(func, WIDENING.get(func, func))(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.count(value)
        self.use(SCRATCH[func](*args) if func in SCRATCH else scratch_of(func, args))
        return result

    def once(self, key: object, run: Callable[[list], object], inputs: list) -> object:
        """Run an artifact, and only once per input sizes if it returns nothing, as chunk bodies do. Later
        calls only count the bytes that the first one took."""
        if key in self.taken:
            self.use(self.taken[key])
            inputs.clear()
            return ()
        held, peak, self.peak = self.held, self.peak, self.held
        result = run(inputs)
        if not result:
            self.taken[key] = self.peak - held
        self.peak = max(peak, self.peak)
        return result

    def use(self, scratch: int) -> None:
        """Count bytes that an operator takes while it runs."""
        self.peak = max(self.peak, self.held + scratch)

    def know(self, value: torch.Tensor) -> None:
        """Exclude a value that existed before the step."""
        self.known.add(value.untyped_storage())

    def count(self, value: torch.Tensor) -> None:
        """Count the storage of an operator's result, if it is new."""
        storage = value.untyped_storage()
        if storage in self.known or value.device.type != self.device:
            return
        size = -(-storage.nbytes() // self.block) * self.block
        self.known.add(storage)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self.release, size, self.noted(value, size))

    def noted(self, value: torch.Tensor, size: int) -> object:
        """Return a record of an allocation that `release` receives; None in a plain simulation."""
        return None

    def release(self, size: int, noted: object) -> None:
        self.held -= size

    def forward_ended(self) -> None:
        """Mark the moment between forward and backward."""


@dataclass(frozen=True)
class Peak:
    """The most bytes held at once above inputs, weights and their gradients.

    backward  a backward ran, because there is a loss
    """

    bytes: int
    backward: bool

    def __str__(self) -> str:
        return (
            f"predicted peak of {'a step' if self.backward else 'the forward'}: {self.bytes / 2**20:.1f} MiB "
            "above weights and their gradients"
        )


def main_device(values: Sequence[object]) -> str:
    """Find the device type of a step's tensors; the CPU counts only if no other device is used."""
    types = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    return next(iter(types - {"cpu"}), "cpu")


@internals.OneAtATime()
def simulate(
    call: Callable,
    fakes: Sequence[object],
    any_output: bool = False,
    counting: Callable[[str], Ledger] | None = None,
) -> Peak:
    """Simulate one call of a compiled chain and its backward, and return the peak.

    call        the function of a graph's inputs that the backend returned; its first differentiable
                scalar output is the loss
    fakes       those inputs as Dynamo gave them; symbols stand for the sizes at which they were traced
    any_output  without a loss, run the backward from all differentiable outputs
    counting    builds the ledger of a device type; by default a plain `Ledger`
    """
    with internals.outside_of_metrics():
        plain_references()  # measured once, on values that do not belong to the step
    with internals.FakeTensorMode(allow_non_fake_inputs=True), internals.outside_of_metrics():
        inputs = [internals.stand_in_whole(f) for f in fakes]
        ledger = (counting or Ledger)(main_device(inputs))
        for value in inputs:
            if isinstance(value, torch.Tensor):
                ledger.know(value)
                if value.requires_grad:
                    value.grad = torch.zeros_like(value)
                    ledger.know(value.grad)
        with ledger, internals.without_kernels(ledger.once if type(ledger) is Ledger else None):
            outputs = call(*inputs)
            ends = [o for o in outputs if internals.is_fake(o) and o.requires_grad]
            del outputs
            ends = [o for o in ends if o.numel() == 1][:1] or (ends if any_output else [])
            ledger.forward_ended()
            if ends:
                # In this thread: it holds the lock under which the backward may have to compile.
                with within(InBackward()), torch.autograd.set_multithreading_enabled(False):
                    torch.autograd.backward(ends, [torch.zeros_like(o) for o in ends])
    return Peak(ledger.peak, bool(ends))


def bytes_of_chunk(body: Body, compiled: Callable, tokens: int) -> int:
    """Compute the most bytes that a compiled body takes, beside its inputs, for a chunk of ``tokens`` tokens.
    The result is 0 where an operator in it has no fake form."""
    symbolic = internals.BodyInputs(body, tokens).values
    with (
        internals.disable_current_modes(),
        internals.FakeTensorMode(allow_non_fake_inputs=True),
        internals.outside_of_metrics(),
    ):
        inputs = [internals.stand_in(v) for v in symbolic]
        ledger = Ledger(main_device(inputs))
        for value in inputs:
            if isinstance(value, torch.Tensor):
                ledger.know(value)
        try:
            with ledger, internals.without_kernels():
                compiled(inputs)
        except Exception:
            internals.log.debug("simulating a chunk failed", exc_info=True)
            return 0
    return ledger.peak


def without_data(call: Callable) -> Callable:
    """Wrap a call to run on fake tensors: values are allocated, none is computed."""

    def run(*args):
        with Ledger(main_device(args)), internals.without_kernels():
            return call(*args)

    return run
