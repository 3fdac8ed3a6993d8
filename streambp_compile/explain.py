"""Show how the backend would run a function. Nothing compiled is kept."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
from torch.utils._pytree import tree_leaves

from . import internals
from .config import Config
from .reporting.report import Report, page, predict
from .runtime.memory_simulation import main_device, without_data


def explain(
    fn: Callable,
    *args,
    streambp_options: Mapping[str, object] | None = None,
    streambp_mode: str | None = None,
    **kwargs,
) -> Report:
    """Plan ``fn`` for these arguments, and report every region and the memory of a step.

    fn                a function or module, as given to ``torch.compile``
    args, kwargs      its arguments, real or fake, on any device
    streambp_options  the ``options=`` of the backend
    streambp_mode     the ``mode=`` of ``torch.compile``

    Nothing is computed, and on a CPU no code is built. A function that breaks its graph is compiled and
    runs its forward once, because the code after a break may depend on values.

    The report prints itself, and gives access to all graphs. Raises ValueError for unknown options.
    """
    from .backend import Chain  # late: importing it inspects the libraries that are loaded by then

    internals.ignore_library_logging()  # this module may have been imported before the libraries
    report = Report()
    config = Config.of(streambp_mode, streambp_options)
    fake, caller = any(map(internals.is_fake, tree_leaves((args, kwargs)))), sys._getframe()

    with contextlib.ExitStack() as unbuilt:

        def backend(module, example_inputs):
            alone = not report.steps and internals.is_all_of(module, caller)
            if alone and main_device(example_inputs) == "cpu":
                unbuilt.enter_context(internals.without_code(like_triton=False))
            call = Chain(module, example_inputs, config, report).compiled()
            return stop if alone else without_data(call) if fake else call

        with contextlib.suppress(Planned):
            torch.compile(fn, backend=backend)(*args, **kwargs)
        predict(report)
    page().trace(report)
    return report


class Planned(BaseException):
    """Raised after the only graph of a function is planned, which need not run. It derives from
    BaseException, so that no handler of a user stops it."""


def stop(*_args: object) -> NoReturn:
    raise Planned
