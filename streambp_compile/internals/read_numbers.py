"""Numbers that a graph computes and Python reads: ``loss.item()`` under ``capture_scalar_outputs``.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from types import CodeType

from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator, tls
from torch._subclasses.fake_tensor import FakeTensor

from .distributed import defined_in
from .row_picking import written_by_user

READ_BY_PYTHON: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Functions that read numbers in a way that this backend cannot represent in a graph. Dynamo breaks their
graphs, as it does by default."""


def break_where_numbers_are_read(package: str) -> None:
    """Make Dynamo break graphs at numbers that are read, for the backends of a package. It does so only in
    functions for which `break_at_read_numbers` was called."""
    before = InstructionTranslator.run
    if not hasattr(before, "reads_numbers"):
        InstructionTranslator.run = read_by_python(before, package)


def read_by_python(before: Callable[[InstructionTranslator], None], package: str) -> Callable:
    @functools.wraps(before)
    def run(self: InstructionTranslator) -> None:
        asked = written_by_user(self.f_code) in READ_BY_PYTHON
        if not asked or not defined_in(self.output.compiler_fn, package):
            return before(self)
        with dynamo_config.patch(capture_scalar_outputs=False):
            before(self)

    run.reads_numbers = True
    return run


def break_at_read_numbers() -> None:
    """Make Dynamo trace this function again, with a graph break where a number is read. Does nothing where
    Dynamo is not tracing or may not break. Raises Dynamo's restart."""
    translator = getattr(tls, "current_tx", None)
    if translator is None or not dynamo_config.capture_scalar_outputs:
        return
    root = translator.output.root_tx
    if not (root.one_graph or root.error_on_graph_break):
        READ_BY_PYTHON.add(written_by_user(root.f_code))
        raise TensorifyScalarRestartAnalysis


@contextlib.contextmanager
def reading_no_numbers(like: FakeTensor) -> Iterator[None]:
    """Make reads of a fake tensor's number raise inside the context, instead of creating a symbol."""
    shapes = like.fake_mode.shape_env
    before = shapes.settings
    shapes.settings = dataclasses.replace(before, allow_scalar_outputs=False)
    try:
        yield
    finally:
        shapes.settings = before
