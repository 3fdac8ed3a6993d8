"""The page that a random model is written on: its weights, its inputs, and the lines of its forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True)
class Sizes:
    """What a model measures.

    batch, tokens  of its first batch; ``second`` is the length of another batch
    width          features of hidden states, a multiple of ``heads``
    vocabulary     number of token ids
    patch          tokens of a patch, where the text is made of patches
    """

    batch: int
    tokens: int
    second: int
    width: int
    heads: int
    vocabulary: int
    patch: int = 1

    @property
    def head(self) -> int:
        """Features of a head."""
        return self.width // self.heads


@dataclass
class Writer:
    """Collects what parts of a model write. A part takes the writer and names of values, and returns a name.

    exact    False where the model runs in low precision: nothing may then hang on the order of two numbers
    padding  None, ``"left"`` or ``"right"``: the batch has an input ``mask``
    packed   the batch has an input ``document`` that numbers the documents of a sequence
    layers   hidden states ``[B, T, D]`` in front of each layer
    values   values of attention of earlier layers ``[B, H, T, E]``
    terms    auxiliary losses, numbers
    """

    random: Random
    sizes: Sizes
    exact: bool = True
    padding: str | None = None
    packed: bool = False
    weights: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    count: int = 0

    def weight(self, *shape: int) -> str:
        """A parameter with normal entries, scaled by its last dimension but one."""
        name = f"w{len(self.weights)}"
        self.weights.append(f"self.{name} = weight{shape if len(shape) > 1 else f'({shape[0]})'}")
        return f"self.{name}"

    def vector(self, size: int) -> str:
        """A parameter with entries around one."""
        name = f"w{len(self.weights)}"
        self.weights.append(f"self.{name} = nn.Parameter(1 + 0.1 * torch.randn({size}))")
        return f"self.{name}"

    def buffer(self, text: str) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(f'self.register_buffer("{name}", {text})')
        return f"self.{name}"

    def given(self, name: str, text: str) -> str:
        """An input of the forward; ``text`` makes it from ``length`` and the generator ``make``."""
        self.inputs[name] = text
        return name

    def let(self, text: str, name: str = "x") -> str:
        """``x3 = text``; returns ``x3``."""
        self.count += 1
        self.do(f"{name}{self.count} = {text}")
        return f"{name}{self.count}"

    def do(self, line: str) -> None:
        self.lines.append(line)

    def pick(self, *options):
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def linear(self, x: str, inputs: int, outputs: int, name: str = "x") -> str:
        """A projection of the last of three dimensions, in one of its spellings."""
        matrix = self.weight(inputs, outputs)
        bias = self.weight(outputs) if self.chance(0.3) else ""
        plus = f" + {bias}" if bias else ""
        spellings = (
            f"F.linear({x}, {matrix}.t(){', ' + bias if bias else ''})",
            f"{x} @ {matrix}{plus}",
            f"torch.matmul({x}, {matrix}){plus}",
            f'torch.einsum("btd,de->bte", {x}, {matrix}){plus}',
            f"({x}.reshape(-1, {inputs}) @ {matrix}{plus}).view({x}.shape[0], {x}.shape[1], {outputs})",
        )
        return self.let(self.pick(*spellings), name)
