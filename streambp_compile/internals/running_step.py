"""What a running step asks of torch.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import torch


def assert_on_device(condition: torch.Tensor, text: str) -> None:
    """Raise RuntimeError if a boolean is false; on a GPU the device itself stops, without synchronisation."""
    torch._assert_async(condition, text)


def graph_is_kept() -> bool:
    """Does the running backward keep its graph (``retain_graph=True``), and so the saved values?"""
    return torch._C._autograd._get_current_graph_task_keep_graph()
