"""Plan a program for a device: chunk lengths, attention kernels, and fusions at full length."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch.fx import Node

from ..ir import (
    Analysis,
    ChosenKernel,
    Plan,
    Program,
    Size,
    Sweep,
    Tokens,
    arguments,
    computed_by,
    hint,
    is_tensor,
    shape_of,
    takes_kernel,
    value_of,
)
from ..kernels.attention import Attention, KernelChoice, Target, choose, in_one_call
from ..kernels.simulated_device import device_type
from .choices import DEFAULT, Choices
from .chunk_length import chunk_lengths
from .devices import REFERENCE_CPU, Device
from .fusions import fusions

CPU = Target("cpu")


def plan(
    program: Program,
    analysis: Analysis,
    choices: Choices = DEFAULT,
    target: Target = CPU,
    device: Device = REFERENCE_CPU,
    alone: Collection[Node] = (),
) -> Plan:
    """Plan how a program runs.

    choices  how it spends memory and time
    target   the device that kernels run on
    device   the device that chunk lengths are chosen for
    alone    nodes that are fused with no other at full length
    """
    kernels = {n: chosen(n, target, choices) for n in computed_by(program) if takes_kernel(n)}
    entries = () if choices.chunk_size is not None else entries_per_token(program, analysis)
    return Plan(chunk_lengths(program, analysis, choices, device), kernels, fusions(program, alone), entries)


def entries_per_token(program: Program, analysis: Analysis) -> tuple[Size, ...]:
    """Count the numbers per token of the widest value of each sweep, if the batch may change. Returns none
    where states of scans are saved at the starts of chunks, whose length is fixed then."""

    def of_value(node: Node) -> Size:
        mark, shape = analysis.tokens_of(node).rows, value_of(node).shape
        return math.prod(s for d, s in enumerate(shape) if d != mark.dim) * mark.step_size

    def of_sweep(sweep: Sweep) -> Size:
        facts = {n: analysis.facts[n] for n in sweep.nodes if is_tensor(n)}
        rows = (n for n, fact in facts.items() if isinstance(fact, Tokens) and fact.keys is None)
        return max(map(of_value, rows), key=hint, default=1)

    if any(s.saved_states or s.restored_states for s in program.sweeps):
        return ()
    found = tuple(map(of_sweep, program.sweeps))
    return found if any(isinstance(size, torch.SymInt) for size in found) else ()


def chosen(node: Node, target: Target, choices: Choices) -> ChosenKernel:
    """Choose the kernel of an attention node, and that of its calls whose shapes the data decides."""

    def choice(uneven: bool) -> KernelChoice:
        found = kernel_for(node, target, uneven)
        return in_one_call(found) if choices.memory_to_spare else found

    usual = choice(False)
    name, reason = usual.kernel.name, str(usual)
    if arguments(node)["ranges"] is None:
        return ChosenKernel(name, reason)
    other = choice(True)
    if other.kernel.name == name:
        return ChosenKernel(name, reason)
    return ChosenKernel(name, f"{reason}; for rows and keys that ranges decide: {other}", other.kernel.name)


def kernel_for(node: Node, target: Target, uneven: bool = False) -> KernelChoice:
    """Choose the kernel of an attention node on a target. The operands' device decides if only one of the two
    is a CPU.

    uneven  for calls whose rows and keys follow from the data
    """
    given = arguments(node)
    like, value = value_of(given["query"]), given["value"]
    known = (target.device == "cpu") == (device_type(like) == "cpu")
    masked = given["mask"] is not None
    asked = Attention(like.dtype, shape_of(given["query"])[-1], shape_of(value)[-1], masked, uneven)
    return choose(asked, target if known else Target(device_type(like)))
