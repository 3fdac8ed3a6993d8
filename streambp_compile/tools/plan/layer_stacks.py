"""The stack of layers of a model: which of them are equal, and the same model with fewer.

The step of a few layers determines that of many. A stack may begin with layers that differ, and repeat a
pattern from there on (five layers with a window and one without, say).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.utils.checkpoint import checkpoint

Kind = tuple[object, ...]
SIMPLE = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Stack:
    """The largest ``ModuleList`` of a model.

    path    its name in the model
    depth   number of its layers
    prefix  layers before the pattern begins
    period  layers after which the pattern repeats
    """

    path: str
    depth: int
    prefix: int
    period: int

    def list_of(self, model: nn.Module) -> nn.ModuleList:
        found = model.get_submodule(self.path)
        assert isinstance(found, nn.ModuleList)
        return found

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return list(self.list_of(model))

    def shortened(self, model: nn.Module, layers: int) -> None:
        """Remove all layers but the first ``layers`` from a model."""
        del self.list_of(model)[layers:]

    def depths(self) -> tuple[int, ...]:
        """Choose two numbers of layers, a period apart, from which the whole is extrapolated. Only the whole
        depth is returned where it is not much deeper."""
        periods = (self.depth - self.prefix) // self.period
        beside = self.depth - periods * self.period  # the layers before the pattern, and the rest of a period
        less = beside + (2 if self.period == 1 else 1) * self.period
        more = less + self.period
        return (less, more) if more < self.depth else (self.depth,)


def stack_of(model: nn.Module) -> Stack | None:
    """Find the stack of a model; None if it has no list of modules."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not lists:
        return None
    path, layers = max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()))
    return Stack(path, len(layers), *pattern(kinds(list(layers))))


def pattern(found: list[Kind]) -> tuple[int, int]:
    """Find the prefix and the period of a sequence that leave the fewest elements to look at."""
    depth = len(found)

    def prefix_of(period: int) -> int:
        at = depth - period
        while at > 0 and found[at - 1] == found[at - 1 + period]:
            at -= 1
        return at

    candidates = [(prefix_of(period) + period, period) for period in range(1, depth + 1)]
    total, period = min(candidates)
    return total - period, period


def kinds(layers: list[nn.Module]) -> list[Kind]:
    """Describe layers so that equal descriptions mean equal layers. They contain the modules, the shapes of
    parameters, and the plain values that layers hold, except their own index."""
    values = [dict(plain_values(layer)) for layer in layers]
    counting = {
        key
        for key, first in values[0].items()
        if type(first) is int and all(v.get(key) == first + i for i, v in enumerate(values))
    }
    return [
        (
            tuple((n, type(m).__qualname__) for n, m in layer.named_modules()),
            tuple((n, tuple(p.shape), p.dtype) for n, p in layer.named_parameters()),
            tuple(sorted((k, repr(v)) for k, v in held.items() if k not in counting)),
        )
        for layer, held in zip(layers, values)
    ]


def plain_values(layer: nn.Module):
    for name, module in layer.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, SIMPLE) and not key.startswith("_"):
                yield f"{name}.{key}", value


def checkpointed(model: nn.Module, stack: Stack) -> None:
    """Wrap every layer of a stack in a checkpoint (torch.utils.checkpoint, the non-reentrant variant)."""
    for layer in stack.layers(model):
        layer.forward = checkpointing(layer.forward)


def checkpointing(forward):
    def run(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
