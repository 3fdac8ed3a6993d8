"""Values of a graph that apply the same function to each of several consecutive pieces.

Together they are one function of the whole value. Nodes are anything that has operands: nodes of a graph
(a loss that is unrolled over pieces of hidden states), or recorded operations (a loop over rows of
logits outside the compiled function).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from .phases import check_time

N = TypeVar("N", bound=Hashable)


class Correspondence(Generic[N]):
    """Classes of values that do the same, each to its own piece.

    Each of these values is computed from one piece alone.

    count     number of pieces of each value that is split
    touched   node → the pieces that it depends on
    class_of  node → its class
    classes   class → piece → the first node that does it to that piece
    """

    def __init__(
        self,
        nodes: Iterable[N],
        pieces: Mapping[N, tuple[int, int]],
        operands: Callable[[N], Iterable[N]],
        describe: Callable[[N, Correspondence[N]], str | None],
    ):
        """Number the classes.

        nodes     in order: operands come first
        pieces    node → the split value that it is a piece of, and the number of the piece
        operands  node → the nodes that it is computed from
        describe  node, and this object (whose `name` names its operands) → all that it does, as text;
                  None: unlike any other node
        """
        self.pieces, self.count = pieces, len({piece for _, piece in pieces.values()})
        self.touched: dict[N, set[int]] = {}
        self.class_of: dict[N, int] = {}
        self.classes: dict[int, dict[int, N]] = {}
        numbers: dict[str, int] = {}  # in place of texts, which would double with each layer if nested
        nodes = list(nodes)
        for node in nodes:
            check_time()
            found = {pieces[node][1]} if node in pieces else set()
            for operand in () if found else operands(node):
                found |= self.touched.get(operand, set())
            if found:
                self.touched[node] = found
        for node in nodes:
            check_time()
            made = node in self.touched and node not in pieces and len(self.touched[node]) == 1
            if not made or not all(map(self.is_known, operands(node))):
                continue
            text = describe(node, self)
            if text is not None:
                key = numbers.setdefault(text, len(numbers))
                self.class_of[node] = key
                self.classes.setdefault(key, {}).setdefault(next(iter(self.touched[node])), node)
        self.complete = [key for key, members in self.classes.items() if len(members) == self.count]

    def is_known(self, node: N) -> bool:
        return node not in self.touched or node in self.pieces or node in self.class_of

    def name(self, node: N) -> str | None:
        """Return a name for an operand that is the same in every piece; None if it depends on no piece."""
        if node in self.pieces:
            return f"%{self.pieces[node][0]}"
        return f"<{self.class_of[node]}>" if node in self.class_of else None
