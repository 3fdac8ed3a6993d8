"""Kernels of some chunk bodies that are built while other bodies are still traced and written.

Inductor's generated module waits for its kernels when it is imported. Here it waits when it first runs,
or when `Kernels.wait` is called: the C++ compiler runs in processes of its own, and takes most of the
time.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from unittest import mock

import torch
from torch._inductor import exc
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.output_code import CompiledFxGraph

from .dynamo import OneAtATime

SMALLEST_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { out[0] = 1; }
"""


class Kernels:
    """The kernels of one artifact, some of which may still be built."""

    def __init__(self) -> None:
        self.building: list[tuple[AsyncCompile, dict]] = []
        self.graph: CompiledFxGraph | None = None
        self.call: Callable | None = None

    def of(self, run: Callable) -> None:
        """Attach these kernels to an artifact, whose first call waits for them."""
        if self.building and isinstance(run, CompiledFxGraph):
            self.graph, self.call = run, run.current_callable
            run.current_callable = functools.partial(Kernels.first_call, self, self.call)
        else:
            self.wait()

    def first_call(self, call: Callable, inputs: list) -> object:
        self.wait()
        return call(inputs)

    def wait(self) -> None:
        """Wait until all are built. Raises the errors of the C++ compiler."""
        with OneAtATime():
            while self.building:
                compiler, scope = self.building[-1]
                compiler.wait(scope)
                self.building.pop()
            if self.graph is not None:
                self.graph.current_callable, self.graph = self.call, None


@contextlib.contextmanager
def built_later(inputs: Sequence[object]) -> Iterator[Kernels]:
    """Compile by Inductor inside the context without waiting for kernels, if they run on a CPU."""
    kernels, thread, wait = Kernels(), threading.get_ident(), AsyncCompile.wait

    def later(compiler: AsyncCompile, scope: dict) -> None:
        if threading.get_ident() == thread:
            kernels.building.append((compiler, scope))
        else:  # another thread compiles something else
            wait(compiler, scope)

    if on_cpu(inputs):
        with OneAtATime(), mock.patch.object(AsyncCompile, "wait", later):
            yield kernels
    else:
        yield kernels


def on_cpu(values: Sequence[object]) -> bool:
    """Are all tensors among these values on the CPU?"""
    return all(v.device.type == "cpu" for v in values if isinstance(v, torch.Tensor))


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor finds, as a command; None where it finds none."""
    try:
        return get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError):
        return None


@functools.cache
def prepare_compiler() -> Future[str]:
    """Begin the steps that Inductor needs once for C++ code, in a thread. They find the vector instructions
    of the processor, which are returned, and then precompile torch's headers. Otherwise the first kernel
    waits for both."""
    found: Future[str] = Future()
    threading.Thread(target=prepare, args=(found,), daemon=True).start()
    return found


def prepare(found: Future[str]) -> None:
    try:
        found.set_result(str(pick_vec_isa()))
        CppPythonBindingsCodeCache.load_pybinding(["float*"], SMALLEST_KERNEL)
    except Exception as error:
        if not found.done():
            found.set_exception(error)
