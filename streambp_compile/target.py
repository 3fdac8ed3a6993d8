"""What the machine says of a device: which attention kernels may run there."""

from __future__ import annotations

import torch

from .passes.attention import Target

SWITCHES = {"flash": torch.backends.cuda.flash_sdp_enabled, "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled}


def target_of(device: torch.device, capability: tuple[int, int] | None) -> Target:
    """The description by which kernels are chosen.

    capability  of the CUDA device that is planned for. It need not be there; if another is, kernels must run on that one, too
    """
    if device.type != "cuda":
        return Target(device.type)
    if torch.version.hip:
        return Target("hip")
    if torch.cuda.is_available():
        here = torch.cuda.get_device_capability(device)
        capability = here if capability is None else min(here, capability)
    disabled = frozenset(name for name, is_on in SWITCHES.items() if not is_on())
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return Target("cuda", capability, disabled, active or "")
