"""Inductor's artifacts on fake tensors, without their kernels.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable

import torch
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.output_code import CompiledFxGraph
from torch._subclasses import fake_tensor

from . import chunk_bodies

ALIGNED = 64  # elements: more than any load of a kernel
KERNELS = ("cpp", "cpp_pybinding")  # methods that build kernels for a CPU


@contextlib.contextmanager
def without_kernels(counted: Callable[[object, Callable, list], object] | None = None):
    """Run Inductor's artifacts on fake tensors: they allocate and free as usual, and launch nothing.

    counted  runs an artifact, given a key of the call, the artifact's wrapper and its inputs
    """

    def run(artifact: CompiledFxGraph, inputs: list) -> object:
        if counted is None:
            return wrapper_alone(artifact)(inputs)
        return counted((id(artifact), *map(described, inputs)), wrapper_alone(artifact), inputs)

    before = CompiledFxGraph.__call__
    CompiledFxGraph.__call__ = run
    try:
        yield
    finally:
        CompiledFxGraph.__call__ = before


@contextlib.contextmanager
def without_code(like_triton: bool):
    """Compile artifacts that are only simulated: Inductor writes their wrappers, and builds no kernel.

    Artifacts that are compiled inside must not be called outside.

    like_triton  kernels never overwrite their inputs, as those that Inductor writes for a GPU hardly do
    """
    built = {name: getattr(AsyncCompile, name) for name in KERNELS}
    for name in KERNELS:
        setattr(AsyncCompile, name, lambda *args, **kwargs: Silent())
    options = {"fx_graph_cache": False, **({"inplace_buffers": False} if like_triton else {})}
    try:
        with chunk_bodies.compiling_apart(), inductor_config.patch(options):
            yield
    finally:
        for name, build in built.items():
            setattr(AsyncCompile, name, build)


@contextlib.contextmanager
def without_device():
    """Keep torch from using a device that need not exist. It would create a context, time products, and read
    constants, which are fake."""
    before = fake_tensor.init_gpu_context
    fake_tensor.init_gpu_context = lambda device: None
    try:
        with inductor_config.patch(joint_graph_constant_folding=False, shape_padding=False):
            yield
    finally:
        fake_tensor.init_gpu_context = before


def wrapper_alone(artifact: CompiledFxGraph) -> Callable:
    """Return the Python wrapper of an artifact without its kernels, whose allocators torch dispatches."""
    call = generated(artifact.current_callable)
    names = dict(call.__globals__)
    for name in call.__globals__:
        if name.startswith(("cpp_fused", "triton_")):
            names[name] = Silent()
    names.update(
        extern_kernels=Products(),
        assert_size_stride=Silent(),
        assert_alignment=Silent(),
        reinterpret_tensor=torch.as_strided,
        empty_strided_cpu=functools.partial(empty_on, "cpu"),
        empty_strided_cuda=functools.partial(empty_on, "cuda"),
    )
    alone = types.FunctionType(call.__func__.__code__, names, closure=call.__func__.__closure__)
    return functools.partial(alone, call.__self__)


def described(value: object) -> object:
    """Describe an input as far as an artifact's allocations depend on it. These are sizes and strides, and
    the alignment of the value's first element."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.shape, value.stride(), value.storage_offset() % ALIGNED)


def generated(function: Callable) -> types.MethodType:
    """Find the method that Inductor wrote, behind the closures that align inputs on CUDA."""
    waiting, seen = [function], set()
    while waiting:
        found = waiting.pop(0)
        if isinstance(found, types.MethodType) and "assert_size_stride" in found.__func__.__globals__:
            return found
        if isinstance(found, functools.partial):
            waiting += [found.func, *found.args]
        cells = getattr(found, "__closure__", None) or ()
        waiting += [v for v in (cell_value(c) for c in cells) if callable(v) and id(v) not in seen]
        seen.update(map(id, waiting))
    raise TypeError(
        f"Nothing that Inductor wrote was found behind {function!r}; is this version of torch supported?"
    )


def generated_line() -> tuple[str, int] | None:
    """Return the running line of Inductor's code as file and number; None outside of such code."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and "assert_size_stride" not in frame.f_globals:
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def cell_value(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def empty_on(device: str, sizes, strides, dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


class Products:
    """Torch's own kernels that an artifact calls. Those that allocate memory run on fake tensors, so that it
    is counted; others do nothing."""

    bmm, baddbmm = staticmethod(torch.bmm), staticmethod(torch.baddbmm)

    def __getattr__(self, name: str) -> Silent:
        return Silent()


class Silent:
    """Accepts every call and does nothing."""

    def __getattr__(self, name: str) -> Silent:
        return self

    def __call__(self, *args, **kwargs) -> None:
        return None
