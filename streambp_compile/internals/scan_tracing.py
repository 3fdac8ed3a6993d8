"""Torch's associative scan, which Dynamo writes out while it traces.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._dynamo.symbolic_convert import tls
from torch._higher_order_ops.associative_scan import generic_associative_scan as torch_scan

from .distributed import defined_in

Scan = Callable[..., list[Tensor]]


def trace_scans_as(other: Callable[..., list[Tensor]], package: str) -> None:
    """Make Dynamo trace ``other`` instead of torch's associative scan, for the backends of a package.
    ``other`` takes torch's own scan, and then its arguments: the function that combines rows, the tensors,
    the dimension, additional inputs. Dynamo traces the scan's Python code before any backend is called."""
    module = sys.modules[torch_scan.__module__]  # the package has a function of the module's name
    scan = module.generic_associative_scan
    if hasattr(scan, "__wrapped__"):
        return

    @functools.wraps(scan)
    def generic_associative_scan(
        operator: Callable, leaves: Sequence[Tensor], dim: int = 0, additional_inputs: tuple = ()
    ) -> list[Tensor]:
        if is_traced_for(package):
            return other(scan, operator, leaves, dim, additional_inputs)
        return scan(operator, leaves, dim, additional_inputs)

    module.generic_associative_scan = generic_associative_scan


@torch._dynamo.assume_constant_result
def is_traced_for(package: str) -> bool:
    """Is Dynamo tracing for a backend of this package?"""
    translator = getattr(tls, "current_tx", None)
    return translator is not None and defined_in(translator.output.compiler_fn, package)
