"""Triton kernels of grouped products against a loop over groups, on a CPU, by Triton's interpreter.

TRITON_INTERPRET=1 python interpreted_grouped.py float32
"""

import sys

import torch
from triton.runtime import interpreter

from streambp_compile.passes.kernels import grouped, grouped_triton

patch = interpreter._patch_lang_tensor


def with_integers(tensor, scope) -> None:
    """Up to Triton 3.6 loop bounds are arrays of one number, which numpy 2.4 does not take for integers."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def compare(dtype: torch.dtype) -> None:
    """Groups of several tiles, of some rows, of none; rows of no group; ragged widths; a transposed
    weight."""
    rows, weight = torch.randn(300, 40).to(dtype), torch.randn(5, 72, 40).to(dtype).transpose(1, 2)
    of_row = torch.randint(0, 7, (300,)).clamp(max=5)
    of_row[of_row == 2] = 3
    order, ends = grouped.sorted_groups(of_row, 5)
    made = grouped_triton.grouped_mm(rows, weight, order, ends)
    expected = grouped.run_loop(rows, weight, order, ends)
    assert made.dtype == dtype
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-2 if dtype is torch.float16 else 1e-4)
    total = torch.randn(5, 40, 72)
    expected = total.clone()
    grouped_triton.add_grouped_outer_(rows, made, order, ends, total)
    grouped.add_loop(rows, made, order, ends, expected)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-3)


if __name__ == "__main__":
    interpreter._patch_lang_tensor = with_integers
    torch.manual_seed(0)
    compare(getattr(torch, sys.argv[1]))
