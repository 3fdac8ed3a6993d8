"""What the machine says of a device: which attention kernels may run there."""

from __future__ import annotations

import torch

from .passes.attention import Target

SWITCHES = {"flash": "flash_sdp_enabled", "cudnn": "cudnn_sdp_enabled", "efficient": "mem_efficient_sdp_enabled"}


def target_of(device: torch.device) -> Target:
    """The description by which kernels are chosen for a device; without its capability, if no such device is there."""
    if device.type != "cuda":
        return Target(device.type)
    if torch.version.hip:
        return Target("hip")
    there = torch.cuda.is_available()
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return Target("cuda", torch.cuda.get_device_capability(device) if there else None,
                  frozenset(name for name, switch in SWITCHES.items() if not getattr(torch.backends.cuda, switch)()), active or "")
