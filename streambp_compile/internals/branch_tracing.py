"""Tracing of branches on whether a mask picks a row, by Dynamo.

Examples are ``if mask.any():`` and ``if rows.numel() == 0: continue``. The direction of such a branch
depends on the data, so Dynamo ends its graph there by default. A branch that only computes with picked
rows does nothing if there are none, so the side with picked rows can be traced for both cases. Two calls
in the graph enclose that side and hold the variables that it has changed. The backend proves the rest
(dynamo/rows/picked_branches.py), or has Dynamo trace again with a break.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch._dynamo.bytecode_analysis import JUMP_OPCODES, TERMINAL_OPCODES
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..passes.zero_values import are_written, condition_of, value_of
from .dynamo import modes_text

EFFECTS = ("mutation", "store_attr", "store_cell", "store_global", "register_hook")
"""Names of the calls by which Dynamo records changes of anything but local variables."""


LOOPING = ("GET_ITER", "FOR_ITER")


class CannotTakeBranch(Exception):
    """A branch was traced as if rows are picked, and does more than compute with them."""


def begin_branch(mask: torch.Tensor) -> None:
    """Mark the begin of a branch in a graph, which ends at `end_branch`. It may be left out where the mask is
    zero everywhere."""
    raise AssertionError("the backend removes this call")


def end_branch(begin: None, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
    """Mark the end of the branch that ``begin`` marks in a graph.

    before  the values of changed variables before the branch
    after   their values after it
    """
    raise AssertionError("the backend removes this call")


@dataclass(eq=False)
class Branch:
    """A branch that is being traced as if rows are picked.

    join   the instruction at which the other side continues; where that side returns at once, this
           side ends where the function returns
    begin  the call that begins it in the graph
    known  the objects that code could reach when it began
    """

    frame: InstructionTranslatorBase
    join: Instruction
    begin: Node
    known: dict[int, object]
    variables: dict[str, VariableTracker] = field(init=False)
    rest: tuple = field(init=False)

    def __post_init__(self) -> None:
        self.variables = {n: v.unwrap() for n, v in self.frame.symbolic_locals.items()}
        self.rest = self.state()

    def state(self) -> tuple:
        """Return the state that must be the same after the branch: all but variables."""
        frame = self.frame
        return [v.unwrap() for v in frame.stack], len(frame.block_stack), modes_text()

    def ends_at(self, frame: InstructionTranslatorBase, here: Instruction) -> bool:
        returns = returned_by(self.frame, self.join) is not None and here.opname in RETURNS
        return self.frame is frame and (here is self.join or returns)

    def end(self, here: Instruction) -> None:
        """Write its end into the graph. Raises `CannotTakeBranch`."""
        stack, *rest = self.state()
        before_stack, *before_rest = self.rest
        pairs: list[tuple[VariableTracker | None, VariableTracker | None]] = []
        if here is self.join:
            for name in sorted(read_from(self.frame, self.join)):
                now = self.frame.symbolic_locals.get(name)
                pairs.append((self.variables.get(name), None if now is None else now.unwrap()))
        else:
            returned = stack.pop() if here.opname == "RETURN_VALUE" else ConstantVariable(here.argval)
            pairs.append((self.returned_instead(), returned))
        if rest != before_rest or list(map(id, stack)) != list(map(id, before_stack)):
            raise CannotTakeBranch
        changed = [(self.value(was), self.value(now)) for was, now in pairs if not is_same(was, now)]
        before, after = zip(*changed) if changed else ((), ())
        self.begin.graph.call_function(end_branch, (self.begin, before, after))

    def returned_instead(self) -> VariableTracker | None:
        """Return the value that the other side returns."""
        load = returned_by(self.frame, self.join)
        if load.opname.startswith("LOAD_FAST"):
            return self.variables.get(load.argval)
        return ConstantVariable(load.argval)

    def value(self, variable: VariableTracker | None) -> Node:
        node = variable.as_proxy().node if isinstance(variable, TensorVariable) else None
        if node is None or node.graph is not self.begin.graph:
            raise CannotTakeBranch
        return node

    def changes(self, thing: object) -> bool:
        """Did this object exist before the branch?"""
        new = isinstance(thing, VariableTracker) and thing.source is None
        return not new or id(thing) in self.known


RETURNS = ("RETURN_VALUE", "RETURN_CONST")


def returned_by(frame: InstructionTranslatorBase, inst: Instruction) -> Instruction | None:
    """Find the instruction that names the returned variable or constant, if ``inst`` returns at once."""
    after = frame.indexof[inst] + 1
    loads = inst.opname.startswith("LOAD_FAST") or inst.opname == "LOAD_CONST"
    if loads and after < len(frame.instructions) and frame.instructions[after].opname == "RETURN_VALUE":
        return inst
    return inst if inst.opname == "RETURN_CONST" else None


def is_same(was: VariableTracker | None, now: VariableTracker | None) -> bool:
    constants = isinstance(was, ConstantVariable) and isinstance(now, ConstantVariable)
    return was is now or constants and was.value is now.value


def take_branches(
    may: Callable[[object], bool],
    give_up: Callable[[object], None],
    in_loops: Callable[..., AbstractContextManager],
) -> None:
    """Make Dynamo trace branches on whether a mask picks a row as if it does.

    may       decides for an `OutputGraph` whether it should
    give_up   called where a branch does more than compute with picked rows; raises Dynamo's restart
    in_loops  context around each instruction, for loops of which each round is a branch
    """
    before = InstructionTranslatorBase.step
    if hasattr(before, "__wrapped__"):
        return

    @functools.wraps(before)
    def step(self: InstructionTranslatorBase) -> bool:
        if self.instruction_pointer is None or not may(self.output):
            return before(self)
        found = branches_of(self.output)
        here = self.instructions[self.instruction_pointer]
        try:
            while found and found[-1].ends_at(self, here):
                found.pop().end(here)
        except CannotTakeBranch:
            give_up(self.output)
        if begins(self, here):
            return True
        if here.opname not in LOOPING:
            return before(self)
        with in_loops(self, here, give_up):
            return before(self)

    InstructionTranslatorBase.step = step
    for name in EFFECTS:
        setattr(SideEffects, name, watching(getattr(SideEffects, name), give_up))


def branches_of(output: object) -> list[Branch]:
    """Return the branches that are being traced into a graph, the innermost last."""
    return vars(output).setdefault("branches", [])


def watching(before: Callable, give_up: Callable[[object], None]) -> Callable:
    """Wrap a function that Dynamo calls for a side effect, so that it calls ``give_up`` inside a branch."""

    @functools.wraps(before)
    def changing(self: SideEffects, thing: object, *args: object, **kwargs: object) -> object:
        output = self.output_graph_weakref()
        if output is not None:
            if any(b.changes(thing) for b in branches_of(output)):
                give_up(output)
            known_objects(output).pop(id(thing), None)
        return before(self, thing, *args, **kwargs)

    return changing


def begins(frame: InstructionTranslatorBase, jump: Instruction) -> bool:
    """Begin a branch if the next instruction branches on whether a mask picks a row. Returns whether it
    did."""
    wants_true, wants_false = (jump.opname.endswith(end) for end in ("IF_TRUE", "IF_FALSE"))
    if not jump.opname.startswith("POP_JUMP") or not (wants_true or wants_false) or not frame.stack:
        return False
    found = condition(frame.stack[-1])
    if found is None:
        return False
    mask, if_none = found
    jumps, at = if_none is wants_false, frame.instruction_pointer
    sides = [frame.indexof[jump.target], at + 1]
    picked, none = sides if jumps else reversed(sides)
    join = goes_on_at(frame, none)
    returns = returned_by(frame, frame.instructions[join]) is not None
    if not reaches(frame, picked, join, returns):  # the side with rows raises, as an assertion does
        return False
    frame.current_instruction = jump
    frame.instruction_pointer = at + 1
    frame.pop()
    branches_of(frame.output).append(begun(frame, frame.instructions[join], mask))
    if jumps:
        frame.jump(jump)
    return True


def begun(frame: InstructionTranslatorBase, join: Instruction, mask: Node) -> Branch:
    """Begin a branch here."""
    begin = mask.graph.call_function(begin_branch, (mask,))
    frame.output.took_branch = True
    return Branch(frame, join, begin, reachable_from(frame))


def goes_on_at(frame: InstructionTranslatorBase, at: int) -> int:
    """Find the first instruction from there that is neither a NOP nor an unconditional jump."""
    seen: set[int] = set()
    while at not in seen:
        seen.add(at)
        inst = frame.instructions[at]
        if inst.opname == "NOP":
            at += 1
        elif inst.opcode in JUMP_OPCODES and inst.opcode in TERMINAL_OPCODES:
            at = frame.indexof[inst.target]
    return at


def reaches(frame: InstructionTranslatorBase, start: int, goal: int, returns: bool) -> bool:
    """Can one instruction lead to another, or, with ``returns``, to the end of the function?"""
    found: set[int] = set()
    stack = [start]
    while stack:
        at = stack.pop()
        if at not in found:
            found.add(at)
            stack += followers(frame, at)
    return goal in found or returns and any(frame.instructions[at].opname in RETURNS for at in found)


def followers(frame: InstructionTranslatorBase, at: int) -> list[int]:
    """List the instructions that may run after one."""
    inst, found = frame.instructions[at], []
    if inst.opcode in JUMP_OPCODES:
        found.append(frame.indexof[inst.target])
    if inst.exn_tab_entry:
        found.append(frame.indexof[inst.exn_tab_entry.target])
    if inst.opcode not in TERMINAL_OPCODES and at + 1 < len(frame.instructions):
        found.append(at + 1)
    return found


def read_from(frame: InstructionTranslatorBase, start: Instruction) -> set[str]:
    """Find the variables that may be read from an instruction on before they are written. Dynamo's own
    analysis counts variables as read that a loop writes first in each iteration."""
    first = frame.indexof[start]
    names = {i.argval for i in frame.instructions if i.opcode in NAMING}
    return {name for name in names if is_read_from(frame, first, name)}


def is_read_from(frame: InstructionTranslatorBase, start: int, name: str) -> bool:
    found: set[int] = set()
    stack = [start]
    while stack:
        at = stack.pop()
        if at in found:
            continue
        found.add(at)
        inst = frame.instructions[at]
        if inst.opcode in NAMING and inst.argval == name:
            if "STORE" not in inst.opname:
                return True
        else:
            stack += followers(frame, at)
    return False


NAMING = frozenset((*dis.haslocal, *dis.hasfree))


def reachable_from(frame: InstructionTranslatorBase) -> dict[int, object]:
    """Collect the objects that code can reach. Objects found for earlier branches are not walked again,
    except those that changed since."""
    effects = frame.output.side_effects
    roots = [*effects.id_to_variable.values(), *map(dict.copy, effects.store_attr_mutations.values())]
    at: InstructionTranslatorBase | None = frame
    while at is not None:
        roots += [*at.symbolic_locals.values(), *at.stack]
        at = at.parent
    known = known_objects(frame.output)
    VariableTracker.visit(lambda thing: known.setdefault(id(thing), thing), roots, known)
    return known


def known_objects(output: object) -> dict[int, object]:
    return vars(output).setdefault("known_objects", {})


def condition(value: VariableTracker) -> tuple[Node, bool] | None:
    """Find the mask that a condition tests for picked rows, and the condition's value if there are none.
    Where the mask picks rows, the condition may have either value: the side that is traced is then taken."""
    if isinstance(value, SymNodeVariable):
        return of_number(value)
    if not isinstance(value, TensorVariable):
        return None
    node = value.as_proxy().node
    entries, way, if_none = condition_of(node)
    whole = value_of(entries.node)
    if free_unbacked_symbols(whole) or not whole.dim() or whole.is_floating_point():
        return None
    return None if are_written(way, node.graph.nodes) else (entries.mask(), if_none)


def of_number(value: SymNodeVariable) -> tuple[Node, bool] | None:
    """Apply `condition` to a count of picked rows (``rows.numel() == 0``, ``len(rows)``)."""
    expression = getattr(getattr(value.sym_num, "node", None), "expr", None)
    symbols = getattr(expression, "free_symbols", set())
    if len(symbols) != 1 or not free_unbacked_symbols(value.sym_num):
        return None
    (symbol,) = symbols
    if_none, if_some = (holds(expression, symbol, count) for count in (0, 1 + ANY_COUNT))
    is_other = None not in (if_none, if_some) and if_none is not if_some
    nodes = iter(reversed(value.as_proxy().node.graph.nodes))
    made = next((n for n in nodes if symbol in n.meta.get("unbacked_bindings", ())), None)
    masks = [] if made is None else [n for n in made.all_input_nodes if is_mask(n)]
    return (masks[0], if_none) if len(masks) == 1 and is_other else None


ANY_COUNT = sympy.Symbol("count", integer=True, nonnegative=True)


def holds(expression: sympy.Basic, symbol: sympy.Symbol, count: object) -> bool | None:
    """Does a condition hold for a count, whatever number a symbol in it stands for? None if that is open."""
    found = expression.subs(symbol, count)
    found = found if isinstance(found, Boolean) else sympy.Ne(found, 0)
    return bool(found) if found in (sympy.true, sympy.false) else None


def is_mask(node: Node) -> bool:
    value = value_of(node)
    whole = isinstance(value, torch.Tensor) and not free_unbacked_symbols(value)
    return whole and value.dtype is torch.bool and value.dim() > 0
