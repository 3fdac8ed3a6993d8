"""Triton kernels of grouped products and of joined attention: their numbers by Triton's interpreter, and that
they compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from streambp_compile.passes.kernels import grouped_triton
from streambp_compile.passes.kernels.attention import join_triton

HERE = Path(__file__).parent


@pytest.mark.parametrize("command", ["grouped.py float32", "grouped.py float16", "join.py"])
def test_numbers(command):
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    script, *options = command.split()
    subprocess.run([sys.executable, HERE / f"interpreted_{script}", *options], env=environment, check=True)


def types_of(kernel, operands: str, constants: dict[str, object]) -> dict[str, str]:
    """The type of every argument, as a launch would tell it."""
    types = dict.fromkeys(kernel.arg_names, "i32")
    types.update(dict.fromkeys(("rows", "weight", "out", "left", "right"), operands))
    types.update({"order": "*i64", "ends": "*i32", "total": "*fp32", **dict.fromkeys(constants, "constexpr")})
    return {name: types[name] for name in kernel.arg_names}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "*bf16"), (torch.float32, "*fp32")])
def test_compiled(capability, dtype, name):
    tiles = grouped_triton.tiles_for(torch.empty(0, dtype=dtype))
    alike = dict(ROWS=tiles.side, COLUMNS=tiles.side, PRECISION=grouped_triton.precision())
    options = dict(num_warps=tiles.warps, num_stages=tiles.stages)
    for kernel, constants in (
        (grouped_triton.mm_kernel, dict(alike, GROUPS=128, SLOTS=256, WIDTH=tiles.depth)),
        (grouped_triton.outer_kernel, dict(alike, ROWS=tiles.depth, HEIGHT=tiles.side)),
    ):
        source = ASTSource(kernel, types_of(kernel, name, constants), constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"] and made.metadata.shared <= 99 * 1024


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_joining_kernel_compiles(capability):
    types = dict.fromkeys(join_triton.join_kernel.arg_names, "i32")
    constants = dict(ROWS=join_triton.ROWS, WIDTH=128)
    types |= dict.fromkeys(("out", "more"), "*bf16") | dict.fromkeys(("lse", "more_lse"), "*fp32")
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(join_triton.join_kernel, types, constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
