"""Memory of training besides the step: weights, gradients, the optimizer's state, and shards of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from .layer_stacks import Stack

RANK = 16  # of LoRA's adapters by default
TRAINED = "full, lora, lora:RANK, head, or names:PATTERN"
OPTIMIZERS: Mapping[str, tuple[float, float, str]] = {  # bytes and element sizes for every trained element
    "none": (0, 0, "no optimizer"),
    "sgd": (0, 0, "SGD without momentum"),
    "momentum": (0, 1, "SGD with momentum in the weights' dtype"),
    "adamw": (0, 2, "AdamW: two moments in the weights' dtype, as torch.optim.AdamW keeps them"),
    "adamw32": (12, 0, "AdamW with a float32 copy of the weights and float32 moments"),
    "8bit": (2 + 8 / 256, 0, "AdamW with 8-bit moments and a float32 scale for every 256 of them"),
}


class LowRank(nn.Module):
    """A frozen linear layer and a learned product of two thin ones beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        where = dict(device=base.weight.device, dtype=base.weight.dtype)
        self.down = nn.Linear(base.in_features, rank, bias=False, **where)
        self.up = nn.Linear(rank, base.out_features, bias=False, **where)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 2.0


def freeze(model: nn.Module, stack: Stack | None, trained: str) -> None:
    """Disable gradients of all weights but those that are trained.

    trained  ``full``; ``lora`` or ``lora:RANK``, on all linear layers of the stack; ``head``; or
             ``names:PATTERN``, the parameters whose names a regular expression finds

    Raises ValueError for another text, and where nothing is left to train.
    """
    how, _, rest = trained.partition(":")
    if how == "full" and not rest:
        return
    model.requires_grad_(False)
    if how == "lora" and (not rest or rest.isdigit()):
        adapt(stack.layers(model) if stack is not None else [model], int(rest or RANK))
    elif how == "head" and not rest:
        head_of(model).requires_grad_(True)
    elif how == "names" and rest:
        for name, weight in model.named_parameters():
            weight.requires_grad_(re.search(rest, name) is not None)
    else:
        raise ValueError(f"Unknown choice of what is trained: {trained!r}. Valid are {TRAINED}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"Nothing is trained by {trained!r}: no parameter of the model is left to learn.")


def adapt(layers: Iterable[nn.Module], rank: int) -> None:
    for parent in [m for layer in layers for m in layer.modules()]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LowRank(child, rank))


def head_of(model: nn.Module) -> nn.Module:
    """Return the output embedding; for a model that names none, its last linear layer."""
    named = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if named is None and not linear:
        raise ValueError("The model has no linear layer that could be its head. Use names:PATTERN.")
    return linear[-1] if named is None else named


@dataclass(frozen=True)
class SteadyBytes:
    """Bytes on one device that are held in every step, term by term.

    weights, gradients, optimizer  the share of one device
    gathered   of sharded weights: those outside of the layers, and two layers, one of them ahead of
               time
    reduced    of sharded gradients: one layer's, before they are summed over devices
    elements, trained              numbers of weights, and of those that learn, of the whole model
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    reduced: int
    elements: int
    trained: int

    @property
    def bytes(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.gathered + self.reduced


def state_of(model: nn.Module, stack: Stack | None, optimizer: str, shards: int) -> SteadyBytes:
    """Count the bytes of training a model; FSDP2 or ZeRO-3 divides it between ``shards`` devices. Raises
    ValueError for an unknown optimizer."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"Unknown optimizer {optimizer!r}; valid are {', '.join(OPTIMIZERS)}")
    fixed, sizes, _ = OPTIMIZERS[optimizer]
    weights = list(model.parameters())
    learn = [p for p in weights if p.requires_grad]
    kept = sum(p.numel() * (fixed + sizes * p.element_size()) for p in learn)
    gathered = reduced = 0
    if shards > 1:
        layers = [] if stack is None else stack.layers(model)
        largest = max((nbytes(layer.parameters()) for layer in layers), default=0)
        inside = {id(p) for layer in layers for p in layer.parameters()}
        gathered = nbytes(p for p in weights if id(p) not in inside) + min(2, len(layers)) * largest
        reduced = max((nbytes(p for p in m.parameters() if p.requires_grad) for m in layers), default=0)
    return SteadyBytes(
        math.ceil(nbytes(weights) / shards),
        math.ceil(nbytes(learn) / shards),
        math.ceil(kept / shards),
        gathered,
        reduced,
        sum(p.numel() for p in weights),
        sum(p.numel() for p in learn),
    )


def nbytes(values: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in values)
