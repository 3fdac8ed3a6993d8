"""Somebody else's operators stream by their rows: the examples of docs/adding-an-op.md, as they are."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "custom_ops"
EXAMPLES = (
    "scan",
    "attention",
    "swiglu",
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_operator_of_somebody_else_streams(name, interpreted):
    """Every region of it streams, or the example raises; gradients are those of eager."""
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
