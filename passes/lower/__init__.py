"""Write each sweep's chunk body as an FX graph: the same nodes at length C.

Nothing is decided here: roles, directions and ranges are read from the partition and the analysis. A body's
inputs are
`Binding`s, which say how a driver cuts each one for a chunk; its size arguments are symbols, so that one
compiled body serves every
chunk, the short last one, every prefix and every sequence length.
"""

from __future__ import annotations

from ..ir import Analysis, arguments
from ..kernels.attention import Target
from ..partition import Program
from ..rules import form_of
from ..rules.facets import Form
from .reading import Binding, Body, kernel_for, total_dtype
from .writer import Writer

__all__ = ["Binding", "Body", "lower", "total_dtype"]


def lower(program: Program, analysis: Analysis, target: Target = Target("cpu")) -> tuple[Body, ...]:
    """One body per sweep.

    target  the device that they are written for; attention between sweeps gets its kernel's name, too
    """
    for node in (
        n for stage in program.whole for n in stage if form_of(n) in (Form.ATTENTION, Form.ATTENTION_BACKWARD)
    ):
        given = arguments(node)
        choice = kernel_for(given["query"], given["value"], given["mask"], target)
        node.update_kwarg("kernel", choice.kernel.name)
    return tuple(Writer(sweep, analysis, target).write() for sweep in program.sweeps)
