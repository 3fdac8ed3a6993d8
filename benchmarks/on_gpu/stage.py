"""Where a step runs: a GPU, a CPU, or nowhere, on fake tensors, which need no device and hold no values."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable

import torch
from torch import nn

from streambp_compile.internals import FakeTensorMode
from streambp_compile.runtime.memory_simulation import Ledger


class Stage:
    """A device and what can be measured on it.

    kind    ``"cuda"``, ``"cpu"``, or ``"fake"``: tensors that say they are on ``device``, and nothing runs
    device  for fake tensors, a GPU by default
    """

    def __init__(self, kind: str, device: str = "cuda"):
        self.kind = kind
        self.executes = kind != "fake"
        self.device = device if kind == "fake" else kind
        self.mode = None if self.executes else fake_mode()

    def inside(self):
        """The context in which models and batches are made and steps are taken."""
        return self.mode if self.mode is not None else contextlib.nullcontext()

    def outside(self):
        """The context in which modules of real tensors are made, to be `placed` here."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        return contextlib.nullcontext() if self.executes else unset_fake_temporarily()

    def build(self, make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
        """The module that ``make()`` returns, in ``dtype``; its random weights are drawn on the device."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(self.device if self.executes else "meta"):
                model = make()
        finally:
            torch.set_default_dtype(before)
        return model if self.executes else self.placed(model)

    def placed(self, model: nn.Module) -> nn.Module:
        """The module on this device; as fake tensors of the same layout where nothing runs."""
        if self.executes:
            return model.to(self.device)
        shared: dict[int, torch.Tensor] = {}  # tied weights stay tied
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    if id(weight) not in shared:
                        shared[id(weight)] = nn.Parameter(self.faked(weight), weight.requires_grad)
                    module._parameters[name] = shared[id(weight)]
            for name, value in module._buffers.items():
                if value is not None:
                    module._buffers[name] = self.faked(value)
        return model

    def faked(self, value: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)

    def batch(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: value.to(self.device) if self.executes else self.faked(value)
            for name, value in values.items()
        }

    def ids(self, vocabulary: int, tokens: int) -> torch.Tensor:
        """Random token ids, ``[1, tokens]``."""
        with self.inside():
            return torch.randint(0, vocabulary, (1, tokens), device=self.device)

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def release(self) -> None:
        """Collect what is dead, and hand cached memory back to the device."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def seconds(self, step: Callable[[], object]) -> float:
        self.synchronize()
        start = time.perf_counter()
        step()
        self.synchronize()
        return time.perf_counter() - start

    def peak(self, step: Callable[[], object], weights: nn.Module) -> int:
        """Bytes at the highest point of a step above what is held before it; on fake tensors, those of all
        allocations between kernels."""
        if self.kind == "cpu":
            from benchmarks.memory import peak

            return peak(step)
        if self.kind == "fake":
            with self.mode, ledger_beside(weights, self.device) as ledger:
                step()
            return ledger.peak
        self.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - held

    def reserved(self) -> int:
        """The most bytes that the allocator has taken from the device since the last `peak` began, 0 where
        there is no such number."""
        return torch.cuda.max_memory_reserved() if self.kind == "cuda" else 0


@contextlib.contextmanager
def ledger_beside(weights: nn.Module, device: str):
    """A ledger of allocations on a device that leaves out weights, buffers and their allocated gradients."""
    ledger = Ledger(device)
    for value in (*weights.parameters(), *weights.buffers()):
        ledger.know(value)
        if getattr(value, "grad", None) is not None:
            ledger.know(value.grad)
    with ledger:
        yield ledger


def fake_mode() -> FakeTensorMode:
    """A mode for fake tensors on a GPU that only answers questions: nothing is allocated there, and no
    constant is read."""
    import torch._inductor.config
    import torch._subclasses.fake_tensor

    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
    torch._inductor.config.joint_graph_constant_folding = False
    return FakeTensorMode(allow_non_fake_inputs=True)


def allocate_gradients(model: nn.Module) -> None:
    """Gradients of zeros, so that every step adds to what is there and allocates none."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def twin(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """Another module that shares the weights and buffers of ``model``, by name; it may have fewer layers than
    ``model``."""
    with torch.device("meta"):
        other = make()
    for name, module in other.named_modules():
        source = model.get_submodule(name)
        for own, shared in ((module._parameters, source._parameters), (module._buffers, source._buffers)):
            own.update({key: shared[key] for key in own})
    return other
