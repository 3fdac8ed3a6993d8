"""Look at what the backend makes of a function, without leaving anything compiled behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .backend import Chain
from .config import Config
from .report import Report


def explain(fn: Callable, *args, streambp_options: Mapping[str, object] | None = None, **kwargs) -> Report:
    """Compile ``fn`` for these arguments, run its forward once, and report every region.

    fn                a function or module, as given to ``torch.compile``
    args, kwargs      its arguments
    streambp_options  the ``options=`` of the backend (its own name, so that none of ``fn``'s arguments is shadowed)

    The report prints itself; ``report.regions[i]`` leads to the split, joint and chunk-body graphs as ``torch.fx.GraphModule``.
    Raises ValueError for unknown options.
    """
    report = Report()
    config = Config.of(None, streambp_options)

    def backend(module, example_inputs):
        return Chain(module, example_inputs, config, report).compiled()

    torch.compile(fn, backend=backend)(*args, **kwargs)
    return report
