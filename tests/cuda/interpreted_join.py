"""The Triton kernel that joins two parts of attention against torch's operators, by Triton's interpreter.

TRITON_INTERPRET=1 python interpreted_join.py
"""

import math

import torch

from streambp_compile.passes.kernels.attention import streaming
from streambp_compile.passes.kernels.attention.join_triton import join_


def compare(dtype: torch.dtype, tolerance: float) -> None:
    """Two sequences, rows that no block divides, padded features; rows that met no key in one part or in
    both."""
    out, more = (torch.randn(2, 77, 3, 24).to(dtype).transpose(1, 2) for _ in range(2))
    lse, more_lse = (5 * torch.randn(2, 3, 77) for _ in range(2))
    lse[0, 0, :5] = more_lse[0, 0, 3:9] = -math.inf
    wanted, wanted_lse = out.clone(), lse.clone()
    streaming.join(wanted, wanted_lse, more, more_lse, again=True)
    join_(out, lse, more, more_lse)
    unseen = wanted_lse == -math.inf
    assert unseen.sum() == 2 and not out[unseen].any()
    torch.testing.assert_close(out[~unseen], wanted[~unseen], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, wanted_lse)


if __name__ == "__main__":
    torch.manual_seed(0)
    compare(torch.float32, 1e-5)
    compare(torch.bfloat16, 1e-2)
