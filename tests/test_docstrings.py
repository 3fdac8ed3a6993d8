"""Docstrings of the product read at first sight: subject, verb, object, in at most twenty words.

A function says what it does (``Return the …``, ``Split the …``) or asks what it answers (``Does the …?``).
A property, a class or a module may be a noun.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted([*(ROOT / "streambp_compile").rglob("*.py"), *(ROOT / "passes").rglob("*.py")])
LONGEST = 20  # words of a first sentence
QUESTIONS = frozenset("Are Can Could Did Do Does Has Have Is May Must Should Was Were Will Would".split())
VERBS = frozenset(
    """
    Accept Accumulate Activate Adapt Add Advance Agree Align Allocate Allow Analyse Annotate Answer Append
    Apply Approximate Arrange Assemble Assert Assign Assume Attach Attend Await Balance Begin Bind Bound
    Break Broadcast Build Cache Calculate Call Cancel Capture Carry Cast Change Check Choose Classify
    Clear Clone Close Collapse Collect Combine Compare Compile Complete Compose Compute Concatenate
    Configure Confirm Connect Construct Consume Contract Convert Convolve Copy Correct Count Cover Create
    Cut Decide Declare Decompose Defer Define Delay Delete Derive Describe Detach Detect Determine Disable
    Discard Distribute Divide Draw Drop Duplicate Eliminate Emit Enable End Ensure Enter Enumerate Erase
    Estimate Evaluate Exchange Exclude Execute Exit Expand Explain Export Express Extend Extract Factor
    Fetch Fill Filter Find Finish Fit Flatten Flip Fold Follow Forbid Forget Format Free Fuse Gather
    Generate Get Give Group Guard Handle Hash Hide Hold Identify Ignore Import Include Increase Infer
    Initialize Inline Insert Inspect Install Interpret Intersect Invert Invoke Join Keep Label Launch Lay
    Lead Learn Leave Let Lift Limit Link List Load Locate Log Look Lower Make Map Mark Mask Match
    Materialize Measure Merge Mirror Move Multiply Name Narrow Negate Normalize Note Number Offer Offload
    Omit Open Order Override Pack Pad Parse Partition Pass Patch Peel Permute Pick Place Plan Plot Prefer
    Prepare Preserve Print Propagate Prove Prune Push Put Raise Reach Read Rebuild Receive Recognize
    Recompute Record Reduce Refer Refuse Register Reject Relate Release Remember Remove Rename Render
    Reorder Repeat Replace Replay Report Represent Request Require Reserve Reset Reshape Resolve Restore
    Restrict Return Reverse Revert Rewrite Roll Round Route Run Sample Save Say Scale Scan Scatter
    Schedule Search Select Send Separate Serialize Serve Set Share Shift Show Shrink Simplify Simulate
    Skip Slice Solve Sort Spend Split Stack Start State Stop Store Stream Subtract Sum Support Swap Sweep
    Synchronize Take Tell Test Tie Trace Track Transfer Transform Translate Transpose Traverse Treat Trim
    Truncate Try Turn Undo Unfold Unify Unpack Unroll Unwrap Update Use Validate Verify View Visit Wait
    Walk Warn Weigh Wrap Write Yield Zero
    """.split()
)
# Beginnings that turn a sentence around, for nouns as well.
TURNED = frozenset("Of That Those These What Where Whether Which Who Whose Why How In For From".split())
PRIVATE = re.compile(
    r"\b(is nothing to|nothing but|computed again is|no more than what|of which nothing|what follows|"
    r"is told|are told|what is left of|such that are|nobody|hands? on|given up|made again)\b"
)


@dataclass(frozen=True)
class Docstring:
    """One docstring, and what it describes: ``function``, ``property``, ``class`` or ``module``."""

    name: str
    line: int
    kind: str
    text: str

    @property
    def first(self) -> str:
        """Its first sentence."""
        paragraph = " ".join(self.text.split("\n\n")[0].split())
        return re.split(r"(?<=[.?])\s+(?=[A-Z`])", paragraph)[0]

    def faults(self) -> Iterator[str]:
        words = self.first.split()
        if len(words) > LONGEST:
            yield f"{len(words)} words"
        if words[0] in TURNED:
            yield f"begins with {words[0]}"
        if self.kind == "function" and words[0] not in VERBS | QUESTIONS:
            yield f"begins with {words[0]}, no verb"
        if words[0] in QUESTIONS and not self.first.endswith("?"):
            yield "no question mark"
        if found := PRIVATE.search(" ".join(self.text.split())):
            yield f"says {found[0]!r}"


def kind_of(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "module"
    decorators = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
    return "property" if decorators & {"property", "cached_property"} else "function"


def docstrings(path: Path) -> Iterator[Docstring]:
    def visit(node: ast.AST, name: str) -> Iterator[Docstring]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield Docstring(name or "module", getattr(node, "lineno", 1), kind_of(node), text)
        for child in ast.iter_child_nodes(node):
            inner = getattr(child, "name", None)
            yield from visit(child, f"{name}.{inner}".lstrip(".") if isinstance(inner, str) else name)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_docstrings(path):
    faults = [f"{path}:{d.line} {d.name}: {f}: {d.first}" for d in docstrings(path) for f in d.faults()]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Return the rows of a value.", None),
        ("Does a node read tokens?", None),
        ("Does a node read tokens.", "no question mark"),
        ("What is known of a node.", "begins with What"),
        ("Bytes of a value.", "begins with Bytes, no verb"),
        ("Return " + "very " * 20 + "much.", "22 words"),
    ],
)
def test_faults(text, fault):
    found = list(Docstring("f", 1, "function", text).faults())
    assert found[:1] == ([fault] if fault else [])
