"""Show what the backend makes of a function. Nothing compiled is left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.utils._pytree import tree_leaves

from . import internals
from .config import Config
from .page.files import trace
from .passes.phases import summary
from .report import Report
from .runtime.memory_simulation import simulate, without_data


def explain(
    fn: Callable,
    *args,
    streambp_options: Mapping[str, object] | None = None,
    streambp_mode: str | None = None,
    **kwargs,
) -> Report:
    """Compile ``fn`` for these arguments, run its forward once, and report every region and the memory of a
    step.

    fn                a function or module, as given to ``torch.compile``
    args, kwargs      its arguments; with fake tensors, on any device, nothing is computed
    streambp_options  the ``options=`` of the backend
    streambp_mode     the ``mode=`` of ``torch.compile``

    The report prints itself. ``report.regions[i]`` leads to the split, joint and chunk-body graphs as
    ``torch.fx.GraphModule``.

    Raises ValueError for unknown options and modes.
    """
    from .backend import Chain  # not with this package: it looks at the libraries that are there by then

    internals.ignore_library_logging()  # this module may be older than the libraries
    report = Report()
    config = Config.of(streambp_mode, streambp_options)

    fake = any(map(internals.is_fake, tree_leaves((args, kwargs))))

    def backend(module, example_inputs):
        call = Chain(module, example_inputs, config, report).compiled()
        return without_data(call) if fake else call

    torch.compile(fn, backend=backend)(*args, **kwargs)
    predict(report)
    trace(report)
    return report


def predict(report: Report) -> None:
    """Simulate the step if it is one graph; between several graphs, code runs that only the user knows."""
    if len(report.steps) != 1:
        return
    try:
        report.peak = simulate(*report.steps[0])
    except Exception as error:  # an operator that has no fake form: the report is still good
        internals.log.debug("simulating a step failed", exc_info=True)
        report.notes.append(
            f"note: The peak memory of a step could not be predicted ({summary(error)}); the rest of this "
            "report is complete."
        )
